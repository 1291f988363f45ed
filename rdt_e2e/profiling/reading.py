"""What a node answered, and how its clock relates to the driver's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NodeReading:
    """What one node answered.

    Attributes:
        node_id: Ray's id of the node.
        address: Its IP address.
        error: Why it could not be read; None when it was.
        sample: From `sample_node`.
        lines: Lines of every process's file.
    """

    node_id: str
    address: str
    error: str | None = None
    sample: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class ClockOffset:
    """How a node's monotonic clock relates to the driver's.

    Attributes:
        seconds: What to subtract from the node's times.
        error_s: Bound on what is wrong with it: half the fastest round trip; 0 on the driver's machine,
            where it is the same clock.
    """

    seconds: float
    error_s: float

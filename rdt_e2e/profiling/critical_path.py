"""Level 1: the driver's own waits, one after another; with `driver_misc` they sum to the wall time.

Only what the driver waits for counts: a gather that hides behind a pull costs nothing here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

MISC = "driver_misc"
ALWAYS_SHOWN = ("update", MISC)
TOLERANCE_S = 1e-6


@dataclass(frozen=True)
class Bucket:
    """One wait of the driver."""

    name: str
    seconds: float


@dataclass(frozen=True)
class CriticalPath:
    """The end-to-end time, pause to resume, as a sum.

    Attributes:
        wall_s: From before the pause to after the resume, in seconds.
        buckets: The waits in order, `driver_misc` last.
    """

    wall_s: float
    buckets: tuple[Bucket, ...]

    @property
    def sums_up(self) -> bool:
        """Whether the buckets sum to the wall time, and none of them is negative."""
        total = math.fsum(bucket.seconds for bucket in self.buckets)
        whole = abs(total - self.wall_s) <= TOLERANCE_S
        return whole and all(bucket.seconds >= -TOLERANCE_S for bucket in self.buckets)

    @property
    def shown(self) -> tuple[Bucket, ...]:
        """The buckets without those of 0 seconds, which another engine would use."""
        return tuple(
            bucket for bucket in self.buckets if bucket.seconds or bucket.name in ALWAYS_SHOWN
        )

    def seconds_of(self, name: str) -> float:
        """Seconds of one bucket; 0 when there is none of that name."""
        return math.fsum(bucket.seconds for bucket in self.buckets if bucket.name == name)


def critical_path(seconds: Mapping[str, float], wall_s: float) -> CriticalPath:
    """Put a driver's steps and what lies between them together.

    Args:
        seconds: Duration of each step, in order.
        wall_s: The whole, measured around all steps.
    """
    misc_s = wall_s - math.fsum(seconds.values())
    steps = tuple(Bucket(name, spent) for name, spent in seconds.items())
    return CriticalPath(wall_s, (*steps, Bucket(MISC, misc_s)))

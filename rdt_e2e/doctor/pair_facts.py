"""What is measured between the two nodes; plain values, so that the checks need no Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeFacts:
    """One node, as a Ray worker on it sees it.

    Attributes:
        address: Its address in Ray.
        host: Host name and boot id: two nodes with the same are one machine.
        versions: Releases of Python and of the packages that must agree.
        environ: The environment that reached the worker.
        gids: RoCE v2 GID index by usable port.
    """

    address: str
    host: str
    versions: Mapping[str, str]
    environ: Mapping[str, str]
    gids: Mapping[str, int]


@dataclass(frozen=True)
class ReadFacts:
    """Reads of one device's memory in one direction, one per pair of ranks, all at the same time.

    Attributes:
        direction: `trainer -> inference` or the reverse.
        device: `cpu` or `cuda`.
        gb_per_s: Bandwidth of each pair in GB (10^9 bytes) per second; empty after an error.
        num_wrong: Pairs whose bytes arrived changed.
        lanes: Transports and devices that UCX named.
        error: What failed, or an empty string.
    """

    direction: str
    device: str
    gb_per_s: Sequence[float]
    num_wrong: int
    lanes: tuple[str, ...]
    error: str = ""


@dataclass(frozen=True)
class PairFacts:
    """Everything between the two nodes.

    Attributes:
        trainer: The trainer's node.
        inference: The inference fleet's node.
        clock_offset_s: How far the inference node's clock is ahead, in seconds.
        clock_error_s: How far that figure may be off, in seconds.
        reads: All reads, in the order in which they ran.
        traffic: Bytes that each RDMA port sent during the reads, by `role device:port`.
        nics: Each rank's NIC, by `role rank`: the value of UCX_NET_DEVICES and how it came about.
        num_unpinned: Ranks that UCX chooses NICs for by itself.
    """

    trainer: NodeFacts
    inference: NodeFacts
    clock_offset_s: float
    clock_error_s: float
    reads: tuple[ReadFacts, ...]
    traffic: Mapping[str, int]
    nics: Mapping[str, str]
    num_unpinned: int

"""Every figure a process reports about itself, with its unit and where it starts and ends.

A figure that could not be taken is None ("n/a"), never 0: see `hooks.py`.
"""

from collections.abc import Mapping
from types import MappingProxyType

NIXL_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "register_s": "NIXL memory registration",
        "register_calls": "registrations; 0 is expected once warm",
        "deregister_calls": "registrations ended; 0 is expected",
        "descs_s": "building, serialising and reading descriptors",
        "add_agent_s": "taking in a peer's metadata",
        "add_agent_calls": "times a peer's metadata was taken in",
        "remove_agent_calls": "peers dropped; 0 is expected",
    }
)
"""What the NIXL agent of any process does."""

CONSUMER_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "pulls": "pulls completed",
        "bytes": "bytes of these pulls",
        "pull_s": "issuing pulls and the blocking gets, on the one thread that does both",
        "issue_s": "the part of pull_s in which a pull is issued, waits for a free slot included",
        "control_s": "Ray asking a producer whether it has NIXL, once per pull",
        "produce_wait_s": "from a pull's issue to the start of its receive, summed over pulls",
        "meta_wait_s": "from a reading thread's start to the start of the receive",
        "receive_s": "the receive: peer metadata, descriptors, transfer, polling",
        "initialize_s": "building the NIXL transfer",
        "transfer_s": "from a transfer's start until it is first seen done, summed over transfers",
        "rdma_s": "time in which at least one transfer was under way",
        "transfer_calls": "transfers",
        "descriptors": "descriptors of all transfers",
        "check_calls": "completion polls",
        "process_s": "handling what landed: the five stages below",
        "checksum_s": "checksums of what landed",
        "materialize_s": "creating empty parameters",
        "scatter_s": "copying slices into parameters",
        "post_load_s": "post-load step of completed modules, without the copy",
        "kernel_copy_s": "copying the result into the storage the kernels read",
        "drain_s": "waiting, at the end, for processing and free signals",
        **NIXL_COLUMNS,
    }
)
"""What an inference rank reports; seconds end in _s, bytes are bytes, the rest are counts."""

PRODUCER_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "pulls": "pulls served",
        "specs": "slices asked for, over all pulls",
        "bytes": "bytes packed",
        "method_s": "serving, from a pull's first check to the last byte packed, summed over pulls",
        "wait_s": "the part of method_s in which the gather group was not published yet",
        "slice_s": "replaying op chains",
        "pack_s": "copying slices into the serve slot",
        "checksum_s": "checksums of what is sent",
        "gather_s": "collectives of the gather loop",
        "room_wait_s": "the gather loop waiting for a group to be freed",
        "held_s": "from a group's publication to its last free signal, summed over groups",
        "held_max_s": "the longest of these",
        "groups": "groups published",
        "extract_s": "Ray's step after a pull was served: device sync, registration, descriptors",
        "device_sync_s": "extract_s without registration and descriptors",
        **NIXL_COLUMNS,
    }
)
"""What a trainer rank reports; same units."""


def unit_of(column: str) -> str:
    """Unit of a column: "s", "bytes" or "" for a count."""
    if column.endswith("_s"):
        return "s"
    return "bytes" if column == "bytes" else ""

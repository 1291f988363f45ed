"""Level 2: what the update call waited for. Its figures overlap and are never added to level 1's.

Everything here is arithmetic on rows of figures, where None is "n/a": a result that needs one is n/a.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

BALANCED_SPREAD = 0.05
"""Below this spread of transfer seconds nobody waits for anybody."""
MATTERS = 0.02
"""A gap between the slowest and the fastest below this share of the update call is noise to it."""
BYTES_EXPLAIN = 0.5
"""Above this share of it, the spread of bytes explains the spread of seconds."""

VerdictKind = Literal["balanced", "byte imbalance", "transport straggler", "n/a"]
VERDICT_TEXTS: Mapping[VerdictKind, str] = {
    "balanced": "no rank waits for another one's transfer",
    "byte imbalance": "some ranks receive more bytes: balance the shards or experts",
    "transport straggler": "equal bytes, unequal time: look at the NIC or the placement of the slowest",
    "n/a": "transfers were not measured on every rank",
}


@dataclass(frozen=True)
class Row:
    """One process's figures of one sync.

    Attributes:
        rank: Consumer id or producer rank.
        node: Address of its node.
        host: Its host name.
        pid: Its process id.
        nic: The NICs it was restricted to; None where UCX chooses.
        columns: See `columns.py`.
    """

    rank: int
    node: str
    host: str
    pid: int
    nic: str | None
    columns: Mapping[str, float | None]

    def get(self, column: str) -> float | None:
        """A figure, or None where it is n/a."""
        return self.columns.get(column)

    @property
    def work_s(self) -> float | None:
        """Pull and process, in seconds."""
        return plus(self.get("pull_s"), self.get("process_s"))

    @property
    def gb_per_s(self) -> float | None:
        """Bytes over the seconds in which a transfer was under way, in 10^9 bytes per second."""
        return rate(self.get("bytes"), self.get("rdma_s"))


@dataclass(frozen=True)
class Share:
    """One line of a split.

    Attributes:
        label: What it is.
        seconds: None where it is n/a.
        depth: 0 for a whole, 1 for its parts, 2 for theirs.
        note: How to read it.
    """

    label: str
    seconds: float | None
    depth: int = 0
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether the ranks wait for one of them, and why.

    Attributes:
        kind: The verdict.
        text: In words.
        transfer_spread: (max - min) / mean of transfer seconds over ranks.
        bytes_spread: The same of bytes.
    """

    kind: VerdictKind
    text: str
    transfer_spread: float | None
    bytes_spread: float | None


@dataclass(frozen=True)
class Attribution:
    """Level 2 of one sync.

    Attributes:
        update_s: The update call.
        slowest_rank: The consumer with the most pull and process; None when none was measured.
        slowest_s: These, in seconds.
        fan_out_s: The rest of the update call: calling all ranks, and waiting for others. Negative
            where processing overlaps the pulls.
        verdict: Whether the ranks wait for one of them.
        consumer: Where the slowest rank's time went.
        producer: Where the producers' time went; the largest value over ranks.
    """

    update_s: float
    slowest_rank: int | None
    slowest_s: float | None
    fan_out_s: float | None
    verdict: Verdict
    consumer: tuple[Share, ...]
    producer: tuple[Share, ...]


def attribute(
    update_s: float,
    consumers: Sequence[Row],
    producers: Sequence[Row],
    served_s: Mapping[int, float],
) -> Attribution:
    """Attribute one update call.

    Args:
        update_s: Its seconds on the driver's clock.
        consumers: One row per inference rank that was heard from.
        producers: One row per trainer rank that was heard from.
        served_s: Seconds producers spent serving, by consumer.
    """
    ordered = slow_to_fast(consumers)
    slowest = ordered[0] if ordered and ordered[0].work_s is not None else None
    slowest_s = None if slowest is None else slowest.work_s
    return Attribution(
        update_s,
        None if slowest is None else slowest.rank,
        slowest_s,
        minus(update_s, slowest_s),
        judge(consumers, update_s),
        () if slowest is None else _consumer_split(slowest, served_s.get(slowest.rank)),
        _producer_split(producers) if producers else (),
    )


def slow_to_fast(consumers: Sequence[Row]) -> list[Row]:
    """Rows by pull and process, longest first; those not measured come last."""
    return sorted(
        consumers, key=lambda row: -1.0 if row.work_s is None else row.work_s, reverse=True
    )


def judge(consumers: Sequence[Row], update_s: float) -> Verdict:
    """Say whether ranks wait for one of them: by the spread of transfer seconds and of bytes.

    Args:
        consumers: One row per inference rank.
        update_s: Seconds of the update call that they took part in.
    """
    seconds = [row.get("rdma_s") for row in consumers]
    transfer = spread(seconds)
    size = spread([row.get("bytes") for row in consumers])
    kind: VerdictKind
    if transfer is None or size is None:
        kind = "n/a"
    elif transfer < BALANCED_SPREAD or _gap(seconds) < MATTERS * update_s:
        kind = "balanced"
    elif size > BYTES_EXPLAIN * transfer:
        kind = "byte imbalance"
    else:
        kind = "transport straggler"
    return Verdict(kind, VERDICT_TEXTS[kind], transfer, size)


def spread(values: Sequence[float | None]) -> float | None:
    """(max - min) / mean; None without values, where one is n/a, or where all are 0."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values) or not sum(known):
        return None
    return (max(known) - min(known)) * len(known) / sum(known)


def _gap(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return max(known) - min(known)


def plus(one: float | None, other: float | None) -> float | None:
    """Sum; None where a part is."""
    return None if one is None or other is None else one + other


def minus(one: float | None, other: float | None) -> float | None:
    """Difference; None where a part is."""
    return None if one is None or other is None else one - other


def rate(num_bytes: float | None, seconds: float | None) -> float | None:
    """10^9 bytes per second; None where a part is n/a or no time passed."""
    return None if num_bytes is None or not seconds else num_bytes / 1e9 / seconds


def largest(rows: Sequence[Row], column: str) -> float | None:
    """Largest value over rows; None where every one is n/a."""
    known = [value for row in rows if (value := row.get(column)) is not None]
    return max(known, default=None)


def total(rows: Sequence[Row], column: str) -> float | None:
    """Sum over rows; None where one is n/a or there is none."""
    values = [row.get(column) for row in rows]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _consumer_split(row: Row, served_s: float | None) -> tuple[Share, ...]:
    get = row.get
    wait_s, receive_s = get("produce_wait_s"), get("receive_s")
    peers_s = minus(receive_s, get("transfer_s"))
    dispatch_s = minus(wait_s, served_s)
    return (
        Share("pull", get("pull_s"), 0, "issuing and blocking gets"),
        Share("issue", get("issue_s"), 1, "slot waits included"),
        Share("Ray: NIXL check", get("control_s"), 2, "one call per pull"),
        Share("wait for the producer", wait_s, 1, "issue to receive; overlaps with depth > 1"),
        Share("serving", served_s, 2, "on the producer, for this rank"),
        Share("Ray dispatch and metadata", dispatch_s, 2, "the rest of the wait"),
        Share("receive", receive_s, 1),
        Share("transfer", get("transfer_s"), 2, "NIXL, submit to done"),
        Share("descriptors and peers", None if peers_s is None else max(peers_s, 0.0), 2),
        Share("process", get("process_s"), 0, "overlaps the pulls on CUDA"),
        Share("checksum", get("checksum_s"), 1),
        Share("materialize", get("materialize_s"), 1),
        Share("scatter", get("scatter_s"), 1),
        Share("post-load", get("post_load_s"), 1),
        Share("kernel copy", get("kernel_copy_s"), 1),
        Share("drain", get("drain_s"), 0, "at the end: processing and free signals"),
        Share("registration", get("register_s"), 0, "0 is expected once warm"),
    )


def _producer_split(rows: Sequence[Row]) -> tuple[Share, ...]:
    def most(column: str) -> float | None:
        return largest(rows, column)

    return (
        Share("serving", most("method_s"), 0, "summed over pulls, which run side by side"),
        Share("wait for the gather", most("wait_s"), 1),
        Share("slice", most("slice_s"), 1, "replay of op chains"),
        Share("pack", most("pack_s"), 1),
        Share("checksum", most("checksum_s"), 1),
        Share("Ray extract", most("extract_s"), 0, "after the method returned"),
        Share("device sync", most("device_sync_s"), 1),
        Share("registration", most("register_s"), 1, "0 is expected once warm"),
        Share("descriptors", most("descs_s"), 1),
        Share("gather", most("gather_s"), 0, "collectives"),
        Share("wait for a free slot", most("room_wait_s"), 0, "the gather loop"),
        Share("longest hold of a group", most("held_max_s"), 0, "publish to last free signal"),
    )

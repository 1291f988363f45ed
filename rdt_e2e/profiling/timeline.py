"""What ran when: records of all processes on one axis, the driver's clock, 0 at the sync's start."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Span:
    """One stretch of work.

    Attributes:
        node: Address of the node; empty for the driver.
        process: Such as "consumer 0".
        track: Row within the process.
        name: What ran.
        start_s: Seconds from the sync's start.
        end_s: The same.
        details: Figures to show with it.
    """

    node: str
    process: str
    track: str
    name: str
    start_s: float
    end_s: float
    details: Mapping[str, Any] = field(default_factory=dict)


def driver_spans(seconds: Mapping[str, float]) -> list[Span]:
    """The driver's steps, put end to end: what lies between them is not known by step."""
    spans, at = [], 0.0
    for step, spent in seconds.items():
        spans.append(Span("", "driver", "steps", step, at, at + spent))
        at += spent
    return spans


def process_spans(
    records: Iterable[Mapping[str, Any]],
    addresses: Mapping[str, str],
    starts: Mapping[str, float],
) -> list[Span]:
    """Spans of every record that has any.

    Args:
        records: Records of all nodes.
        addresses: Address by node id.
        starts: The sync's start on each node's own clock, by node id; a node without one is left
            out, because its times say nothing beside the others'.
    """
    found = []
    for record in records:
        node, start = record.get("node", ""), starts.get(record.get("node", ""))
        if start is None:
            continue
        process = f"{record['role']} {record['rank']}"
        for track, name, (began, ended), details in _stretches(record):
            found.append(
                Span(
                    addresses.get(node, node),
                    process,
                    track,
                    name,
                    began - start,
                    ended - start,
                    details,
                )
            )
    return found


def in_lanes(spans: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Spans as JSON holds them, each with the name of its row: its track, and more where they overlap.

    On a page they would hide each other; Perfetto drops one that begins within another one of its
    thread and ends after it.
    """
    lanes: dict[tuple[str, str, str], list[list[float]]] = defaultdict(list)
    for span in sorted(spans, key=lambda one: (one["start_s"], -one["end_s"])):
        track = span["track"]
        open_ends = lanes[span["node"], span["process"], track]
        lane = 0
        while lane < len(open_ends) and not _fits(open_ends[lane], span):
            lane += 1
        if lane == len(open_ends):
            open_ends.append([])
        open_ends[lane].append(span["end_s"])
        yield track if lane == 0 else f"{track} ({lane + 1})", span


def _fits(ends: list[float], span: Mapping[str, Any]) -> bool:
    """Whether a span comes after, or lies within, what a lane holds; forgets what has ended by then."""
    while ends and ends[-1] <= span["start_s"]:
        ends.pop()
    return not ends or span["end_s"] <= ends[-1]


Stretch = tuple[str, str, tuple[float, float], dict[str, Any]]


def _stretches(record: Mapping[str, Any]) -> Iterator[Stretch]:
    kind = record["kind"]
    if kind == "pull":
        peer = {key: record[key] for key in ("seq", "producer", "bytes")}
        name = f"pull {record['seq']} from {record['producer']}"
        yield "pulls", f"issue {record['seq']}", tuple(record["issue"]), peer
        yield "pulls", name, tuple(record["get"]), peer
        if record["transfer"] is not None:
            yield "transfer", name, tuple(record["transfer"]), peer
    elif kind == "serve":
        details = {key: record[key] for key in record if key.endswith("_s") or key == "bytes"}
        name = f"serve {record['seq']} to {record['consumer']}"
        yield f"serve consumer {record['consumer']}", name, tuple(record["span"]), details
    elif kind == "gather":
        yield "gather", record["group"], tuple(record["span"]), {}
    elif kind == "held":
        yield (
            f"group slot {record['group'] % 4}",
            f"group {record['group']}",
            tuple(record["span"]),
            {},
        )
    elif kind == "process":
        stages = dict(record["stages"])
        yield "process", f"process {record['seq']}", tuple(record["span"]), stages
    elif kind == "post_load":
        yield "post-load", "post-load", tuple(record["span"]), dict(record["stages"])
    elif kind == "span":
        yield "engine", record["name"], tuple(record["span"]), {}
    elif kind == "event":
        yield f"calls, {record['thread']}", record["stage"], tuple(record["span"]), {}

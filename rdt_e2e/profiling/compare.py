"""Several runs side by side: warm syncs against warm syncs, cold against cold, clock by clock."""

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rdt_e2e.profiling.figures import NOT_AVAILABLE, gb_per_s, seconds, size

CLOCKS = {"rdma_only": "RDMA only", "update_call": "update call", "end_to_end": "end to end"}

Getter = Callable[[Mapping[str, Any]], float | None]


def comparison(profiles: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[float | None]]]:
    """Rows of a comparison: label, kind ("s", "GB/s" or "bytes") and the value of each run.

    The values of warm syncs are medians over a run's warm syncs. Runs of different models or fleets
    can be compared too; the bytes say so.

    Args:
        profiles: Contents of `profile.json`, the baseline first.
    """
    rows: list[tuple[str, str, list[float | None]]] = [
        ("cold: bake", "s", [one["summary"]["cold"]["bake_s"] for one in profiles]),
        ("cold: end to end", "s", [one["summary"]["cold"]["end_to_end_s"] for one in profiles]),
        ("bytes of a sync", "bytes", _warm(profiles, _entry("bytes"))),
    ]
    for clock, label in CLOCKS.items():
        rows += [
            (label, "s", _warm(profiles, _entry("clocks", f"{clock}_s"))),
            (label, "GB/s", _warm(profiles, _entry("gb_per_s", clock))),
        ]
    rows += [
        (f"driver: {name}", "s", _warm(profiles, _listed("name", name, "critical_path", "buckets")))
        for name in _names(profiles, "name", "critical_path", "buckets")
    ]
    for side in ("consumer", "producer"):
        rows += [
            (f"{side}: {label}", "s", _warm(profiles, _listed("label", label, "attribution", side)))
            for label in _names(profiles, "label", "attribution", side)
        ]
    return rows


def comparison_text(profiles: Sequence[Mapping[str, Any]]) -> str:
    """The comparison as a table; with two runs, also the second against the first."""
    out = io.StringIO()
    console = Console(file=out, width=56 + 26 * len(profiles), no_color=True, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("warm syncs (medians)", overflow="fold", min_width=36)
    table.add_column("unit")
    for profile in profiles:
        table.add_column(str(profile["run"]), justify="right", overflow="fold")
    if len(profiles) == 2:
        table.add_column("change", justify="right")
    for label, kind, values in comparison(profiles):
        cells = [figure(kind, value) for value in values]
        if len(profiles) == 2:
            cells.append(change(values[0], values[1]))
        table.add_row(label, "" if kind == "bytes" else kind, *cells)
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def figure(kind: str, value: float | None) -> str:
    """A value as people read it."""
    return {"s": seconds, "GB/s": gb_per_s, "bytes": size}[kind](value)


def change(first: float | None, second: float | None) -> str:
    """The second against the first, as a percentage."""
    if first is None or second is None or not first:
        return NOT_AVAILABLE
    return f"{100 * (second / first - 1):+.1f} %"


def _warm(profiles: Sequence[Mapping[str, Any]], get: Getter) -> list[float | None]:
    found: list[float | None] = []
    for profile in profiles:
        values = [get(sync) for sync in profile["iterations"] if not sync["cold"]]
        known = [value for value in values if value is not None]
        found.append(statistics.median(known) if known else None)
    return found


def _entry(*path: str) -> Getter:
    def get(sync: Mapping[str, Any]) -> float | None:
        found: Any = sync
        for key in path:
            found = found[key]
        return None if found is None else float(found)

    return get


def _listed(key: str, name: str, *path: str) -> Getter:
    """The seconds of the entry with that name, in a list below `path`."""

    def get(sync: Mapping[str, Any]) -> float | None:
        entries = sync[path[0]][path[1]]
        return next((one["seconds"] for one in entries if one[key] == name), None)

    return get


def _names(profiles: Sequence[Mapping[str, Any]], key: str, *path: str) -> list[str]:
    """Names of a list's entries in any sync of any run, in order of appearance, once each."""
    return list(
        dict.fromkeys(
            one[key]
            for profile in profiles
            for sync in profile["iterations"]
            for one in sync[path[0]][path[1]]
        )
    )

"""The table of the bench `wire`: what a sync takes over what its bytes take, by rate. Pure."""

from collections.abc import Sequence

from rdt_e2e.bench.result import END_TO_END, UPDATE, RowResult, Spread

_COLUMNS = "{:<20}{:>10}{:>9}{:>10}{:>16}{:>8}{:>8}{:>9}{:>12}{:>7}"
_HEADER = (
    "gather, rate",
    "stream",
    "bytes/r",
    "sync s",
    "min - max",
    "over",
    "update",
    "over",
    "ms/group",
    "cores",
)


def format_wire_table(results: Sequence[RowResult]) -> list[str]:
    """Lay out the curve from overhead-bound to wire-bound.

    Columns: what a plain TCP stream gets, in MB/s; bytes over rate, in seconds; the sync end to end,
    median and extremes, and what it takes more than that; the update call alone, likewise; the part of a
    sync not hidden behind the wire, in milliseconds per gather group; cores busy in the median sync.

    Args:
        results: Rows in the order they are to appear.

    Returns:
        Lines.
    """
    lines = [_COLUMNS.format(*_HEADER), *map(_line, results)]
    for result in results:
        for part, samples in result.parts.items():
            spread = Spread.of(samples)
            lines.append(
                f"{result.row}, {part}: {spread.median:.3f} s "
                f"({spread.least:.3f} to {spread.most:.3f}, n {spread.num_samples})"
            )
        for when, problem in result.checks.items():
            verdict = f"WRONG: {problem}" if problem else "every tensor is what was sent"
            lines.append(f"{result.row}, weights after {when}: {verdict}")
    return lines


def unhidden_ms_per_group(result: RowResult) -> float:
    """Milliseconds of a median sync, per gather group, in which the wire alone does not explain it."""
    rate = result.facts["bytes_per_s"]
    wire_s = 0.0 if rate is None else result.num_bytes / rate
    over_s = Spread.of(result.seconds[END_TO_END]).median - wire_s
    return over_s / int(result.facts["num_groups"]) * 1e3


def _line(result: RowResult) -> str:
    if result.reason is not None:
        return f"{result.row:<20}n/a: {result.reason}"
    rate = result.facts["bytes_per_s"]
    sync, update = (Spread.of(result.seconds[clock]) for clock in (END_TO_END, UPDATE))
    wire_s = None if rate is None else result.num_bytes / rate
    busy = Spread.of(result.facts["busy_cores"]).median
    return _COLUMNS.format(
        result.row,
        f"{result.facts['stream_bytes_per_s'] / 1e6:.0f}",
        "" if wire_s is None else f"{wire_s:.2f}",
        f"{sync.median:.2f}",
        f"{sync.least:.2f} - {sync.most:.2f}",
        "" if wire_s is None else f"{sync.median / wire_s - 1:+.1%}",
        f"{update.median:.2f}",
        "" if wire_s is None else f"{update.median / wire_s - 1:+.1%}",
        f"{unhidden_ms_per_group(result):.1f}",
        f"{busy:.1f}",
    )

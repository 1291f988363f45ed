"""The benchmark's table: one line per row and clock, and what follows from them. Pure."""

from collections.abc import Sequence

from rdt_e2e.bench.result import CLOCKS, END_TO_END, TRANSPORT, RowResult, Spread

LIMIT_COPY = "limit: copy"
OURS = "ours"
_COLUMNS = "{:<22}{:<12}{:>10}{:>10}{:>10}{:>5}{:>10}{:>9}"


def format_table(results: Sequence[RowResult]) -> list[str]:
    """Lay out what was measured.

    Args:
        results: Rows in the order they are to appear.

    Returns:
        Lines: the table, parts of single rows, checks of the weights, ratios.
    """
    lines = [_COLUMNS.format("row", "clock", "median s", "min s", "max s", "n", "GB/s", "of copy")]
    limit = _median(results, LIMIT_COPY, TRANSPORT)
    for result in results:
        lines += _clock_lines(result, limit)
    for result in results:
        lines += _part_lines(result)
    for result in results:
        lines += _trace_lines(result)
    for result in results:
        lines += _check_lines(result)
    return lines + _ratio_lines(results)


def _clock_lines(result: RowResult, limit: float | None) -> list[str]:
    if result.reason is not None:
        return [f"{result.row:<22}n/a: {result.reason}"]
    lines = []
    for clock in CLOCKS:
        samples = result.seconds.get(clock)
        if not samples:
            continue
        spread = Spread.of(samples)
        share = "" if limit is None else f"{limit / spread.median:.1%}"
        if result.wrong_weights:
            share = "WRONG"
        lines.append(
            _COLUMNS.format(
                result.row,
                clock,
                f"{spread.median:.4f}",
                f"{spread.least:.4f}",
                f"{spread.most:.4f}",
                spread.num_samples,
                f"{result.num_bytes / spread.median / 1e9:.1f}",
                share,
            )
        )
    return lines


def _part_lines(result: RowResult) -> list[str]:
    lines = []
    for part, samples in result.parts.items():
        spread = Spread.of(samples)
        lines.append(
            f"{result.row}, {part}: {spread.median * 1e3:.2f} ms "
            f"({spread.least * 1e3:.2f} to {spread.most * 1e3:.2f}, n {spread.num_samples})"
        )
    return lines


def _trace_lines(result: RowResult) -> list[str]:
    lines = []
    traced = result.facts.get("traced_sync", {})
    for side in ("consumer", "producer"):
        for stage, (num_calls, seconds) in traced.get(f"{side}_totals", {}).items():
            lines.append(
                f"{result.row}, traced sync, {side}'s {stage}: {num_calls} calls, "
                f"{seconds * 1e3:.1f} ms in all"
            )
    return lines


def _check_lines(result: RowResult) -> list[str]:
    lines = []
    for when, problem in result.checks.items():
        verdict = f"WRONG: {problem}" if problem else "every tensor is what was sent"
        lines.append(f"{result.row}, weights after {when}: {verdict}")
    return lines


def _ratio_lines(results: Sequence[RowResult]) -> list[str]:
    ours = _median(results, OURS, END_TO_END)
    if ours is None:
        return []
    lines = []
    for result in results:
        theirs = _median(results, result.row, END_TO_END)
        if theirs is None or result.row == OURS:
            continue
        if result.wrong_weights:
            lines.append(f"{result.row} is not compared: its weights are wrong")
        else:
            lines.append(
                f"{result.row} takes {theirs / ours:.2f} times as long as ours, end to end"
            )
    return lines


def _median(results: Sequence[RowResult], row: str, clock: str) -> float | None:
    for result in results:
        samples = result.seconds.get(clock)
        if result.row == row and result.reason is None and samples:
            return Spread.of(samples).median
    return None

"""The plan as text: a verdict, then tables that can be pasted into a report as Markdown."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rdt_e2e.sizing.plan import Plan
from rdt_e2e.sizing.verdict import Ledger

GB = 1e9
UNITS = {"GB": 1e9, "MB": 1e6}
MAX_ROWS = 16
"""Longest table of ranks; what lies between is left to the JSON."""


def render(plan: Plan, stream: TextIO, width: int | None = None) -> None:
    """Write a plan.

    Args:
        plan: What to write.
        stream: Where to; styled only on a terminal.
        width: Columns; the terminal's own if none is given.
    """
    console = Console(file=stream, width=width, highlight=False)
    _verdict(console, plan)
    _tensors(console, plan)
    _consumers(console, plan)
    _trainers(console, plan)
    _memory(console, plan)
    _times(console, plan)
    _advice(console, plan)


def _verdict(console: Console, plan: Plan) -> None:
    word = Text("FITS", style="bold green") if plan.fits else Text("DOES NOT FIT", style="bold red")
    console.print(Text.assemble(f"{plan.model.name} on {plan.gpu.name}: ", word))
    _say(console, f"{plan.deployment.fleets}, gather {plan.deployment.gather}")
    _say(console, f"tensors: {plan.model.origin}")
    for ledger in (plan.verdict.trainer, plan.verdict.inference):
        _say(console, _in_words(ledger, plan.gpu.name), "- ")
    bounds = plan.verdict.utilization
    if bounds.chosen is not None and bounds.least <= bounds.most and not bounds.fits:
        _say(
            console,
            f"inference.gpu_memory_utilization={bounds.chosen:g} is outside {bounds.least:.3f} to "
            f"{bounds.most:.3f}, which weights and rings leave",
            "- ",
        )
    for cut in plan.refused:
        _say(
            console,
            f"{cut.where}: {cut.size} cut to {cut.share} (multiples of {cut.unit}): {cut.problem}",
            "- ",
        )
    if plan.fits:
        return
    _say(
        console, "What would fit, smallest change first:" if plan.changes else "Nothing tried fits."
    )
    for number, change in enumerate(plan.changes, start=1):
        _say(console, f"{change.what} ({change.spare_bytes / GB:.1f} GB spare)", f"{number}. ")


def _in_words(ledger: Ledger, gpu: str) -> str:
    needed, usable = ledger.needed_bytes / GB, ledger.usable_bytes / GB
    outcome = (
        f"{ledger.spare_bytes / GB:.1f} spare" if ledger.fits else f"{needed - usable:.1f} too much"
    )
    return f"{ledger.side} rank: {needed:.1f} GB of the {usable:.1f} GB usable on {gpu}, {outcome}"


def _tensors(console: Console, plan: Plan) -> None:
    model, unit = plan.model, _unit(plan)
    _title(console, "Tensors")
    table = _table(
        ("kind", "left"), ("tensors", "right"), (unit, "right"), ("of it scales", "right")
    )
    for kind in model.kinds:
        table.add_row(
            kind.kind,
            f"{kind.num_tensors:,}",
            _size(kind.num_bytes, unit),
            _size(kind.scale_bytes, unit, empty=True),
        )
    table.add_row("all", f"{model.num_tensors:,}", _size(model.num_bytes, unit), "")
    console.print(table)
    largest = max(plan.groups, key=lambda group: group.num_bytes)
    gathered = max(plan.groups, key=lambda group: group.gathered_bytes)
    _say(
        console,
        f"{len(plan.groups)} gather groups; largest {largest.label} ({_size(largest.num_bytes, unit)} {unit}); "
        f"most to gather: {gathered.label} ({_size(gathered.gathered_bytes, unit)} {unit})",
    )
    for reason, count in model.left_out.items():
        _say(console, f"left out: {count:,} tensors; {reason}")


def _consumers(console: Console, plan: Plan) -> None:
    unit = _unit(plan)
    _title(console, "What each inference rank receives")
    table = _table(
        ("rank", "left"),
        (unit, "right"),
        (f"experts {unit}", "right"),
        ("names", "right"),
        ("pulls", "right"),
        (f"largest {unit}", "right"),
        ("from trainer", "left"),
    )
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in plan.consumers:
        row = (
            _size(rank.num_bytes, unit),
            _size(rank.expert_bytes, unit),
            f"{rank.num_names:,}",
            f"{rank.num_pulls:,}",
            _size(rank.largest_pull_bytes, unit),
            "same rank" if rank.producers == (rank.rank,) else _ranks(rank.producers),
        )
        alike.setdefault(row, []).append(rank.rank)
    _add_rows(table, [(_ranks(ranks), *row) for row, ranks in alike.items()])
    console.print(table)
    _say(
        console,
        f"pull sizes, rank 0: {_counts([chunk.num_bytes for chunk in plan.chunks[0]], unit)}",
    )


def _counts(sizes: Sequence[int], unit: str) -> str:
    """Sizes to hundredths, each with its count, the largest first."""
    counts: dict[str, int] = {}
    for size in sorted(sizes, reverse=True):
        key = f"{size / UNITS[unit]:.2f}"
        counts[key] = counts.get(key, 0) + 1
    shown = [f"{count} x {size}" for size, count in list(counts.items())[:6]]
    return f"{', '.join(shown)}{', ...' if len(counts) > 6 else ''} {unit}"


def _trainers(console: Console, plan: Plan) -> None:
    unit = _unit(plan)
    _title(console, "What each trainer rank holds and serves")
    table = _table(
        ("rank", "left"),
        (f"shard {unit}", "right"),
        ("owns alone", "left"),
        (f"owned {unit}", "right"),
        (f"sends {unit}", "right"),
        ("to inference", "left"),
    )
    rows = []
    for rank in plan.trainers:
        first, end = rank.owned_experts
        row = (
            str(rank.rank),
            _size(rank.shard_bytes, unit),
            f"experts {_ranks(range(first, end))}" if end > first else "-",
            _size(rank.owned_bytes, unit, empty=True),
            _size(rank.served_bytes, unit),
            _ranks(rank.consumers),
        )
        rows.append(row)
    _add_rows(table, rows)
    console.print(table)
    owned_names = sum(rank.owned_names for rank in plan.trainers)
    if len(plan.trainers) > 1:
        _say(
            console,
            f"{owned_names:,} names have one owner; the other "
            f"{plan.model.num_tensors - owned_names:,} are gathered on every trainer rank",
        )


def _memory(console: Console, plan: Plan) -> None:
    _title(console, f"Memory of the fullest rank of each side, against {plan.gpu.name}")
    table = _table(("side", "left"), ("item", "left"), ("GB", "right"), ("basis", "left"))
    for ledger in (plan.verdict.trainer, plan.verdict.inference):
        name = f"{ledger.side} {ledger.rank}"
        for item in ledger.items:
            if item.num_bytes == 0:
                continue
            basis = item.basis if item.exact else f"~ {item.basis}"
            table.add_row(name, item.name, _gb(item.num_bytes), basis)
            name = ""
        table.add_row("", "needed", _gb(ledger.needed_bytes), "")
        table.add_row("", "usable", _gb(ledger.usable_bytes), plan.gpu.name)
        spare = Text(_gb(ledger.spare_bytes), style="green" if ledger.fits else "red")
        meaning = "spare" if ledger.side == "trainer" else "for more KV cache"
        table.add_row("", "left", spare, meaning if ledger.fits else "too little")
    console.print(table)
    bounds = plan.verdict.utilization
    if bounds.least <= bounds.most:
        more = max(plan.verdict.inference.spare_bytes, 0)
        if plan.kv_bytes_per_token:
            _say(
                console,
                f"left for KV cache: {more / GB:.1f} GB more, {more // plan.kv_bytes_per_token:,} tokens "
                f"of {plan.kv_bytes_per_token:,} bytes",
            )
        _say(
            console,
            f"inference.gpu_memory_utilization between {bounds.least:.3f} and {bounds.most:.3f}; rings "
            "and reload lie outside it",
        )
    _say(console, "~ is a formula or an assumption; the rest follows from the plan")


def _times(console: Console, plan: Plan) -> None:
    times = plan.times
    _title(console, f"Seconds per sync at {plan.nic_gbps:g} Gbit/s")
    table = _table(("clock", "left"), ("floor", "right"), ("expected", "right"))
    for clock in times.clocks:
        low, high = clock.expected_s
        table.add_row(clock.name, f"{clock.floor_s:.3g}", f"{low:.3g} to {high:.3g}")
    console.print(table)
    _say(
        console,
        f"busiest NIC: {times.busiest}, {_gb(times.busiest_bytes)} GB; gathers on the trainer: "
        f"{times.gather_s:.2g} s over NVLink",
    )
    _say(
        console,
        "expected: from all overhead hidden behind the wire to none; overheads as measured over "
        "NVLink and RoCE",
    )


def _advice(console: Console, plan: Plan) -> None:
    _title(console, "Advice")
    for line in plan.advice:
        _say(console, line, "- ")
    if plan.straddled:
        _say(console, "float8 blocks on two trainer ranks (do not requantise per rank):", "- ")
        for cut in plan.straddled:
            _say(
                console,
                f"{cut.where}: {cut.size} rows, {cut.share} per rank, blocks of {cut.unit}",
                "  - ",
            )


def _title(console: Console, title: str) -> None:
    console.print()
    _say(console, f"## {title}", style="bold")


def _say(console: Console, text: str, mark: str = "", style: str = "") -> None:
    """Write a paragraph; what follows its first line stands beside the mark."""
    lines = textwrap.wrap(
        text,
        console.width,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        console.print(line, style=style, markup=False, soft_wrap=True)


def _add_rows(table: Table, rows: Sequence[tuple[str, ...]]) -> None:
    """Add rows; of many, the first and the last."""
    few = len(rows) <= MAX_ROWS
    for row in rows if few else [*rows[: MAX_ROWS - 2], ("...",), rows[-1]]:
        table.add_row(*row)


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=box.MARKDOWN)
    for name, side in columns:
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    return table


def _unit(plan: Plan) -> str:
    """The unit in which the model's own tables are readable."""
    return "GB" if plan.model.num_bytes >= GB else "MB"


def _gb(num_bytes: int) -> str:
    return _size(num_bytes, "GB")


def _size(num_bytes: int, unit: str, *, empty: bool = False) -> str:
    """Bytes with as many digits as say something; nothing for 0 when `empty`."""
    if num_bytes == 0:
        return "" if empty else "0"
    size = num_bytes / UNITS[unit]
    return (
        f"{size:,.1f}" if abs(size) >= 100 else f"{size:.2f}" if abs(size) >= 0.1 else f"{size:.4f}"
    )


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks with runs written as `0-7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"

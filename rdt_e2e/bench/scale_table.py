"""The table of `rdt-e2e bench scale`. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rdt_e2e.bench.scale import ScaleRow

_COLUMNS = "{:<9}{:<7}{:>8}{:>9}{:>9}{:>9}{:>9}{:>10}{:>8}{:>7}{:>9}{:>9}"


def format_scale(rows: Sequence["ScaleRow"]) -> list[str]:
    """Lay out how a sync grows with the fleets.

    Args:
        rows: In the order they were run; the first with figures is what growth is measured against,
            mode by mode.

    Returns:
        Lines. GB are of 10^9 bytes; GB/s are of all pulled bytes over the time end to end.
    """
    lines = [
        _COLUMNS.format(
            "shape",
            "gather",
            "GB/rank",
            "end s",
            "update s",
            "cold s",
            "GB/s",
            "GB/s/rank",
            "growth",
            "skew",
            "gather s",
            "memory",
        )
    ]
    first = {row.gather: row for row in reversed(rows) if row.reason is None}
    for row in rows:
        head = f"{row.shape!s:<9}{row.gather:<7}"
        if row.reason is not None:
            lines.append(f"{head}n/a: {row.reason}")
            continue
        per_rank = row.rank_bytes / row.end_to_end_s / 1e9
        growth = row.end_to_end_s / first[row.gather].end_to_end_s - 1
        lines.append(
            _COLUMNS.format(
                str(row.shape),
                row.gather,
                f"{row.rank_bytes / 1e9:.2f}",
                f"{row.end_to_end_s:.3f}",
                f"{row.update_s:.3f}",
                f"{row.cold_s:.3f}",
                f"{per_rank * row.shape.consumers:.1f}",
                f"{per_rank:.1f}",
                f"{growth:+.0%}",
                "" if row.skew is None else f"{row.skew:.0%}",
                f"{row.gather_s:.3f}",
                f"{row.found_bytes / row.predicted_bytes - 1:+.1%}",
            )
        )
    if any(row.reason is None for row in rows):
        lines.append(
            "every tensor of every inference rank was right after every sync; growth: end to end, against "
            "the first shape; skew: slowest inference rank against the fastest; memory: fullest trainer "
            "rank against rdt-e2e plan"
        )
    return lines

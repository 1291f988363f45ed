"""Reads what perftest's ib_write_bw and ib_read_bw print, and words what is too slow."""

from __future__ import annotations

import re
from typing import Any


def perftest_gbps(text: str) -> float:
    """The average bandwidth of a run with ``--report_gbits``, in Gbit/s.

    The table has one line per message size: bytes, iterations, peak, average, message rate. A run with
    ``-D`` (duration) prints 0 as its peak.

    Args:
        text: Standard output of the client.

    Returns:
        The average, or 0.0 when there is no table (the run failed).
    """
    row = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE)
    found = row.findall(text)
    return float(found[-1]) if found and "BW average[Gb/sec]" in text else 0.0


def fabric_rail_failure(row: dict[str, Any], min_share: float) -> str:
    """Say what is wrong with one measured pair, for the report and the failure message.

    Args:
        row: An entry of the report's ``rails``.
        min_share: Least acceptable share of the line rate.
    """
    what = f"rail {row['rail']} {row['operation']} from {row['memory']} memory"
    if row["error"]:
        return f"{what} between {row['client']} and {row['server']} failed: {row['error']}"
    return (
        f"{what} between {row['client']} and {row['server']} reached {float(row['gbps']):.1f} of "
        f"{float(row['rate_gbps']):g} Gb/s (verify_min_rate_share is {float(min_share):g})"
    )


class FilterModule:
    """What Ansible asks for."""

    def filters(self) -> dict[str, object]:
        """Name to function."""
        return {"perftest_gbps": perftest_gbps, "fabric_rail_failure": fabric_rail_failure}

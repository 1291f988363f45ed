"""The profile as text: what one would paste into a message."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rdt_e2e.profiling.figures import count, gb_per_s, percent, ratio, seconds, size

WIDTH = 100
MAX_PROBLEMS = 20
"""Problems and missing columns listed per sync; the JSON has all of them."""


def text_report(profile: Mapping[str, Any], *, last_only: bool = False) -> str:
    """Every sync's tables, and the clocks of cold and warm syncs apart.

    Args:
        profile: Content of `profile.json`.
        last_only: Leave out all syncs but the last.
    """
    out = io.StringIO()
    console = Console(
        file=out, width=WIDTH, no_color=True, highlight=False, markup=False, emoji=False
    )
    console.print(f"PROFILE {profile['run']}  (level {profile['level']})")
    for line in clock_lines(profile):
        console.print(line)
    iterations = profile["iterations"]
    for iteration in iterations[-1:] if last_only else iterations:
        _print_iteration(console, iteration, profile)
    # Tables pad their lines to the full width.
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def clock_lines(profile: Mapping[str, Any]) -> list[str]:
    """The four clocks, one a line."""
    cold, warm = profile["summary"]["cold"], profile["summary"]["warm"]
    lines = [
        f"cold       bake {seconds(cold['bake_s'])} s once, then the first sync "
        f"{seconds(cold['end_to_end_s'])} s end to end"
    ]
    if warm["num_syncs"]:
        of = f"warm, median of {warm['num_syncs']}"
        lines += [
            f"RDMA only  {seconds(warm['rdma_only_s'])} s ({of}; slowest rank)",
            f"update     {seconds(warm['update_call_s'])} s ({of})",
            f"end to end {seconds(warm['end_to_end_s'])} s ({of}; pause to resume)",
        ]
    return lines


def _print_iteration(
    console: Console, iteration: Mapping[str, Any], profile: Mapping[str, Any]
) -> None:
    temperature = "cold" if iteration["cold"] else "warm"
    console.print()
    console.print(f"== sync {iteration['iteration']} ({temperature}) ".ljust(WIDTH, "="))
    console.print(_path_table(iteration["critical_path"]))
    rates = iteration["gb_per_s"]
    console.print(
        f"{size(iteration['bytes'])} pulled; GB/s over RDMA only {gb_per_s(rates['rdma_only'])}, "
        f"update call {gb_per_s(rates['update_call'])}, end to end {gb_per_s(rates['end_to_end'])}; "
        f"floor of the NICs {seconds(iteration['floor_s'])} s"
    )
    if not iteration["consumers"]:
        console.print("no figures came back from the inference ranks; see the problems below")
    else:
        _print_attribution(console, iteration, profile)
    if iteration["producers"]:
        split = iteration["attribution"]["producer"]
        console.print(_split_table("producers, largest over ranks", split))
    made = iteration["registrations"]
    expected = "" if iteration["cold"] else " (0 is expected)"
    console.print(
        f"registrations: consumers {count(made['consumers'])}, producers "
        f"{count(made['producers'])}{expected}"
    )
    _print_nics(console, iteration["nics"]["machines"])
    problems = [
        *iteration["problems"],
        *(f"n/a: {name}: {why}" for name, why in iteration["not_measured"].items()),
    ]
    for problem in problems[:MAX_PROBLEMS]:
        console.print(f"! {problem}")
    if len(problems) > MAX_PROBLEMS:
        console.print(f"! and {len(problems) - MAX_PROBLEMS} more; see profile.json")


def _path_table(path: Mapping[str, Any]) -> Table:
    table = _table("critical path", "s", "% of wall")
    for bucket in path["buckets"]:
        share = bucket["seconds"] / path["wall_s"] if path["wall_s"] else None
        table.add_row(bucket["name"], seconds(bucket["seconds"]), percent(share))
    table.add_section()
    sums = "sum of the above" if path["sums_up"] else "the above do NOT sum to this"
    table.add_row(f"WALL ({sums})", seconds(path["wall_s"]), "")
    return table


def _print_attribution(
    console: Console, iteration: Mapping[str, Any], profile: Mapping[str, Any]
) -> None:
    found = iteration["attribution"]
    overlap = " (processing overlaps the pulls)" if (found["fan_out_s"] or 0.0) < 0 else ""
    console.print(
        f"update {seconds(found['update_s'])} s = slowest rank's pull and process "
        f"{seconds(found['slowest_s'])} s + fan-out and skew {seconds(found['fan_out_s'])} s{overlap}"
    )
    console.print(_worker_table(iteration["consumers"]))
    verdict = found["verdict"]
    console.print(
        f"verdict: {verdict['kind']}: {verdict['text']} (spread of transfer time "
        f"{percent(verdict['transfer_spread'])}, of bytes {percent(verdict['bytes_spread'])})"
    )
    console.print(_split_table(f"consumer {found['slowest_rank']} (slowest)", found["consumer"]))
    console.print(f"phases of processing are {profile['phases']}")


def _worker_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "rank", "node", "NIC", "pid", "bytes", "transfer s", "GB/s", "pull s", "process s", texts=3
    )
    for row in rows:
        columns = row["columns"]
        table.add_row(
            str(row["rank"]),
            row["node"],
            row["nic"] or "any",
            str(row["pid"]),
            size(columns.get("bytes")),
            seconds(columns.get("rdma_s")),
            gb_per_s(row["gb_per_s"]),
            seconds(columns.get("pull_s")),
            seconds(columns.get("process_s")),
        )
    return table


def _split_table(title: str, shares: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(title, "s", "")
    table.columns[0].min_width = 32
    table.columns[2].justify = "left"
    for share in shares:
        table.add_row(
            "  " * share["depth"] + share["label"], seconds(share["seconds"]), share["note"]
        )
    return table


def _print_nics(console: Console, machines: Sequence[Mapping[str, Any]]) -> None:
    for machine in machines:
        if not machine["ports"]:
            continue
        where = ", ".join(machine["addresses"])
        table = _table(f"NIC of {where}", "rate Gb/s", "received", "sent", "share")
        for port in machine["ports"]:
            table.add_row(
                port["port"],
                f"{port['rate_gbps']:g}",
                size(port["received_bytes"]),
                size(port["sent_bytes"]),
                percent(port["share"]),
            )
        console.print(table)
        console.print(f"busiest to least busy NIC in use: {ratio(machine['busiest_to_least'])}")
    if len(machines) == 1:
        console.print("all nodes are on one machine, whose NICs a sync does not need")
    if not any(machine["ports"] for machine in machines):
        console.print("no RDMA port on any machine that answered: the bytes took another way")


def _table(*titles: str, texts: int = 1) -> Table:
    """A table whose first `texts` columns are text and the others figures."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, title in enumerate(titles):
        table.add_column(
            title, justify="left" if index < texts else "right", no_wrap=index > 0, overflow="fold"
        )
    return table

"""Puts one sync's profile together from what the driver timed and what the nodes answered. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rdt_e2e.profiling.attribution import (
    Row,
    attribute,
    largest,
    rate,
    slow_to_fast,
    total,
)
from rdt_e2e.profiling.critical_path import critical_path
from rdt_e2e.profiling.lines import read_records
from rdt_e2e.profiling.nics import nic_report
from rdt_e2e.profiling.reading import ClockOffset, NodeReading
from rdt_e2e.profiling.timeline import driver_spans, process_spans

SCHEMA = 1
"""Of `profile.json`; raised with every change that a reader has to know about."""
BITS = 8


@dataclass(frozen=True)
class Material:
    """Everything known about one sync.

    Attributes:
        iteration: Number of the sync among those of this profile, from 1.
        cold: Whether it is the first of its fleets.
        seconds: The driver's steps, in order.
        wall_s: Around all of them, in seconds.
        began: The driver's monotonic clock at the start.
        consumers: Inference ranks that took part, by consumer id.
        producers: Trainer ranks.
        before: Every node's answer before the sync.
        after: Every node's answer after it.
        offsets: Clock of each node that could be asked, by node id.
        problems: What went wrong while measuring.
    """

    iteration: int
    cold: bool
    seconds: Mapping[str, float]
    wall_s: float
    began: float
    consumers: Sequence[int]
    producers: Sequence[int]
    before: Sequence[NodeReading]
    after: Sequence[NodeReading]
    offsets: Mapping[str, ClockOffset]
    problems: Sequence[str] = field(default_factory=tuple)


def build_iteration(material: Material) -> dict[str, Any]:
    """One entry of `iterations` in `profile.json`; JSON values only, None is n/a."""
    addresses = {reading.node_id: reading.address for reading in material.after}
    records, problems = _records(material)
    rows = {role: _rows(records, role, addresses) for role in ("consumer", "producer")}
    consumers, producers = rows["consumer"], rows["producer"]
    problems += _silent("consumer", consumers, material.consumers)
    problems += _silent("producer", producers, material.producers)
    if not material.cold:
        problems += _registered(consumers) + _registered(producers)
    served_s: dict[int, float] = defaultdict(float)
    for record in records:
        if record["kind"] == "serve":
            served_s[record["consumer"]] += record["span"][1] - record["span"][0]
    path = critical_path(material.seconds, material.wall_s)
    update_s = path.seconds_of("update")
    num_bytes = total(consumers, "bytes")
    rdma_s = largest(consumers, "rdma_s") if total(consumers, "rdma_s") is not None else None
    nics = nic_report(material.before, material.after, _used_nics(consumers + producers))
    starts = {node: material.began + offset.seconds for node, offset in material.offsets.items()}
    return {
        "iteration": material.iteration,
        "cold": material.cold,
        "clocks": {
            "rdma_only_s": rdma_s,
            "update_call_s": update_s,
            "end_to_end_s": material.wall_s,
        },
        "bytes": num_bytes,
        "gb_per_s": {
            "rdma_only": rate(num_bytes, rdma_s),
            "update_call": rate(num_bytes, update_s),
            "end_to_end": rate(num_bytes, material.wall_s),
        },
        "floor_s": _floor(consumers, nics),
        "critical_path": {
            "wall_s": path.wall_s,
            "sums_up": path.sums_up,
            "buckets": [asdict(bucket) for bucket in path.shown],
        },
        "attribution": asdict(attribute(update_s, consumers, producers, served_s)),
        "consumers": [_row_json(row) for row in slow_to_fast(consumers)],
        "producers": [_row_json(row) for row in producers],
        "registrations": {
            "consumers": total(consumers, "register_calls"),
            "producers": total(producers, "register_calls"),
        },
        "nics": nics,
        "nodes": _nodes(material, records),
        "not_measured": _missing(records),
        "problems": problems,
        "timeline": [
            asdict(span)
            for span in (
                *driver_spans(material.seconds),
                *process_spans(records, addresses, starts),
            )
        ],
    }


def build_profile(
    run: str, level: str, bake_s: float | None, iterations: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of `profile.json`.

    Args:
        run: Name of the run directory.
        level: `summary` or `full`.
        bake_s: Init and bake, once per engine, in seconds.
        iterations: From `build_iteration`.
    """
    cold = [one for one in iterations if one["cold"]]
    warm = [one for one in iterations if not one["cold"]]
    return {
        "schema": SCHEMA,
        "run": run,
        "level": level,
        "phases": "waited for on the device" if level == "full" else "as the host sees them",
        "summary": {
            "cold": {"bake_s": bake_s, **_clocks(cold)},
            "warm": {"num_syncs": len(warm), **_clocks(warm)},
        },
        "iterations": list(iterations),
    }


def _clocks(iterations: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The median of each clock; None without a sync."""
    return {
        clock: _median([one["clocks"][clock] for one in iterations])
        for clock in ("rdma_only_s", "update_call_s", "end_to_end_s")
    }


def _records(material: Material) -> tuple[list[dict[str, Any]], list[str]]:
    records: list[dict[str, Any]] = []
    problems = list(material.problems)
    for reading in material.after:
        if reading.error is not None:
            problems.append(f"node {reading.address} could not be read: {reading.error}")
            continue
        found, num_damaged = read_records(reading.lines, material.iteration)
        records += found
        if num_damaged:
            problems.append(f"node {reading.address}: {num_damaged} damaged lines left out")
    problems += [
        f"{record['role']} {record['rank']}: {record['num_dropped']} records could not be written "
        "(disk full?)"
        for record in records
        if record["kind"] == "row" and record["num_dropped"]
    ]
    return records, problems


def _rows(
    records: Sequence[Mapping[str, Any]], role: str, addresses: Mapping[str, str]
) -> list[Row]:
    rows = {
        record["rank"]: Row(
            record["rank"],
            addresses.get(record["node"], record["node"]),
            record["host"],
            record["pid"],
            record["nic"],
            record["columns"],
        )
        for record in records
        if record["kind"] == "row" and record["role"] == role
    }
    return [rows[rank] for rank in sorted(rows)]


def _silent(role: str, rows: Sequence[Row], expected: Sequence[int]) -> list[str]:
    missing = sorted(set(expected) - {row.rank for row in rows})
    if not missing:
        return []
    return [f"nothing came from {role} {', '.join(map(str, missing))}"]


def _registered(rows: Sequence[Row]) -> list[str]:
    """Ranks that registered memory although their buffers should have been registered before."""
    return [
        f"node {row.node}, pid {row.pid}: {made:.0f} NIXL registrations in a warm sync; 0 is expected"
        for row in rows
        if (made := row.get("register_calls"))
    ]


def _row_json(row: Row) -> dict[str, Any]:
    return asdict(row) | {"work_s": row.work_s, "gb_per_s": row.gb_per_s}


def _used_nics(rows: Sequence[Row]) -> dict[str, list[str]]:
    used: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        used[row.node] += [] if row.nic is None else row.nic.split(",")
    return used


def _floor(consumers: Sequence[Row], nics: Mapping[str, Any]) -> float | None:
    """Least seconds in which every rank's NICs could have carried its bytes; None without NICs."""
    rates = {
        (address, port["port"]): port["rate_gbps"]
        for machine in nics["machines"]
        for address in machine["addresses"]
        for port in machine["ports"]
    }
    floors = []
    for row in consumers:
        names = [] if row.nic is None else row.nic.split(",")
        gbps = sum(rates.get((row.node, name), 0.0) for name in names)
        num_bytes = row.get("bytes")
        if not gbps or num_bytes is None:
            return None
        floors.append(num_bytes * BITS / 1e9 / gbps)
    return max(floors, default=None)


def _nodes(material: Material, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    before = {reading.node_id: reading for reading in material.before}
    found = []
    for reading in material.after:
        earlier = before.get(reading.node_id)
        offset = material.offsets.get(reading.node_id)
        memory: dict[str, dict[str, Any]] = defaultdict(dict)
        for record in records:
            if record["kind"] == "memory" and record["node"] == reading.node_id:
                figures = {key: record[key] for key in record if key.endswith("_bytes")}
                memory[f"{record['role']} {record['rank']}"][record["when"]] = figures
        found.append(
            {
                "node_id": reading.node_id,
                "address": reading.address,
                "error": reading.error or (earlier.error if earlier else None),
                "clock": None if offset is None else asdict(offset),
                "before": {} if earlier is None else _shown(earlier.sample),
                "after": _shown(reading.sample),
                "processes": dict(memory),
            }
        )
    return found


def _shown(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: sample[key]
        for key in ("memory_used_bytes", "memory_total_bytes", "gpus")
        if key in sample
    }


def _missing(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Reason by "role column"; the same on every rank as a rule, so one is enough."""
    return {
        f"{record['role']} {record['column']}": record["reason"]
        for record in records
        if record["kind"] == "missing"
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

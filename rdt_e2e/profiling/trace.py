"""The timelines as a trace that Perfetto opens: a process per rank, a thread per track.

Format: JSON array format of the Trace Event Format, complete events ("X") and metadata ("M").
"""

import json
from collections.abc import Mapping
from typing import Any

from rdt_e2e.profiling.timeline import in_lanes

NS_PER_US = 1000
GAP_S = 0.1
"""Space between two syncs, in seconds: what lies between them was not measured."""


def trace_json(profile: Mapping[str, Any]) -> str:
    """All syncs one after another on one axis.

    Args:
        profile: Content of `profile.json`.
    """
    events: list[dict[str, Any]] = []
    processes: dict[tuple[str, str], int] = {}
    threads: dict[tuple[int, str], int] = {}
    origin_s = 0.0
    clock_errors: dict[str, float] = {}
    for iteration in profile["iterations"]:
        for node in iteration["nodes"]:
            if node["clock"] is not None:
                clock_errors[node["address"]] = node["clock"]["error_s"]
        last_s = iteration["critical_path"]["wall_s"]
        for track, span in in_lanes(iteration["timeline"]):
            key = (span["node"], span["process"])
            if key not in processes:
                processes[key] = len(processes) + 1
                name = " on ".join(filter(None, (span["process"], span["node"])))
                events.append(_name("process_name", processes[key], 0, name))
                sort = {"sort_index": processes[key]}
                events.append(
                    {"ph": "M", "name": "process_sort_index", "pid": processes[key], "args": sort}
                )
            pid = processes[key]
            if (pid, track) not in threads:
                tid = 1 + sum(1 for known, _ in threads if known == pid)
                threads[pid, track] = tid
                events.append(_name("thread_name", pid, tid, track))
            last_s = max(last_s, span["end_s"])
            started_ns = _ns(origin_s + span["start_s"])
            events.append(
                {
                    "ph": "X",
                    "name": span["name"],
                    "cat": span["track"],
                    "pid": pid,
                    "tid": threads[pid, track],
                    "ts": started_ns / NS_PER_US,
                    # From the rounded ends: spans that touch must not overlap by a nanosecond.
                    "dur": (_ns(origin_s + span["end_s"]) - started_ns) / NS_PER_US,
                    "args": {"sync": iteration["iteration"], **span["details"]},
                }
            )
        origin_s += last_s + GAP_S
    return json.dumps(
        {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"run": profile["run"], "clock_error_s": clock_errors},
        }
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

"""The profile as one page that needs nothing beside itself: no network, no script, drawings as SVG."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from rdt_e2e.profiling import figures
from rdt_e2e.profiling.attribution import MATTERS, rate
from rdt_e2e.profiling.compare import CLOCKS, change, comparison, figure
from rdt_e2e.profiling.timeline import in_lanes

WIDTH = 1000.0
"""Width of every drawing, in its own units; the page scales them."""
LABEL_WIDTH = 240.0
ROW_HEIGHT = 18.0
MAX_SPANS = 5000
"""Spans drawn per sync; the longest are kept, and the trace has all of them."""
MIN_SPAN_WIDTH = 0.6
CALL_TRACKS = "calls, "
"""Tracks of single calls, which are for the trace alone."""
NUM_TICKS = 8
COLOURS = ("#2f6fb3", "#e08a2c", "#3b9a6d", "#b5485d", "#7a5fb0", "#4aa3b8", "#9a8a3b", "#7d8790")
SECTIONS: Mapping[str, str] = {
    "": "the whole sync",
    "cold": "cold",
    "driver": "critical path",
    "consumer": "slowest consumer of each sync",
    "producer": "producers, largest over ranks",
}
"""Prefix of a compared row's label to the heading it stands under."""
SERVE, HELD = "serve", "group"
TRACK_COLOURS: Mapping[str, int] = {
    "pulls": 5,
    "transfer": 1,
    "process": 2,
    "post-load": 6,
    "engine": 7,
    "gather": 4,
    SERVE: 3,
    HELD: 0,
}
"""Kind of track to its colour, in the order of the rows; the driver's steps have the path's colours."""


def html_report(profile: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """The page of one run.

    Args:
        profile: Content of `profile.json`.
        run: Content of `run.json`; empty where there is none.
    """
    syncs = [
        {
            "data": sync,
            "path": path_bar(sync["critical_path"]),
            "largest": max(path_bar(sync["critical_path"]), key=lambda piece: piece["share"]),
            "clocks": clock_bars(sync),
            "timeline": timeline(sync),
            "workers": bars(
                [(f"rank {row['rank']}", row["columns"].get("rdma_s")) for row in sync["consumers"]]
            ),
            "consumer": bars(_split(sync["attribution"]["consumer"])),
            "producer": bars(_split(sync["attribution"]["producer"])),
            "nics": [
                {
                    "machine": machine,
                    "bars": bars(
                        [
                            (port["port"], port["received_bytes"] + port["sent_bytes"])
                            for port in machine["ports"]
                        ]
                    ),
                }
                for machine in sync["nics"]["machines"]
                if machine["ports"]
            ],
        }
        for sync in profile["iterations"]
    ]
    return _environment().get_template("report.html.j2").render(
        profile=profile, run=run, syncs=syncs, width=WIDTH, label_width=LABEL_WIDTH
    )  # fmt: skip


def html_comparison(profiles: Sequence[Mapping[str, Any]]) -> str:
    """The page that lays runs side by side.

    Args:
        profiles: Contents of `profile.json`, the baseline first.
    """
    sections: dict[str, list[dict[str, Any]]] = {}
    for label, kind, values in comparison(profiles):
        if not any(values):
            continue  # Took no time in any run.
        section, found, rest = label.partition(": ")
        section, rest = (section, rest) if found else ("", label)
        sections.setdefault(SECTIONS[section], []).append(
            {
                "label": rest,
                "kind": "" if kind == "bytes" else kind,
                "cells": [figure(kind, value) for value in values],
                "changes": [
                    (change(values[0], one), _is_better(kind, values[0], one)) for one in values[1:]
                ],
                "bars": bars(
                    [(str(run["run"]), one) for run, one in zip(profiles, values, strict=True)]
                ),
            }
        )
    template = _environment().get_template("comparison.html.j2")
    return template.render(profiles=profiles, sections=sections)


def _is_better(kind: str, first: float | None, second: float | None) -> str:
    """Class of a change's text: what moved by less than `MATTERS` says nothing."""
    if kind == "bytes" or not first or second is None or abs(second / first - 1) < MATTERS:
        return "soft"
    return "good" if (second > first) == (kind == "GB/s") else "bad"


def clock_bars(sync: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The clocks of a sync, and above them what the NICs would need: seconds, rate, share."""
    floor_s = sync["floor_s"]
    rates = [
        rate(sync["bytes"], floor_s),
        *(sync["gb_per_s"][clock] for clock in CLOCKS),
    ]
    rows = bars(
        [
            ("floor, at the rate of the NICs", floor_s),
            *((label, sync["clocks"][f"{clock}_s"]) for clock, label in CLOCKS.items()),
        ]
    )
    return [row | {"rate": found} for row, found in zip(rows, rates, strict=True)]


def path_bar(path: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The critical path as pieces of one bar: name, seconds, share, place, width, colour."""
    wall_s = path["wall_s"]
    pieces, at = [], 0.0
    for bucket, colour in zip(path["buckets"], itertools.cycle(COLOURS)):
        share = max(bucket["seconds"], 0.0) / wall_s if wall_s else 0.0
        pieces.append(
            {
                "name": bucket["name"],
                "seconds": bucket["seconds"],
                "share": share,
                "x": at * WIDTH,
                "width": share * WIDTH,
                "colour": colour,
            }
        )
        at += share
    return pieces


def bars(values: Sequence[tuple[str, float | None]]) -> list[dict[str, Any]]:
    """Horizontal bars against the largest: label, value and share of the largest."""
    largest = max((value for _, value in values if value is not None), default=0.0)
    return [
        {
            "label": label,
            "value": value,
            "share": value / largest if value is not None and largest > 0 else 0.0,
        }
        for label, value in values
    ]


def timeline(sync: Mapping[str, Any]) -> dict[str, Any]:
    """A sync's spans as rectangles below one axis.

    Returns:
        `rows` (label, whether a process begins, y), `rects` (place, size, colour, text), `ticks`,
        `legend`, `height`, and `num_left_out`.
    """
    spans = [one for one in sync["timeline"] if not one["track"].startswith(CALL_TRACKS)]
    longest = sorted(spans, key=lambda one: one["start_s"] - one["end_s"])[:MAX_SPANS]
    kept = [dict(span, track=row) for row, span in in_lanes(longest)]
    end_s = max([sync["critical_path"]["wall_s"], *(one["end_s"] for one in kept)])
    scale = (WIDTH - LABEL_WIDTH) / end_s if end_s else 0.0
    order = list(
        dict.fromkeys((one["node"], one["process"], one["track"]) for one in _in_order(kept))
    )
    places = {key: index for index, key in enumerate(order)}
    steps = dict.fromkeys((one["name"] for one in kept), COLOURS[-1])
    steps |= {piece["name"]: piece["colour"] for piece in path_bar(sync["critical_path"])}
    rows = []
    shown: tuple[str, str] | None = None
    for node, process, track in order:
        begins = (node, process) != shown
        shown = (node, process)
        where = f" ({node})" if node else ""
        rows.append(
            {
                "label": f"{process}{where}" if begins else "",
                "track": track,
                "begins": begins,
                "y": ROW_HEIGHT * (1 + places[node, process, track]),
            }
        )
    return {
        "rows": rows,
        "rects": [_rect(one, places, scale, steps) for one in kept],
        "legend": [
            {"name": kind, "colour": COLOURS[colour]}
            for kind, colour in TRACK_COLOURS.items()
            if any(_kind(one["track"]) == kind for one in kept)
        ],
        "ticks": [
            {"x": LABEL_WIDTH + scale * at_s, "text": figures.seconds(at_s)}
            for at_s in (end_s * tick / NUM_TICKS for tick in range(NUM_TICKS + 1))
        ],
        "height": ROW_HEIGHT * (1.5 + len(rows)),
        "num_left_out": len(spans) - len(kept),
    }


def _in_order(spans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Driver first, then producers, then consumers; tracks by their kind."""
    rank = {"driver": 0, "producer": 1, "consumer": 2}

    kinds = list(TRACK_COLOURS)

    def key(span: Mapping[str, Any]) -> tuple[int, int, int, str]:
        role, _, number = span["process"].partition(" ")
        kind = _kind(span["track"])
        place = kinds.index(kind) if kind in kinds else len(kinds)
        return rank.get(role, 3), int(number) if number.isdigit() else 0, place, span["track"]

    return sorted(spans, key=key)


def _kind(track: str) -> str:
    """`serve consumer 3`, `group slot 1` and `pulls (2)` are of the kinds serve, group and pulls."""
    return next(
        (kind for kind in (SERVE, HELD) if track.startswith(kind)), track.partition(" (")[0]
    )


def _rect(
    span: Mapping[str, Any],
    places: Mapping[tuple[str, str, str], int],
    scale: float,
    steps: Mapping[str, str],
) -> dict[str, Any]:
    track = span["track"]
    place = places[span["node"], span["process"], track]
    spent_s = span["end_s"] - span["start_s"]
    return {
        "x": LABEL_WIDTH + scale * span["start_s"],
        "y": ROW_HEIGHT * (1 + place) + 2,
        "width": max(scale * spent_s, MIN_SPAN_WIDTH),
        "height": ROW_HEIGHT - 4,
        "colour": steps[span["name"]]
        if track == "steps"
        else COLOURS[TRACK_COLOURS.get(_kind(track), 7)],
        "text": f"{span['process']}, {span['name']}: {figures.seconds(spent_s)} s from "
        f"{figures.seconds(span['start_s'])} s",
    }


def _split(shares: Sequence[Mapping[str, Any]]) -> list[tuple[str, float | None]]:
    # A non-breaking space survives HTML.
    return [("\u00a0\u00a0" * one["depth"] + one["label"], one["seconds"]) for one in shares]


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("rdt_e2e.profiling"),
        autoescape=select_autoescape(["html", "j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "s": figures.seconds,
        "with_s": figures.with_unit,
        "size": figures.size,
        "rate": figures.gb_per_s,
        "count": figures.count,
        "percent": figures.percent,
        "ratio": figures.ratio,
    }
    return environment

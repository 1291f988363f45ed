"""How a sync grows: one rank to one, two to two, four to four, at equal bytes for each inference rank.

Each row is one run of the main job, `rdt-e2e sync`, in a process and a cluster of its own, on a slice of
Kimi K2 with 48 experts per inference rank and layer. The run checks every tensor of every inference rank
after every sync, before anything here reads its times; the figures are those it wrote into its own run
directory.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rdt_e2e.bench.k2_slice import WIDTHS, write_slice
from rdt_e2e.bench.process import log_tail, task_process
from rdt_e2e.bench.result import write_report
from rdt_e2e.bench.scale_table import format_scale
from rdt_e2e.config import load_config
from rdt_e2e.console import Console
from rdt_e2e.errors import ConfigError
from rdt_e2e.sync.record import hardware, versions

SHAPE = re.compile(r"([1-9]\d*)to([1-9]\d*)")
WRONG_WEIGHTS = 3
"""Exit status of a run whose weights or text are not those sent."""


class Shape(NamedTuple):
    """Trainer ranks and inference ranks (data and expert parallel)."""

    trainers: int
    consumers: int

    def __str__(self) -> str:
        return f"{self.trainers} to {self.consumers}"


@dataclass(frozen=True)
class ScaleOptions:
    """What to measure.

    Attributes:
        profile: Profile name or file.
        settings: Dotted configuration keys over it.
        shapes: Fleets, one after another.
        gathers: Gather modes, each with every shape.
        layers: Decoder layers of the slice.
        repeats: Warm syncs of each row.
        row_timeout_s: Longest time of one row, in seconds.
    """

    profile: str
    settings: Mapping[str, Any]
    shapes: tuple[Shape, ...]
    gathers: tuple[str, ...]
    layers: int
    repeats: int
    row_timeout_s: float


@dataclass(frozen=True)
class ScaleRow:
    """One shape in one gather mode; seconds are medians of the warm syncs.

    Attributes:
        shape: The fleets.
        gather: The gather mode.
        reason: Why there are no figures, or nothing.
        rank_bytes: Bytes that one inference rank pulls.
        end_to_end_s: Pause to resume.
        cold_s: The same, of the first sync.
        update_s: The update call.
        gather_s: Collectives of the slowest trainer rank, hidden or not.
        skew: Slowest inference rank's own time over the fastest's, less 1; None for a single rank.
        found_bytes: Shards, gathered groups and serve rings of the fullest trainer rank.
        predicted_bytes: What `rdt-e2e plan` says they take.
    """

    shape: Shape
    gather: str
    reason: str | None = None
    rank_bytes: float = 0.0
    end_to_end_s: float = 0.0
    cold_s: float = 0.0
    update_s: float = 0.0
    gather_s: float = 0.0
    skew: float | None = None
    found_bytes: int = 0
    predicted_bytes: int = 0


def read_shapes(text: str) -> tuple[Shape, ...]:
    """Shapes as the command line has them, such as `1to1,2to4`.

    Raises:
        ConfigError: One is malformed.
    """
    found = []
    for word in text.split(","):
        match = SHAPE.fullmatch(word.strip())
        if match is None:
            raise ConfigError(
                f"command line: --shapes has {word.strip()!r}; a shape is trainer ranks and inference "
                "ranks, such as 4to4"
            )
        found.append(Shape(int(match[1]), int(match[2])))
    return tuple(found)


def run_scale(options: ScaleOptions, console: Console, report: Path | None) -> int:
    """Run every shape in every gather mode and print the table.

    Args:
        options: What to measure.
        console: Where to say how it goes.
        report: Where to write everything as JSON, if anywhere. Logs of the runs lie beside it.

    Returns:
        Exit status: 0, 1 if a row has no figures, 3 if a rank's weights were wrong.

    Raises:
        ConfigError: A setting cannot be used.
        EnvironmentCheckError: The checkpoint or the report cannot be written.
    """
    config = load_config(options.profile, options.settings)
    widths = WIDTHS["k2" if config.trainer.device == "cuda" else "tiny"]
    rows: list[ScaleRow] = []
    status = 0
    with tempfile.TemporaryDirectory(prefix="rdt-e2e-scale-") as scratch:
        folder = Path(scratch)
        for shape in options.shapes:
            root = folder / f"slice-{shape.consumers}"
            experts = widths.num_experts * shape.consumers
            write_slice(root, replace(widths, num_experts=experts), options.layers, seed=1)
            for gather in options.gathers:
                with console.step(f"{shape}, gather {gather}"):
                    ended, row = _run_row(options, shape, gather, root, folder, report)
                rows.append(row)
                status = max(status, ended)
                # After every row: what is measured is not lost with what comes after it.
                write_report(report, _content(options, rows))
    for line in format_scale(rows):
        console.info(line)
    return status


def _run_row(
    options: ScaleOptions,
    shape: Shape,
    gather: str,
    root: Path,
    folder: Path,
    report: Path | None,
) -> tuple[int, ScaleRow]:
    name = f"{shape.trainers}to{shape.consumers}-{gather}"
    log = (folder if report is None else report.parent) / f"scale-{name}.log"
    runs = folder / f"runs-{name}"
    settings = {
        "model.source": root,
        "trainer.num_ranks": shape.trainers,
        "trainer.gather": gather,
        "inference.data_parallel": shape.consumers,
        "inference.kv_cache_bytes": 1 << 26,
        "sync.iters": 1 + options.repeats,
        "verify.reference": "none",
        "verify.weights": "disk",
        "paths.runs_dir": runs,
        **options.settings,
    }
    words = [
        word for key, value in settings.items() for word in ("--set", f"{key}={_as_typed(value)}")
    ]
    command = [sys.executable, "-m", "rdt_e2e.cli", "sync", "--config", options.profile, *words]
    # A cluster of its own: a running deployment is neither used nor stopped.
    environment = os.environ | {"XDG_STATE_HOME": str(folder / f"state-{name}")}
    with task_process(command, environment, log) as process:
        try:
            status = process.wait(options.row_timeout_s)
        except subprocess.TimeoutExpired:
            reason = f"not done within {options.row_timeout_s:g} s"
            return 1, ScaleRow(shape, gather, reason)
    if status != 0:
        what = "WRONG WEIGHTS" if status == WRONG_WEIGHTS else f"ended with status {status}"
        row = ScaleRow(shape, gather, f"{what}: {log_tail(log)}")
        return WRONG_WEIGHTS if status == WRONG_WEIGHTS else 1, row
    (run,) = runs.iterdir()
    told, profile = (json.loads((run / one).read_text()) for one in ("run.json", "profile.json"))
    return 0, read_row(shape, gather, told, profile)


def _as_typed(value: Any) -> str:
    """A value as a person would give it to `--set`."""
    return str(value) if isinstance(value, str | Path) else json.dumps(value)


def read_row(
    shape: Shape, gather: str, run: Mapping[str, Any], profile: Mapping[str, Any]
) -> ScaleRow:
    """The figures of a row from what its run wrote, `run.json` and `profile.json`."""
    cold, *warm = profile["iterations"]

    def clock(name: str) -> float:
        return float(statistics.median(one["clocks"][name] for one in warm))

    held = [
        rank["shard_bytes"] + rank["serve_ring_bytes"] + counters["max_resident_bytes"]
        for rank, counters in zip(
            run["memory"]["trainer"], run["syncs"][-1]["producers"], strict=True
        )
    ]
    predicted = [
        rank["shard_bytes"] + rank["serve_ring_bytes"] + rank["resident_group_bytes"]
        for rank in run["predicted"]["trainers"]
    ]
    return ScaleRow(
        shape,
        gather,
        rank_bytes=warm[-1]["bytes"] / shape.consumers,
        end_to_end_s=clock("end_to_end_s"),
        cold_s=cold["clocks"]["end_to_end_s"],
        update_s=clock("update_call_s"),
        gather_s=statistics.median(
            max(rank["gather_s"] for rank in sync["producers"]) for sync in run["syncs"][1:]
        ),
        skew=_skew(warm),
        found_bytes=max(held),
        predicted_bytes=max(predicted),
    )


def _skew(warm: Sequence[Mapping[str, Any]]) -> float | None:
    """How much longer the slowest inference rank took than the fastest, median over syncs."""
    shares = []
    for one in warm:
        own = [rank["columns"]["pull_s"] for rank in one["consumers"]]
        if len(own) < 2 or None in own:
            return None
        shares.append(max(own) / min(own) - 1)
    return float(statistics.median(shares))


def _content(options: ScaleOptions, rows: Sequence[ScaleRow]) -> dict[str, Any]:
    return {
        "options": {
            "profile": options.profile,
            "settings": {key: str(value) for key, value in options.settings.items()},
            "layers": options.layers,
            "repeats": options.repeats,
        },
        "versions": versions(),
        "hardware": hardware(),
        "rows": [asdict(row) for row in rows],
    }

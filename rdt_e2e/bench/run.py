"""The whole benchmark: one process per row and round, each with a bounded time, then one table."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdt_e2e.bench.k2_slice import WIDTHS, write_slice
from rdt_e2e.bench.process import CHILD, log_tail, task_process
from rdt_e2e.bench.result import RowResult, Task, write_report
from rdt_e2e.bench.table import OURS, format_table
from rdt_e2e.config import load_config
from rdt_e2e.console import Console
from rdt_e2e.errors import ConfigError
from rdt_e2e.sync.record import hardware, versions

DEFAULT_ROWS = ("limit", "ours", "peer-rdt", "peer-nccl", "peer-ipc")
ROWS = (*DEFAULT_ROWS, "peer-rdt-ours", "peer-nccl-1")


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        profile: Profile name or file.
        settings: Dotted configuration keys over it.
        layers: Decoder layers of the slice.
        repeats: Warm repetitions per round.
        rounds: Times each row is run, the rows taking turns.
        rows: Rows, in order.
        row_timeout_s: Longest time one row may take in one round, in seconds.
    """

    profile: str
    settings: Mapping[str, Any]
    layers: int
    repeats: int
    rounds: int
    rows: tuple[str, ...]
    row_timeout_s: float

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: A row is unknown, or a count is too small.
        """
        unknown = [row for row in self.rows if row not in ROWS]
        if unknown or not self.rows:
            raise ConfigError(
                f"command line: --rows has {', '.join(unknown) or 'nothing'}; known rows are "
                f"{', '.join(ROWS)}"
            )
        if min(self.repeats, self.rounds) < 1 or self.layers < 2:
            raise ConfigError(
                "command line: --repeats and --rounds must be at least 1, --layers at least 2 (the "
                "first layer is dense)"
            )


def run_bench(options: BenchOptions, console: Console, report: Path | None) -> int:
    """Measure all rows and print the table.

    Args:
        options: What to measure.
        console: Where to say how it goes.
        report: Where to write everything as JSON, if anywhere.

    Returns:
        Exit status: 0, 1 when our own row has no figures, 3 when its weights are wrong. A peer that
        fails is shown and changes nothing.

    Raises:
        ConfigError: An option cannot be used.
        EnvironmentCheckError: The synthetic checkpoint or the report cannot be written.
    """
    options.check()
    config = load_config(options.profile, options.settings)
    widths = WIDTHS["k2" if config.trainer.device == "cuda" else "tiny"]
    rows: dict[str, RowResult] = {}
    with tempfile.TemporaryDirectory(prefix="rdt-e2e-bench-") as scratch:
        folder = Path(scratch)
        folders = (folder / "version-1", folder / "version-2")
        for seed, version in enumerate(folders, start=1):
            num_bytes = write_slice(version, widths, options.layers, seed)
        console.info(f"synthetic slice: {options.layers} layers, {num_bytes / 1e9:.2f} GB")
        for turn in range(1, options.rounds + 1):
            for row in options.rows:
                with console.step(f"{row}, round {turn}"):
                    log = folder / "log" if report is None else _log_beside(report, row, turn)
                    for result in _run_row(row, options, folders, log):
                        if result.row in rows:
                            rows[result.row].merge(result)
                        else:
                            rows[result.row] = result
                # After every row: what is measured is not lost with what comes after it.
                _write(report, options, list(rows.values()))
    for line in format_table(list(rows.values())):
        console.info(line)
    return _exit_status(options, rows)


def _log_beside(report: Path, row: str, turn: int) -> Path:
    """Where a row's own output goes: beside the report, so that an n/a can be looked into."""
    return report.with_name(f"{report.stem}-{row}-{turn}.log")


def _exit_status(options: BenchOptions, rows: Mapping[str, RowResult]) -> int:
    if OURS not in options.rows:
        return 0
    ours = rows[OURS]
    if ours.wrong_weights:
        return 3
    return 0 if ours.reason is None else 1


def _slice_settings(options: BenchOptions, folder: Path) -> dict[str, Any]:
    """Configuration of a slice's run: what the user set wins over what a benchmark wants."""
    return {
        "model.source": str(folder),
        # A cache for a few hundred tokens: the memory is for weights.
        "inference.kv_cache_bytes": 1 << 26,
        "verify.reference": "none",
        "verify.weights": "none",
        **options.settings,
    }


def _run_row(
    row: str, options: BenchOptions, folders: tuple[Path, Path], log: Path
) -> list[RowResult]:
    with tempfile.TemporaryDirectory(prefix="rdt-e2e-row-") as place:
        output, task_file = Path(place, "result"), Path(place, "task")
        task = Task(
            row,
            options.profile,
            _slice_settings(options, folders[0]),
            (str(folders[0]), str(folders[1])),
            options.repeats,
            str(output),
        )
        task_file.write_text(task.to_json())
        # A cluster of its own: a running deployment is neither used nor stopped.
        environment = os.environ | {"XDG_STATE_HOME": str(Path(place, "state"))}
        command = [sys.executable, *CHILD, str(task_file)]
        with task_process(command, environment, log) as process:
            try:
                status = process.wait(options.row_timeout_s)
            except subprocess.TimeoutExpired:
                return [RowResult(row, reason=f"not done within {options.row_timeout_s:g} s")]
        if not output.is_file():
            return [RowResult(row, reason=f"ended with status {status}: {log_tail(log)}")]
        return [RowResult(**content) for content in json.loads(output.read_text())]


def _gpus() -> list[str]:
    """The GPUs of this machine as the driver's own tool names them."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return found.stdout.split("\n")[:-1]


def _write(report: Path | None, options: BenchOptions, results: Sequence[RowResult]) -> None:
    content = {
        "options": {
            "profile": options.profile,
            "settings": dict(options.settings),
            "layers": options.layers,
            "repeats": options.repeats,
            "rounds": options.rounds,
        },
        "versions": versions(),
        "hardware": hardware() | {"gpus": _gpus()},
        "rows": [json.loads(result.to_json()) for result in results],
    }
    write_report(report, content)

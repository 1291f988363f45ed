"""The bench `wire`: from overhead-bound to wire-bound, without a NIC.

Two network namespaces stand for the two nodes, and the link between them is given one rate after another.
Everything else is the real thing: Ray, NIXL over UCX and TCP, the producer, vLLM's engine and its consumer.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from rdt_e2e.bench.k2_slice import WIDTHS, write_slice
from rdt_e2e.bench.link import Link, check_privileges, shaped_link
from rdt_e2e.bench.process import CHILD, log_tail, task_process
from rdt_e2e.bench.result import RowResult, Task, write_report
from rdt_e2e.bench.wire_nodes import HEAD, wire_nodes
from rdt_e2e.bench.wire_table import format_wire_table
from rdt_e2e.config import load_config
from rdt_e2e.console import Console
from rdt_e2e.errors import ConfigError
from rdt_e2e.sync.record import hardware, versions

GATHERS = ("owner", "full")


@dataclass(frozen=True)
class WireOptions:
    """What to measure.

    Attributes:
        rates: Rates of the link in bytes per second, in this order; None for no limit.
        gathers: Values of `trainer.gather`, in this order.
        settings: Dotted configuration keys over the profile `local`.
        widths: Key of `WIDTHS`.
        layers: Decoder layers of the checkpoint.
        repeats: Warm syncs at each rate.
        row_timeout_s: Longest time for all rates in one gather mode, in seconds.
    """

    rates: tuple[float | None, ...]
    gathers: tuple[str, ...]
    settings: Mapping[str, Any]
    widths: str
    layers: int
    repeats: int
    row_timeout_s: float

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: A rate, gather mode or count cannot be used.
        """
        if not self.rates or any(rate is not None and rate <= 0 for rate in self.rates):
            raise ConfigError("command line: --rates must be MB/s greater than 0, or `none`")
        if not self.gathers or set(self.gathers) - set(GATHERS):
            raise ConfigError(f"command line: --gather must be among {', '.join(GATHERS)}")
        if self.repeats < 1 or self.layers < 2:
            raise ConfigError(
                "command line: --repeats must be at least 1, --layers at least 2 (the first is dense)"
            )


def read_rates(text: str) -> tuple[float | None, ...]:
    """`none,400` as rates in bytes per second.

    Raises:
        ConfigError: A rate is not a number of MB/s.
    """
    try:
        return tuple(None if one.strip() == "none" else float(one) * 1e6 for one in text.split(","))
    except ValueError:
        raise ConfigError(
            f"command line: --rates {text}: give MB/s and `none`, such as none,400,100"
        ) from None


def run_wire(options: WireOptions, console: Console, report: Path | None) -> int:
    """Measure warm syncs over the link and print the curve.

    Args:
        options: What to measure.
        console: Where to say how it goes.
        report: Where to write everything as JSON, if anywhere.

    Returns:
        Exit status: 0, 1 when a gather mode has no figures, 3 when weights are wrong.

    Raises:
        ConfigError: An option cannot be used.
        EnvironmentCheckError: No root, no `ip` or `tc`, or something cannot be written.
    """
    options.check()
    check_privileges()
    results: list[RowResult] = []
    with tempfile.TemporaryDirectory(prefix="rdt-e2e-bench-") as scratch:
        folder = Path(scratch)
        folders = (folder / "version-1", folder / "version-2")
        for seed, version in enumerate(folders, start=1):
            num_bytes = write_slice(version, WIDTHS[options.widths], options.layers, seed)
        console.info(f"synthetic checkpoint: {options.layers} layers, {num_bytes / 1e9:.2f} GB")
        for gather in options.gathers:
            log = folder / "log"
            if report is not None:
                log = report.with_name(f"{report.stem}-{gather}.log")
            with console.step(f"gather: {gather}"):
                results += _run(gather, options, folders, log)
            _write(report, options, results)
    for line in format_wire_table(results):
        console.info(line)
    if any(result.wrong_weights for result in results):
        return 3
    return 1 if any(result.reason is not None for result in results) else 0


def _run(
    gather: str, options: WireOptions, folders: tuple[Path, Path], log: Path
) -> list[RowResult]:
    settings = {
        "model.source": str(folders[0]),
        "cluster.target": "ray",
        "cluster.address": HEAD,
        "trainer.gather": gather,
        "inference.kv_cache_bytes": 1 << 26,
        # A slow rate makes a sync long, and a busy machine a start.
        "cluster.start_timeout_s": 300,
        "trainer.load_timeout_s": 600,
        "inference.start_timeout_s": 600,
        "sync.init_timeout_s": 300,
        "sync.sync_timeout_s": 600,
        "sync.control_timeout_s": 120,
        "sync.stall_timeout_s": 120,
        "sync.heartbeat_timeout_s": 60,
        "sync.rdt_fetch_timeout_s": 240,
        "verify.reference": "none",
        "verify.weights": "none",
        **options.settings,
    }
    with tempfile.TemporaryDirectory(prefix="rdt-e2e-") as place, shaped_link() as link:
        output, task_file = Path(place, "result"), Path(place, "task")
        task = _task(gather, options, settings, folders, output, link)
        task_file.write_text(task.to_json())
        with wire_nodes(link, load_config("local", settings), Path(place)) as environment:
            # The driver is beside the engine: vLLM's ranks meet in its node's namespace.
            command = link.command("inference", *CHILD, str(task_file))
            state = {"XDG_STATE_HOME": str(Path(place, "state"))}
            with task_process(command, {**environment, **state}, log) as process:
                try:
                    status = process.wait(options.row_timeout_s)
                except TimeoutExpired:
                    return [_failed(gather, f"not done within {options.row_timeout_s:g} s")]
        if not output.is_file():
            return [_failed(gather, f"ended with status {status}: {log_tail(log)}")]
        return [RowResult(**content) for content in json.loads(output.read_text())]


def _task(
    gather: str,
    options: WireOptions,
    settings: Mapping[str, Any],
    folders: tuple[Path, Path],
    output: Path,
    link: Link,
) -> Task:
    return Task(
        "wire",
        "local",
        settings,
        (str(folders[0]), str(folders[1])),
        options.repeats,
        str(output),
        {**asdict(link), "rates": options.rates},
    )


def _failed(gather: str, reason: str) -> RowResult:
    return RowResult(gather, reason=reason)


def _write(report: Path | None, options: WireOptions, results: Sequence[RowResult]) -> None:
    content = {
        "options": asdict(options),
        "versions": versions(),
        "hardware": hardware() | {"load": os.getloadavg()},
        "rows": [json.loads(result.to_json()) for result in results],
    }
    write_report(report, content)

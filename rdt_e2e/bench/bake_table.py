"""The bench `bake` as a program: its process's environment, its table, its report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rdt_e2e.bench.result import write_report
from rdt_e2e.config import load_config
from rdt_e2e.console import Console
from rdt_e2e.environment import apply_environment
from rdt_e2e.errors import ConfigError

if TYPE_CHECKING:
    from rdt_e2e.bench.bake import BakeTimes

_COLUMNS = "{:>7}{:>9}{:>8}{:>8}{:>9}{:>9}{:>11}  {}"


def read_layers(text: str) -> tuple[int, ...]:
    """`5,22,61` as numbers.

    Raises:
        ConfigError: One is not a number, or too small.
    """
    try:
        layers = tuple(int(one) for one in text.split(","))
    except ValueError:
        layers = ()
    if not layers or min(layers) < 2:
        raise ConfigError(
            f"command line: --layers {text}: give numbers of at least 2 (the first layer is dense)"
        )
    return layers


def run_bake(
    layers: Sequence[int], settings: Mapping[str, Any], console: Console, report: Path | None
) -> int:
    """Measure each number of layers in this process and print a line for it.

    Args:
        layers: Numbers of decoder layers.
        settings: Dotted configuration keys over the profile `kimi-k2`.
        console: Where to print.
        report: Where to write everything as JSON, if anywhere.

    Returns:
        Exit status 0.

    Raises:
        ConfigError: A setting cannot be used.
        EnvironmentCheckError: The report cannot be written.
    """
    apply_environment(load_config("local"))
    from rdt_e2e.bench.bake import measure_bake

    found: list[BakeTimes] = []
    header = (
        "layers",
        "names",
        "slices",
        "pulls",
        "driver s",
        "rank s",
        "us/name",
        "of the rank, in CPU seconds",
    )
    console.info(_COLUMNS.format(*header))
    for times in measure_bake(layers, settings):
        found.append(times)
        console.info(format_times(times))
        write_report(report, [asdict(one) for one in found])
    return 0


def format_times(times: "BakeTimes") -> str:
    """One line of the table: totals of driver and rank, and the rank's steps."""
    steps = ", ".join(
        f"{step} {seconds:.2f}"
        for step, seconds in times.seconds.items()
        if step not in times.on_driver
    )
    return _COLUMNS.format(
        times.layers,
        times.num_names,
        times.num_slices,
        times.num_chunks,
        f"{sum(times.seconds.values()) - times.on_rank_s:.2f}",
        f"{times.on_rank_s:.2f}",
        f"{times.on_rank_s / times.num_names * 1e6:.1f}",
        steps,
    )

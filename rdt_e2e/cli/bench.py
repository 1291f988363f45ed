"""`rdt-e2e bench`: how fast a sync is, over one fabric or another, and what its parts take."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rdt_e2e.cli.program import ConfigOption, SetOption, app, read_overrides
from rdt_e2e.console import Console

bench_app = typer.Typer(rich_markup_mode=None)
app.add_typer(bench_app, name="bench")

ReportOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write everything there as JSON.")
]


@bench_app.callback(invoke_without_command=True)
def bench(
    ctx: typer.Context,
    config: ConfigOption = "local",
    layers: Annotated[
        int, typer.Option("--layers", metavar="N", help="Decoder layers of the slice.")
    ] = 4,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="R", help="Warm repetitions of each row.")
    ] = 5,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="K", help="Times the rows take turns.")
    ] = 1,
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="ROW,ROW", help="Rows to measure (default: all)."),
    ] = None,
    row_timeout: Annotated[
        float,
        typer.Option("--row-timeout", metavar="S", help="Longest time of one row, in seconds."),
    ] = 600,
    report: ReportOption = None,
    settings: SetOption = None,
) -> None:
    """Measure a sync against the hardware's limit and against vLLM's own backends.

    On a slice of Kimi K2 with computed weights: real widths with device cuda, tiny ones with cpu. A row that fails is shown as n/a and the others still run. The commands below measure one part each.

    \b
    Examples:
      rdt-e2e bench --config h200x2 --layers 24 --json bench.json
      rdt-e2e bench --rows limit,ours --repeats 3
      rdt-e2e bench wire --rates none,400,200,100
    """
    if ctx.invoked_subcommand is not None:
        return
    from rdt_e2e.bench.run import DEFAULT_ROWS, BenchOptions, run_bench

    names = DEFAULT_ROWS if rows is None else tuple(row.strip() for row in rows.split(","))
    options = BenchOptions(
        config, read_overrides(settings), layers, repeats, rounds, names, row_timeout
    )
    raise typer.Exit(run_bench(options, Console(), report))


@bench_app.command()
def wire(
    rates: Annotated[
        str,
        typer.Option("--rates", metavar="MB/S,...", help="Rates of the link; none is no limit."),
    ] = "none,400,200,100",
    gather: Annotated[
        str, typer.Option("--gather", metavar="MODE,...", help="Gather modes, one after another.")
    ] = "owner,full",
    layers: Annotated[
        int, typer.Option("--layers", metavar="N", help="Decoder layers; 61 is K2.")
    ] = 61,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="R", help="Warm syncs at each rate.")
    ] = 3,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Mini-kimi's widths, to see that it runs.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Longest time of one gather mode.")
    ] = 1800,
    report: ReportOption = None,
    settings: SetOption = None,
) -> None:
    """Show from which rate of the fabric on a sync is bound by its bytes.

    Two network namespaces stand for the nodes, and the link between them gets one rate after another; needs root. Two trainer ranks, two inference ranks, a synthetic checkpoint with K2's gather groups. Exit status 3 if the weights that arrived are wrong.

    \b
    Examples:
      rdt-e2e bench wire
      rdt-e2e bench wire --rates 400,100 --gather owner --json wire.json
      rdt-e2e bench wire --tiny --layers 3 --rates 100 --repeats 1
    """
    from rdt_e2e.bench.wire import WireOptions, read_rates, run_wire

    options = WireOptions(
        rates=read_rates(rates),
        gathers=tuple(mode.strip() for mode in gather.split(",")),
        settings=read_overrides(settings),
        widths="tiny" if tiny else "wire",
        layers=layers,
        repeats=repeats,
        row_timeout_s=timeout,
    )
    raise typer.Exit(run_wire(options, Console(), report))


@bench_app.command()
def scale(
    config: ConfigOption = "local",
    shapes: Annotated[
        str,
        typer.Option(
            "--shapes", metavar="MtoN,...", help="Trainer and inference ranks of each row."
        ),
    ] = "1to1,2to2",
    gather: Annotated[
        str, typer.Option("--gather", metavar="MODE,...", help="Gather modes, one after another.")
    ] = "owner,full",
    layers: Annotated[
        int, typer.Option("--layers", metavar="N", help="Decoder layers of the slice.")
    ] = 4,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="R", help="Warm syncs of each row.")
    ] = 5,
    row_timeout: Annotated[
        float, typer.Option("--row-timeout", metavar="S", help="Longest time of one row.")
    ] = 600,
    report: ReportOption = None,
    settings: SetOption = None,
) -> None:
    """Show how a sync grows with the fleets, at equal bytes for each inference rank.

    Each row is a run of the main job on a slice of Kimi K2 with 48 experts per inference rank (8 tiny ones with device cpu); every tensor of every rank is checked after every sync. Exit status 3 if one was wrong.

    \b
    Examples:
      rdt-e2e bench scale
      rdt-e2e bench scale --config h200x2 --shapes 1to1,2to2,4to4,2to4,4to2 --layers 12 --json scale.json
    """
    from rdt_e2e.bench.scale import ScaleOptions, read_shapes, run_scale

    options = ScaleOptions(
        config,
        read_overrides(settings),
        read_shapes(shapes),
        tuple(mode.strip() for mode in gather.split(",")),
        layers,
        repeats,
        row_timeout,
    )
    raise typer.Exit(run_scale(options, Console(), report))


@bench_app.command()
def reads(
    config: ConfigOption = "local",
    gigabytes: Annotated[
        float, typer.Option("--gb", metavar="GB", help="Size of a read; a pull of K2 is 2.26.")
    ] = 0.1,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="R", min=2, help="Reads, one after another.")
    ] = 24,
    report: ReportOption = None,
) -> None:
    """Measure NIXL reads between two processes, with its progress thread as released and as set here.

    With device cuda from the first GPU into the second.

    \b
    Examples:
      rdt-e2e bench reads --config h200x2 --gb 2.26
      rdt-e2e bench reads
    """
    from rdt_e2e.config import load_config
    from rdt_e2e.environment import apply_environment

    settings = load_config(config)
    apply_environment(settings)
    from rdt_e2e.bench.reads import ReadOptions, measure_reads, reads_table
    from rdt_e2e.bench.result import write_report

    options = ReadOptions(int(gigabytes * 1e9) // 4096 * 4096, repeats, settings.trainer.device)
    found = measure_reads(options)
    write_report(report, [asdict(one) for one in found])
    for line in reads_table(found):
        typer.echo(line)


@bench_app.command()
def bake(
    layers: Annotated[
        str, typer.Option("--layers", metavar="N,...", help="Numbers of decoder layers; 61 is K2.")
    ] = "5,22,61",
    report: ReportOption = None,
    settings: SetOption = None,
) -> None:
    """Measure how long one of eight inference ranks plans for K2's names, and how that grows.

    The real widths, all 384 experts, no weights; on CPU, in one process.

    \b
    Examples:
      rdt-e2e bench bake
      rdt-e2e bench bake --layers 61 --json bake.json
    """
    from rdt_e2e.bench.bake_table import read_layers, run_bake

    raise typer.Exit(run_bake(read_layers(layers), read_overrides(settings), Console(), report))


@bench_app.command()
def load(
    folder: Annotated[
        Path,
        typer.Option(
            "--folder", metavar="DIR", help="Where to write the files; its disk is measured."
        ),
    ] = Path(),
    layers: Annotated[
        int, typer.Option("--layers", metavar="N", help="Decoder layers, 0.9 GB each.")
    ] = 4,
    ranks: Annotated[int, typer.Option("--ranks", metavar="N", help="Trainer ranks.")] = 2,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="R", help="Times each way of reading is measured.")
    ] = 5,
    report: ReportOption = None,
) -> None:
    """Measure trainer ranks reading a checkpoint into their shards, against a plain read of the files.

    Writes the files first and removes them at the end.

    \b
    Examples:
      rdt-e2e bench load --folder /mnt/models
      rdt-e2e bench load --layers 2 --repeats 1
    """
    from rdt_e2e.bench.load import LoadOptions, measure_load
    from rdt_e2e.bench.result import write_report

    found = measure_load(LoadOptions(layers, ranks, repeats, folder))
    write_report(report, asdict(found))
    for line in found.table():
        typer.echo(line)

"""Verbs that look before or beside a run: what it needs, what the machine has, how fast it is."""

from pathlib import Path
from typing import Annotated

import typer

from rdt_e2e.cli.program import ConfigOption, SetOption, app, read_overrides
from rdt_e2e.config import load_config
from rdt_e2e.console import Console


@app.command()
def plan(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="NAME|DIR|ID", help="Known model, folder or hub id."),
    ] = None,
    trainers: Annotated[
        int | None, typer.Option("--trainers", metavar="N", help="Trainer ranks.")
    ] = None,
    inference: Annotated[
        int | None, typer.Option("--inference", metavar="N", help="Inference ranks.")
    ] = None,
    dp: Annotated[
        int | None, typer.Option("--dp", metavar="N", help="Data-parallel engine ranks.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks in each.")
    ] = None,
    ep: Annotated[
        bool | None, typer.Option("--ep/--no-ep", help="Experts whole on one rank each, or cut.")
    ] = None,
    gather: Annotated[
        str | None, typer.Option("--gather", metavar="owner|full", help="See trainer.gather.")
    ] = None,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="CLASS", help="GPU of both sides, such as h200.")
    ] = "b200",
    nic_gbps: Annotated[
        float, typer.Option("--nic-gbps", metavar="RATE", help="Gbit/s of the NIC of each GPU.")
    ] = 400,
    max_chunk_bytes: Annotated[
        int | None, typer.Option("--max-chunk-bytes", metavar="N", help="Limit on one pull.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="NAME|FILE", help="Take the rest from a profile."),
    ] = None,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """Say what a sync needs before it runs: bytes, pulls, memory of each rank, seconds.

    Reads config.json and safetensors headers only; some models are known without any file.
    Exit status 1 when it does not fit, with what would.

    \b
    Examples:
      rdt-e2e plan --model kimi-k2 --trainers 8 --inference 8 --gpu h200
      rdt-e2e plan --config kimi-k2 --nic-gbps 800
      rdt-e2e plan --model ./checkpoint --trainers 2 --inference 4 --tp 2 --json
    """
    from rdt_e2e.sizing.command import PlanOptions, run_plan

    options = PlanOptions(
        model=model,
        trainers=trainers,
        inference=inference,
        data_parallel=dp,
        tensor_parallel=tp,
        expert_parallel=ep,
        gather=gather,
        gpu=gpu,
        nic_gbps=nic_gbps,
        max_chunk_bytes=max_chunk_bytes,
        profile=config,
        overrides=read_overrides(settings),
    )
    raise typer.Exit(run_plan(options, typer.get_text_stream("stdout"), as_json_text=as_json))


@app.command()
def doctor(
    config: ConfigOption = "local",
    settings: SetOption = None,
    image: Annotated[
        bool, typer.Option("--image", help="Only what an image build can answer.")
    ] = False,
    pair: Annotated[
        bool, typer.Option("--pair", help="Also measure between the two nodes, through Ray.")
    ] = False,
    group: Annotated[
        list[str] | None,
        typer.Option("--group", metavar="GROUP", help="Only this group of checks; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print also what passed.")
    ] = False,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="ID", help="Explain one check, and run none.")
    ] = None,
) -> None:
    """Check this machine before a run: image, limits, GPUs, RDMA, NIXL, Ray, vLLM, model files.

    Changes nothing and needs no root. Exit status: 0 nothing failed (there may be warnings), 1 a check failed, 2 bad input.

    \b
    Examples:
      rdt-e2e doctor
      rdt-e2e doctor --config kimi-k2 --set cluster.address=10.0.0.1:6379 --pair
      rdt-e2e doctor --image --json
      rdt-e2e doctor --explain rdma.affinity
    """
    from rdt_e2e.doctor import run

    if explain is not None:
        typer.echo(run.explain(explain))
        return
    loaded = load_config(config, read_overrides(settings))
    options = run.Options(tuple(group or ()), image, pair, as_json, verbose)
    raise typer.Exit(run.run_doctor(loaded, typer.get_text_stream("stdout"), options))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
) -> None:
    """Make the reports of a run again from its profile.json, or compare runs.

    Writes profile.txt, trace.json and report.html into each run directory; with two or more runs, comparison.html into the last one. The first run is the baseline.

    \b
    Examples:
      rdt-e2e report runs/20260101T120000-local
      rdt-e2e report runs/before runs/after
    """
    from rdt_e2e.profiling import command

    raise typer.Exit(command.report(runs, Console()))

"""Verbs that run the job: the sync, and the deployment it runs on."""

import dataclasses
import enum
import json
from typing import Annotated

import typer

from rdt_e2e.cli.program import ConfigOption, SetOption, app, load
from rdt_e2e.console import Console

EXIT_NOT_RUNNING = 1


class Extra(enum.StrEnum):
    """What `overhead` can measure: levels of profiling, and the checksums of pulls."""

    SUMMARY = "summary"
    FULL = "full"
    CHECKSUMS = "checksums"


@app.command()
def sync(
    config: ConfigOption = "local",
    iters: Annotated[
        int | None, typer.Option("--iters", metavar="N", help="Syncs to run (sync.iters).")
    ] = None,
    settings: SetOption = None,
) -> None:
    """Run the main job and give the verdict.

    Text before, the syncs, text after each of them, compared with the reference. Uses the deployment that is up, or deploys by itself and stops that again.

    \b
    Examples:
      rdt-e2e sync
      rdt-e2e sync --iters 5
      rdt-e2e sync --config my.yaml --set trainer.lookahead=2 --set verify.max_tokens=8
    """
    loaded = load(config, settings, iters)
    from rdt_e2e.sync.driver import run_sync

    raise typer.Exit(run_sync(loaded, Console()).exit_code)


@app.command()
def soak(
    config: ConfigOption = "local",
    syncs: Annotated[int, typer.Option("--syncs", metavar="N", help="Syncs to run.")] = 200,
    settings: SetOption = None,
) -> None:
    """Run many syncs, check each, and report what grows: memory, open files, registrations.

    \b
    Examples:
      rdt-e2e soak
      rdt-e2e soak --syncs 500 --set verify.weights=none
    """
    loaded = load(config, settings)
    from rdt_e2e.sync.driver import run_soak

    raise typer.Exit(run_soak(loaded, Console(), syncs).exit_code)


@app.command()
def overhead(
    config: ConfigOption = "local",
    pairs: Annotated[
        int, typer.Option("--pairs", metavar="N", min=10, help="Pairs of syncs to compare.")
    ] = 100,
    extra: Annotated[
        Extra,
        typer.Option("--of", help="A level of profiling, or the checksums of pulls."),
    ] = Extra.SUMMARY,
    settings: SetOption = None,
) -> None:
    """Measure what profiling or checksums cost a sync: pairs of syncs on the same fleets, one with it.

    \b
    Examples:
      rdt-e2e overhead
      rdt-e2e overhead --of checksums
      rdt-e2e overhead --config h200x2 --pairs 200 --of full
    """
    loaded = load(config, settings)
    from rdt_e2e.bench.overhead import overhead_job
    from rdt_e2e.sync.driver import run_job

    outcome = run_job(
        loaded, Console(), lambda run: overhead_job(run, pairs, extra.value), num_steps=2
    )
    raise typer.Exit(outcome.exit_code)


@app.command()
def deploy(config: ConfigOption = "local", settings: SetOption = None) -> None:
    """Start the deployment that `sync` then uses.

    \b
    Examples:
      rdt-e2e deploy
      rdt-e2e deploy --set cluster.cpus_per_node=16
    """
    loaded = load(config, settings)
    from rdt_e2e.cluster import local

    local.deploy(loaded, Console())


@app.command()
def down(
    config: ConfigOption = "local",
    settings: SetOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also one that a running sync started for itself.")
    ] = False,
) -> None:
    """Stop the deployment and all it started.

    On a cluster of your own (cluster.target=ray), end the trainer ranks that runs left there.

    \b
    Examples:
      rdt-e2e down
      rdt-e2e down --force
      rdt-e2e down --config kimi-k2 --set cluster.address=10.0.0.1:6379
    """
    loaded = load(config, settings)
    console = Console()
    if loaded.cluster.target == "ray":
        from rdt_e2e.sync.driver import release_trainers

        release_trainers(loaded, console)
        return
    from rdt_e2e.cluster import local

    if not local.down(console, force=force):
        console.info("nothing was running")


@app.command()
def status() -> None:
    """Print the running deployment as JSON.

    Exit status 1 when there is none.

    \b
    Examples:
      rdt-e2e status
      rdt-e2e status >/dev/null || rdt-e2e deploy
    """
    from rdt_e2e.cluster import local

    running = local.status()
    if running is None:
        typer.echo("nothing is running; `rdt-e2e deploy` starts a deployment", err=True)
        raise typer.Exit(EXIT_NOT_RUNNING)
    typer.echo(json.dumps(dataclasses.asdict(running), indent=2))

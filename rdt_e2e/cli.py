"""The `rdt-e2e` program: read the command line, build the configuration, call one function.

What a verb needs is imported inside it, so that `--help` and a misspelt key answer at once, without
loading torch, Ray or vLLM.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel
from typer.core import TyperGroup

from rdt_e2e import __version__
from rdt_e2e.config import Config, default_cache_dir, load_config
from rdt_e2e.console import Console
from rdt_e2e.environment import apply_environment
from rdt_e2e.errors import ConfigError, RdtE2EError

EXIT_NOT_RUNNING = 1
EXIT_INTERRUPTED = 130


class _Program(TyperGroup):
    """Turns what may be expected to go wrong into one line on standard error and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RdtE2EError as error:
            # One line, whatever a library's message inside it looks like.
            message = " ".join(str(error).split())
            typer.echo(f"rdt-e2e: error: {message}", err=True)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as interrupt:
            typer.echo("rdt-e2e: interrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from interrupt


app = typer.Typer(
    cls=_Program,
    no_args_is_help=True,
    # Plain help keeps the examples as they are written; a traceback of ours should be Python's.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigOption = Annotated[
    str,
    typer.Option("--config", "-c", metavar="NAME|FILE", help="Profile name or YAML file."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override one key; repeatable."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rdt-e2e {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Sync the weights of a sharded trainer into a vLLM fleet, and prove that they arrived.

    Exit status: 0 passed, 1 the run failed, 2 bad configuration or environment, 3 the text or the
    weights are wrong, 130 interrupted.

    \b
    Examples:
      rdt-e2e sync
      rdt-e2e sync --config kimi-k2 --set cluster.address=10.0.0.1:6379
      RDT_E2E_SYNC__ITERS=5 rdt-e2e sync
    """


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
    loaded = _load(config, settings, iters)
    from rdt_e2e.sync.driver import run_sync

    raise typer.Exit(run_sync(loaded, Console()).exit_code)


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
    loaded = load_config(config, _overrides(settings))
    options = run.Options(tuple(group or ()), image, pair, as_json, verbose)
    raise typer.Exit(run.run_doctor(loaded, typer.get_text_stream("stdout"), options))


@app.command()
def deploy(config: ConfigOption = "local", settings: SetOption = None) -> None:
    """Start the deployment that `sync` then uses.

    \b
    Examples:
      rdt-e2e deploy
      rdt-e2e deploy --set cluster.cpus_per_node=16
    """
    loaded = _load(config, settings)
    from rdt_e2e.cluster import local

    local.deploy(loaded, Console())


@app.command()
def down(
    force: Annotated[
        bool, typer.Option("--force", help="Also one that a running sync started for itself.")
    ] = False,
) -> None:
    """Stop the deployment and all it started.

    \b
    Examples:
      rdt-e2e down
      rdt-e2e down --force
    """
    from rdt_e2e.cluster import local

    console = Console()
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
        overrides=_overrides(settings),
    )
    raise typer.Exit(run_plan(options, typer.get_text_stream("stdout"), as_json_text=as_json))


@app.command("mini-kimi")
def mini_kimi(
    variant: Annotated[
        str, typer.Option("--variant", metavar="v1|v2", help="Weight version.")
    ] = "v1",
    cache_dir: Annotated[
        Path | None,
        typer.Option("--cache-dir", metavar="DIR", help="Cache folder (default: the user's)."),
    ] = None,
) -> None:
    """Build the embedded model, and print its folder.

    Nothing is built when the cache has it.

    \b
    Examples:
      rdt-e2e mini-kimi
      rdt-e2e mini-kimi --variant v2 --cache-dir /tmp/models
    """
    if variant not in ("v1", "v2"):
        raise ConfigError(f"command line: --variant is {variant!r}; it must be 'v1' or 'v2'")
    from rdt_e2e.mini_kimi import ensure_mini_kimi

    where = default_cache_dir() if cache_dir is None else cache_dir.expanduser()
    # The folder alone on standard output, so that a script can take it.
    report = Console(typer.get_text_stream("stderr")).info
    typer.echo(str(ensure_mini_kimi(where, variant, report=report)))


@app.command("config")
def show_config(
    config: ConfigOption = "local",
    settings: SetOption = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="List every key with its meaning instead.")
    ] = False,
) -> None:
    """Check a configuration and print it, resolved, as YAML.

    \b
    Examples:
      rdt-e2e config
      rdt-e2e config --config my.yaml --set sync.iters=5
      rdt-e2e config --keys
    """
    if keys:
        _print_keys(Config)
        return
    loaded = load_config(config, _overrides(settings))
    typer.echo(yaml.safe_dump(loaded.model_dump(mode="json"), sort_keys=False).rstrip())


def _load(config: str, settings: list[str] | None, iters: int | None = None) -> Config:
    """The configuration, with the environment of Ray and vLLM set before either is imported."""
    overrides = _overrides(settings)
    if iters is not None:
        overrides["sync.iters"] = iters
    loaded = load_config(config, overrides)
    apply_environment(loaded)
    return loaded


def _overrides(settings: Sequence[str] | None) -> dict[str, object]:
    """``["sync.iters=3"]`` as ``{"sync.iters": "3"}``; lists are written as JSON, none as null."""
    overrides: dict[str, object] = {}
    for setting in () if settings is None else settings:
        key, equals, text = setting.partition("=")
        if not equals or "." not in key:
            raise ConfigError(
                f"command line: --set {setting} is not SECTION.FIELD=VALUE, such as sync.iters=3"
            )
        overrides[key] = text
        if text == "null":
            overrides[key] = None
        elif text.startswith("["):
            try:
                overrides[key] = json.loads(text)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"command line: --set {setting}: the list is not JSON; write it as "
                    '["first", "second"]'
                ) from error
    return overrides


def _print_keys(model: type[BaseModel], prefix: str = "") -> None:
    """Every key below `model`, one paragraph each: name, default, meaning."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            _print_keys(annotation, f"{prefix}{name}.")
            continue
        default = "required"
        if not field.is_required():
            default = f"default {field.get_default(call_default_factory=True)}"
        meaning = "" if field.description is None else " ".join(field.description.split())
        typer.echo(f"{prefix}{name} ({default})\n    {meaning}")


def main() -> None:
    """Run the program; the entry point of the `rdt-e2e` command."""
    app()


if __name__ == "__main__":
    main()

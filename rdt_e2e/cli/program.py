"""What all verbs share: the program, its exit codes, and the options that make a configuration."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rdt_e2e import __version__
from rdt_e2e.config import Config, load_config
from rdt_e2e.environment import apply_environment
from rdt_e2e.errors import ConfigError, RdtE2EError

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


def load(config: str, settings: list[str] | None, iters: int | None = None) -> Config:
    """The configuration, with the environment of Ray and vLLM set before either is imported."""
    overrides = read_overrides(settings)
    if iters is not None:
        overrides["sync.iters"] = iters
    loaded = load_config(config, overrides)
    apply_environment(loaded)
    return loaded


def read_overrides(settings: Sequence[str] | None) -> dict[str, object]:
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

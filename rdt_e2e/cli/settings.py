"""Verbs that show what a run starts from: the configuration and the embedded model."""

from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import BaseModel

from rdt_e2e.cli.program import ConfigOption, SetOption, app, read_overrides
from rdt_e2e.config import Config, default_cache_dir, load_config
from rdt_e2e.console import Console
from rdt_e2e.errors import ConfigError


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
    loaded = load_config(config, read_overrides(settings))
    typer.echo(yaml.safe_dump(loaded.model_dump(mode="json"), sort_keys=False).rstrip())


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

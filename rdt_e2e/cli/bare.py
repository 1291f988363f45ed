"""Verbs for the deployment on bare hosts, which Ansible sets up."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rdt_e2e.cli.program import app
from rdt_e2e.config import default_cache_dir
from rdt_e2e.console import Console

if TYPE_CHECKING:
    from rdt_e2e.cluster.bare import BareTarget

bare = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="The deployment on bare hosts."
)
app.add_typer(bare, name="bare")

InventoryOption = Annotated[
    Path,
    typer.Option("--inventory", "-i", metavar="FILE", help="Ansible inventory of the hosts."),
]
INVENTORY = Path("ansible/inventory/hosts.yml")
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@bare.command("deploy", context_settings=PASSED_ON)
def bare_deploy(context: typer.Context, inventory: InventoryOption = INVENTORY) -> None:
    """Install what is committed on every host and start Ray there (ansible/cluster.yml).

    Further options are those of ansible-playbook. A token that no option and no variable gives is
    made, and kept in .secrets/ until `down`.

    \b
    Examples:
      rdt-e2e bare deploy
      rdt-e2e bare deploy -i hosts.yml -e @secret.yml --ask-vault-pass
    """
    from rdt_e2e.mini_kimi import ensure_mini_kimi

    target, console = _target(inventory)
    target.deploy(context.args, ensure_mini_kimi(default_cache_dir(), report=console.info))


@bare.command("sync", context_settings=PASSED_ON)
def bare_sync(
    context: typer.Context,
    inventory: InventoryOption = INVENTORY,
    runs: Annotated[
        Path, typer.Option("--runs", metavar="DIR", help="Local run directories.")
    ] = Path("runs"),
) -> None:
    """Run one job on the inference host, print its output, and fetch its run directory.

    Further options are those of `rdt-e2e sync`. Its exit status is this one's.

    \b
    Examples:
      rdt-e2e bare sync --config kimi-k2
      rdt-e2e bare sync --config h200x2 --iters 5
    """
    target, _ = _target(inventory)
    raise typer.Exit(target.sync(context.args, runs))


@bare.command("down", context_settings=PASSED_ON)
def bare_down(context: typer.Context, inventory: InventoryOption = INVENTORY) -> None:
    """Stop Ray on every host and remove its units and token; package and run directories stay.

    Further options are those of ansible-playbook.

    \b
    Examples:
      rdt-e2e bare down -i hosts.yml
    """
    target, _ = _target(inventory)
    target.down(context.args)


def _target(inventory: Path) -> "tuple[BareTarget, Console]":
    from rdt_e2e.cluster.bare import bare_target

    console = Console()
    return bare_target(inventory, console), console

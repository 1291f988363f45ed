"""Verbs for deployments elsewhere than in this machine's processes: Kubernetes and containers."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rdt_e2e.cli.program import app
from rdt_e2e.console import Console
from rdt_e2e.errors import ConfigError

if TYPE_CHECKING:
    from rdt_e2e.cluster.compose import ComposeTarget
    from rdt_e2e.cluster.kube_manifests import Document
    from rdt_e2e.cluster.kubernetes import KubernetesTarget

k8s = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The deployment on Kubernetes.")
compose = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The deployment in containers of this machine.",
)
app.add_typer(k8s, name="k8s")
app.add_typer(compose, name="compose")

OverlayOption = Annotated[
    str | None, typer.Option("--overlay", metavar="NAME", help="A folder of k8s/overlays.")
]
ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context", metavar="NAME", help="Context of the kubeconfig; confirms it as well."
    ),
]
ImageOption = Annotated[
    str | None,
    typer.Option(
        "--image", metavar="IMAGE", help="Where the nodes get the image (registry/name:tag)."
    ),
]
RunsOption = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Local run directories.")]
LockOption = Annotated[str, typer.Option("--lock", metavar="cpu|cuda", help="Which image.")]


@k8s.command("deploy")
def k8s_deploy(
    overlay: OverlayOption = None,
    context: ContextOption = None,
    image: ImageOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Longest wait for the pods, in seconds.")
    ] = 1800,
) -> None:
    """Check the cluster, apply k8s/ or an overlay of it, and wait until every Ray node is ready.

    \b
    Examples:
      rdt-e2e k8s deploy --context my-cluster --image registry.example/rdt-e2e:0.1.0-cuda
      rdt-e2e k8s deploy --overlay cpu
    """
    target, documents, name = _target(overlay, context, image)
    from rdt_e2e.cluster.kubernetes import describe_target

    _confirm(f"apply {describe_target(documents, name)}", context, target.console)
    target.deploy(documents, timeout)


@k8s.command("sync")
def k8s_sync(
    overlay: OverlayOption = None,
    context: ContextOption = None,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="NAME", help="A RayJob of k8s/jobs (default: sync)."),
    ] = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Run one job on the cluster that is up, print its output, and fetch its run directory.

    \b
    Examples:
      rdt-e2e k8s sync
      rdt-e2e k8s sync --job doctor
      rdt-e2e k8s sync --overlay cpu
    """
    target, _, _ = _target(overlay, context, None)
    # The overlay without GPUs has no configuration for Kimi K2.
    target.run_job(job or ("mini-kimi" if overlay == "cpu" else "sync"), runs)


@k8s.command("down")
def k8s_down(overlay: OverlayOption = None, context: ContextOption = None) -> None:
    """Remove what deploy made and nothing else; models and runs on the nodes' disks stay.

    \b
    Examples:
      rdt-e2e k8s down --context my-cluster
    """
    target, documents, name = _target(overlay, context, None)
    _confirm(f"remove the deployment from context {name}", context, target.console)
    target.down(documents)


@compose.command("deploy")
def compose_deploy(
    lock: LockOption = "cpu",
    config: Annotated[str, typer.Option("--config", "-c", metavar="NAME")] = "local",
    build: Annotated[
        bool, typer.Option("--build/--no-build", help="Build the image first.")
    ] = True,
) -> None:
    """Build the image, start head, trainer and inference, and wait until all are healthy.

    \b
    Examples:
      rdt-e2e compose deploy
      rdt-e2e compose deploy --no-build
    """
    _compose(lock, config).deploy(build=build)


@compose.command(
    "sync", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def compose_sync(
    context: typer.Context,
    lock: LockOption = "cpu",
    config: Annotated[str, typer.Option("--config", "-c", metavar="NAME")] = "local",
    runs: RunsOption = Path("runs"),
) -> None:
    """Run one job across the containers and copy its run directory here.

    Further options are those of `rdt-e2e sync`. Its exit status is this one's.

    \b
    Examples:
      rdt-e2e compose sync
      rdt-e2e compose sync --iters 5
    """
    raise typer.Exit(_compose(lock, config).sync(config, context.args, runs))


@compose.command("down")
def compose_down(
    lock: LockOption = "cpu",
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Also models and run directories.")
    ] = False,
) -> None:
    """Remove the containers and their network.

    \b
    Examples:
      rdt-e2e compose down --volumes
    """
    _compose(lock, "local").down(volumes=volumes)


def _target(
    overlay: str | None, context: str | None, image: str | None
) -> "tuple[KubernetesTarget, list[Document], str]":
    from rdt_e2e.cluster.kube_api import OfficialApi, contexts
    from rdt_e2e.cluster.kube_manifests import load_manifests
    from rdt_e2e.cluster.kubectl import Kubectl
    from rdt_e2e.cluster.kubernetes import KubernetesTarget

    known, current = contexts()
    name = context or current
    if name not in known:
        raise ConfigError(f"command line: no context {name!r}; contexts: {', '.join(known)}")
    kubectl = Kubectl(name)
    documents = load_manifests(overlay, kubectl, image)
    return KubernetesTarget(OfficialApi(name), kubectl, Console()), documents, name


def _confirm(what: str, context: str | None, console: Console) -> None:
    """Ask, unless the context was named: it is easy to be on another one than one thinks."""
    if context is not None:
        console.info(what)
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            f"command line: to {what}, name the context: --context NAME (make: CONTEXT=NAME)"
        )
    typer.confirm(f"{what}?", abort=True)


def _compose(lock: str, config: str) -> "ComposeTarget":
    from rdt_e2e.cluster.compose import ComposeTarget, compose_root, find_engine

    if lock not in ("cpu", "cuda"):
        raise ConfigError(f"command line: --lock is {lock!r}; it must be 'cpu' or 'cuda'")
    environment = {"LOCK": lock, "CONFIG": config}
    return ComposeTarget(compose_root(), find_engine(), environment, Console())

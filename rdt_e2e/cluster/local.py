"""A Ray cluster on this machine: two nodes with logical GPUs, or one node with its real ones.

Without a GPU there is a trainer node and an inference node. Distinct loopback addresses make them two
nodes to Ray and to vLLM, so placement runs as it will on two hosts. With GPUs there is one node: two
would each number the same GPUs from 0. What was started is written to a state file and ended by its own
process ids.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from rdt_e2e.cluster.children import Identity, end_orphans, find, identity
from rdt_e2e.config import Config
from rdt_e2e.console import Console
from rdt_e2e.environment import ray_environment
from rdt_e2e.errors import EnvironmentCheckError

OBJECT_STORE_BYTES = 256 << 20
"""Ray's own object store per node; weights never pass through it."""
STOP_TIMEOUT_S = 15.0
"""How long a node may take to stop by itself before it is killed."""

_started: list[subprocess.Popen[bytes]] = []
"""Nodes this process started. They are ended by id; the objects are kept so that Python does not
warn of a process that is meant to outlive it."""


@dataclass(frozen=True)
class ClusterState:
    """A local cluster that was started, as kept in the state file.

    Attributes:
        address: `host:port` of the head.
        processes: Each node's root process.
        folder: Temporary folder of the cluster: sessions, logs and the token.
        owner: Process id of the `sync` that started it for itself alone, or None after `deploy`.
        gpus: Logical GPUs of the trainer node and of the inference node.
    """

    address: str
    processes: tuple[Identity, ...]
    folder: str
    owner: int | None
    gpus: tuple[int, int]

    @property
    def token_file(self) -> Path:
        """File that holds the cluster's authentication token."""
        return Path(self.folder, "token")

    @property
    def owned_elsewhere(self) -> bool:
        """Whether another run that is still going started it for itself, and will stop it."""
        owner = self.owner
        return owner is not None and owner != os.getpid() and psutil.pid_exists(owner)


def state_file() -> Path:
    """Where the running local cluster is recorded (XDG state directory)."""
    base = os.environ.get("XDG_STATE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return root / "rdt-e2e" / "cluster.json"


def drivers_folder() -> Path:
    """Where running drivers keep their children on record (XDG state directory)."""
    return state_file().with_name("drivers")


def status() -> ClusterState | None:
    """The running local cluster, or None; a cluster of which any node is gone counts as down."""
    state = _read_state()
    if state is None or not all(find(*node) for node in state.processes):
        return None
    return state


def deploy(config: Config, console: Console, owner: int | None = None) -> ClusterState:
    """Start the local cluster, or return the one that is already up.

    Args:
        config: The run's configuration, target local.
        console: For the lines printed.
        owner: Process id of the run it is started for, which then also ends it.

    Returns:
        The running cluster.

    Raises:
        EnvironmentCheckError: A port or address cannot be used, a node did not come up, or the
            running cluster is smaller than this configuration needs.
    """
    gpus = (config.trainer.num_ranks, config.num_consumers)
    running = status() or _with_lost_nodes(config, console)
    if running is not None:
        if running.owned_elsewhere:
            raise EnvironmentCheckError(
                f"the run with process id {running.owner} is using the local cluster at "
                f"{running.address} and will stop it; wait for it, or start a cluster for both with "
                "`rdt-e2e deploy`"
            )
        if any(have < need for have, need in zip(running.gpus, gpus, strict=True)):
            raise EnvironmentCheckError(
                f"the running local cluster has {running.gpus} logical GPUs (trainer, inference), this "
                f"configuration needs {gpus}; stop it with `rdt-e2e down` and deploy again"
            )
        console.info(f"local cluster at {running.address} is up already")
        return running
    down(console)  # What is left of a cluster that lost its head.
    folder = Path(tempfile.mkdtemp(prefix="rdt-e2e-"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    port = _reserve_port(config.cluster.trainer_ip, config.cluster.port)
    state = ClusterState(f"{config.cluster.trainer_ip}:{port}", (), str(folder), owner, gpus)
    try:
        for role, arguments in _node_arguments(config, port, gpus).items():
            process = _start_node(role, arguments, folder, _node_environment(config, state))
            state = replace(
                state, processes=(*state.processes, identity(psutil.Process(process.pid)))
            )
            _write_state(state)
            if role == "trainer":
                _wait_for_port(process, state, config.cluster.start_timeout_s)
    except BaseException:
        _stop(state)
        raise
    console.info(f"local cluster at {state.address}: {len(state.processes)} nodes started")
    return state


def _with_lost_nodes(config: Config, console: Console) -> ClusterState | None:
    """Start again the nodes that a living head has lost; what lives there stays.

    Returns:
        The whole cluster, or None if the head is gone as well.
    """
    state = _read_state()
    if state is None or not state.processes or not find(*state.processes[0]):
        return None
    port = int(state.address.rpartition(":")[2])
    processes = list(state.processes)
    roles = _node_arguments(config, port, state.gpus)
    for position, (role, arguments) in enumerate(roles.items()):
        if position < len(processes) and find(*processes[position]):
            continue
        folder = Path(state.folder)
        process = _start_node(role, arguments, folder, _node_environment(config, state))
        processes[position:] = [identity(psutil.Process(process.pid)), *processes[position + 1 :]]
        console.info(f"local cluster at {state.address}: the {role} node was gone, started again")
    state = replace(state, processes=tuple(processes))
    _write_state(state)
    return state


def down(console: Console, *, force: bool = False) -> bool:
    """Stop the local cluster and everything that runs in it.

    Args:
        console: For the line printed.
        force: Stop it even if a run that is still going started it for itself.

    Returns:
        Whether there was anything to stop.

    Raises:
        EnvironmentCheckError: It belongs to a run that is still going, and `force` is false.
    """
    end_orphans(drivers_folder())
    state = _read_state()
    if state is None:
        return False
    if state.owned_elsewhere and not force:
        raise EnvironmentCheckError(
            f"the local cluster at {state.address} was started by the run with process id "
            f"{state.owner}, which is still going and will stop it; wait for it, or use --force"
        )
    _stop(state)
    console.info(f"local cluster at {state.address} stopped")
    return True


def client_environment(state: ClusterState) -> dict[str, str]:
    """Variables a process needs to join the cluster: its address and its token."""
    return {"RAY_ADDRESS": state.address, "RAY_AUTH_TOKEN_PATH": str(state.token_file)}


def _node_arguments(
    config: Config, port: int, gpus: tuple[int, int]
) -> Mapping[str, Sequence[str]]:
    cluster = config.cluster
    common = [
        "--block",
        f"--num-cpus={cluster.cpus_per_node}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
        "--include-log-monitor=false",  # Nobody reads workers' logs through it here.
    ]
    head = [
        "--head",
        f"--port={port}",
        "--include-dashboard=false",
    ]
    if config.trainer.device == "cuda":
        return {
            "trainer": [*head, *_addressed(cluster.trainer_ip), f"--num-gpus={sum(gpus)}", *common]
        }
    return {
        "trainer": [*head, *_addressed(cluster.trainer_ip), f"--num-gpus={gpus[0]}", *common],
        "inference": [
            f"--address={cluster.trainer_ip}:{port}",
            *_addressed(cluster.inference_ip),
            f"--num-gpus={gpus[1]}",
            *common,
        ],
    }


def _addressed(address: str) -> list[str]:
    return [
        f"--node-ip-address={address}",
        # The agents' ports are fixed by default and listen on every address.
        f"--dashboard-agent-listen-port={_free_port(address)}",
        f"--dashboard-agent-grpc-port={_free_port(address)}",
    ]


def _node_environment(config: Config, state: ClusterState) -> dict[str, str]:
    return os.environ | ray_environment(config) | client_environment(state)


def _start_node(
    role: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    # Short, because Ray's socket paths below it must stay under 108 characters.
    session = folder / role[0]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
    with (folder / f"{role}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--temp-dir={session}"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the program, which then stops the nodes.
        )
    _started.append(process)
    return process


def _wait_for_port(process: subprocess.Popen[bytes], state: ClusterState, timeout_s: float) -> None:
    host, port = state.address.split(":")
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EnvironmentCheckError(
                f"the Ray head at {state.address} ended while starting: {_log_tail(state)}"
            )
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.1)
    raise EnvironmentCheckError(
        f"the Ray head did not answer at {state.address} within {timeout_s:g} s: {_log_tail(state)}"
    )


def _log_tail(state: ClusterState) -> str:
    lines = Path(state.folder, "trainer.log").read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it wrote no log"


def _reserve_port(address: str, port: int) -> int:
    try:
        return _free_port(address, port)
    except OSError as error:
        raise EnvironmentCheckError(
            f"port {port} on {address} cannot be used: {error.strerror}; set cluster.port to a free "
            "one, or to 0 for any"
        ) from None


def _free_port(address: str, port: int = 0) -> int:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        found: int = listener.getsockname()[1]
        return found


def _stop(state: ClusterState) -> None:
    """End the nodes and their descendants by id, then remove what they left on disk."""
    roots = [process for node in state.processes if (process := find(*node))]
    family = [*roots, *_descendants(roots)]
    for process in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)
    for child in _started:
        child.poll()
    shutil.rmtree(state.folder, ignore_errors=True)
    state_file().unlink(missing_ok=True)


def _descendants(roots: Sequence[psutil.Process]) -> Iterator[psutil.Process]:
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield from root.children(recursive=True)


def _read_state() -> ClusterState | None:
    try:
        raw = json.loads(state_file().read_text())
        return ClusterState(
            address=raw["address"],
            processes=tuple((int(pid), float(at)) for pid, at in raw["processes"]),
            folder=raw["folder"],
            owner=raw["owner"],
            gpus=tuple(raw["gpus"]),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentCheckError(
            f"{state_file()} is damaged ({error}); end the Ray processes it belonged to and remove it"
        ) from error


def _write_state(state: ClusterState) -> None:
    path = state_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps(asdict(state), indent=2))
    partial.replace(path)

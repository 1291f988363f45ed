"""The deployment as containers of this machine, through docker compose or podman-compose."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdt_e2e.cluster.kubectl import unpack
from rdt_e2e.console import Console
from rdt_e2e.errors import EnvironmentCheckError

NODES = ("head", "trainer", "inference")
JOB_NODE = "inference"
"""Where the driver has to run; see docker-compose.yml."""
TOKEN = Path(".secrets/ray-token")
RUNS_FOLDER = "/runs"
START_TIMEOUT_S = 300.0
MAX_STARTS = 3
"""How often a node's container may be started: Ray gives up after a fixed 30 s, which a busy machine may need."""
LOG_LINES = 20
POLL_S = 1.0
HEALTH = ("/opt/rdt-e2e/containers/node.sh", "health")

IN_BASH = ("bash", "-c")
_START_JOB = 'echo $$ >"$HOME/.job.pid"; exec "$@"'
_END_JOB = (
    'pid=$(<"$HOME/.job.pid") && kill -INT "$pid" && timeout 60 tail --pid="$pid" -f /dev/null'
)

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@dataclass(frozen=True)
class ComposeTarget:
    """The compose project of this repository.

    Attributes:
        root: Folder with docker-compose.yml.
        command: The engine's command, such as `docker compose`.
        environment: Variables for the compose file (LOCK, CONFIG, NUM_GPUS), on top of this process's.
        console: For the lines printed.
        run: Runs a command, as `subprocess.run` does.
        clock: Seconds from any fixed point.
        pause: Waits some seconds.
    """

    root: Path
    command: Sequence[str]
    environment: Mapping[str, str]
    console: Console
    run: Run = subprocess.run
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep

    def deploy(self, *, build: bool = True) -> None:
        """Build the image, start the three nodes and wait until Ray knows them.

        Raises:
            EnvironmentCheckError: The engine failed, a node ended each time it was started, or is not
                healthy in time.
        """
        make_token(self.root / TOKEN)
        if build:
            self._call(["build", "head"])
        self._call(["up", "-d", *NODES])
        deadline = self.clock() + START_TIMEOUT_S
        num_starts = dict.fromkeys(NODES, 1)
        for node in NODES:
            # Not every engine runs health checks by itself.
            while self._run(["exec", "-T", node, *HEALTH], capture=True).returncode != 0:
                for ended, status in self._ended().items():
                    self._start_again(ended, status, num_starts)
                if self.clock() > deadline:
                    raise EnvironmentCheckError(
                        f"container {node} is not healthy after {START_TIMEOUT_S:g} s; see its log: "
                        f"{' '.join(self.command)} logs {node}"
                    )
                self.pause(POLL_S)
        self.console.info(f"up and healthy: {', '.join(NODES)}")

    def sync(self, config: str, arguments: Sequence[str], runs_dir: Path) -> int:
        """Run one job in the inference container, and copy its run directory out.

        Args:
            config: Name of the profile.
            arguments: Further arguments of `rdt-e2e sync`.
            runs_dir: Local folder of run directories.

        Returns:
            Exit status of the job.

        Raises:
            EnvironmentCheckError: Nothing is deployed, or the container ended, and the job with it.
        """
        before = set(self._run_names())
        job = ["rdt-e2e", "sync", "--config", config, *arguments]
        try:
            status = self._run(
                ["exec", "-T", JOB_NODE, *IN_BASH, _START_JOB, "job", *job]
            ).returncode
        except KeyboardInterrupt:
            # The engine's client has ended, the job inside has not heard of it.
            self._run(["exec", "-T", JOB_NODE, *IN_BASH, _END_JOB])
            raise
        for name in sorted(set(self._run_names()) - before):
            num_files = self._fetch(name, runs_dir / name)
            self.console.info(f"fetched {runs_dir / name} ({num_files} files)")
        if (
            status != 0
            and self._run(["exec", "-T", JOB_NODE, "true"], capture=True).returncode != 0
        ):
            raise EnvironmentCheckError(
                f"container {JOB_NODE} ended (status {status} of the job), and the job with it; see "
                f"`{' '.join(self.command)} logs {JOB_NODE}`, and start it again: `make deploy "
                "TARGET=compose`"
            )
        return status

    def down(self, *, volumes: bool) -> None:
        """Remove the containers and their network; with `volumes`, models and runs as well.

        Raises:
            EnvironmentCheckError: The engine failed.
        """
        # The file names the token, so the engine wants it there even now.
        make_token(self.root / TOKEN)
        self._call(["down", *(["--volumes"] if volumes else [])])
        (self.root / TOKEN).unlink()

    def _ended(self) -> dict[str, int]:
        """Exit statuses of the nodes whose containers do not run any more."""
        # Without it docker lists the running ones alone; podman-compose lists all, and does not know it.
        everything = ["--all"] if self.command[-1] == "compose" else []
        listed = self._run(["ps", *everything, "--format", "json"], capture=True).stdout.decode()
        return {
            _service(one): int(one["ExitCode"])
            for one in _containers(listed)
            if one["State"] in ("exited", "stopped", "dead") and _service(one) in NODES
        }

    def _start_again(self, node: str, status: int, num_starts: dict[str, int]) -> None:
        if num_starts[node] >= MAX_STARTS:
            tail = ["--no-color", "--no-log-prefix", "--tail", str(LOG_LINES)]
            done = self._run(["logs", *tail, node], capture=True)
            lines = (done.stdout + done.stderr).decode(errors="replace").strip()
            raise EnvironmentCheckError(
                f"container {node} ended with status {status} each of the {MAX_STARTS} times it was "
                f"started. Its last lines:\n{lines or 'it wrote no log'}"
            )
        num_starts[node] += 1
        self.console.info(
            f"container {node} ended with status {status}; start {num_starts[node]} of {MAX_STARTS}"
        )
        self._call(["up", "-d", node])

    def _run_names(self) -> list[str]:
        listed = self._run(["exec", "-T", "head", "ls", "-1", RUNS_FOLDER], capture=True)
        if listed.returncode != 0:
            raise EnvironmentCheckError(
                "no container `head` is running; deploy first: `make deploy TARGET=compose`"
            )
        return listed.stdout.decode(errors="replace").split()

    def _fetch(self, name: str, into: Path) -> int:
        command = [
            *self.command,
            "exec",
            "-T",
            "head",
            "tar",
            "-C",
            f"{RUNS_FOLDER}/{name}",
            "-cf",
            "-",
            ".",
        ]
        with subprocess.Popen(
            command, cwd=self.root, env=self._environment(), stdout=subprocess.PIPE
        ) as process:
            if process.stdout is None:
                raise AssertionError("the output is a pipe")
            return unpack(process.stdout, into)

    def _call(self, arguments: Sequence[str]) -> None:
        status = self._run(arguments).returncode
        if status != 0:
            raise EnvironmentCheckError(
                f"{' '.join([*self.command, *arguments])} failed (status {status}); see its lines above"
            )

    def _run(
        self, arguments: Sequence[str], *, capture: bool = False
    ) -> "subprocess.CompletedProcess[bytes]":
        command = [*self.command, *arguments]
        return self.run(command, cwd=self.root, env=self._environment(), capture_output=capture)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment}


def _containers(listed: str) -> list[dict[str, Any]]:
    """What `ps --format json` printed: podman's list, or docker's line for each container."""
    if listed.startswith("["):
        found: list[dict[str, Any]] = json.loads(listed)
        return found
    return [json.loads(line) for line in listed.splitlines()]


def _service(container: dict[str, Any]) -> str:
    name: str = container.get("Service") or container["Labels"]["com.docker.compose.service"]
    return name


def find_engine(run: Run = subprocess.run) -> list[str]:
    """The compose command of this machine: docker's where it answers, else podman's.

    Raises:
        EnvironmentCheckError: There is neither.
    """
    asked = ["docker", "compose", "version"]
    if shutil.which("docker") is not None and run(asked, capture_output=True).returncode == 0:
        return asked[:2]
    # The lock files hold it, so it lies beside this interpreter, which need not be on PATH.
    beside = str(Path(sys.executable).with_name("podman-compose"))
    found = shutil.which("podman-compose") or shutil.which(beside)
    if found is not None and shutil.which("podman") is not None:
        return [found]
    raise EnvironmentCheckError(
        "neither `docker compose` nor podman with podman-compose is here; install Docker with its compose "
        "plugin, or podman (podman-compose comes with the lock files)"
    )


def compose_root() -> Path:
    """The folder of docker-compose.yml: a clone of the repository.

    Raises:
        EnvironmentCheckError: The program does not run from a clone.
    """
    root = Path(__file__).parents[2]
    if not (root / "docker-compose.yml").is_file():
        raise EnvironmentCheckError(
            f"{root} has no docker-compose.yml; the compose target runs from a clone of the repository"
        )
    return root


def make_token(path: Path) -> None:
    """Make the cluster's token, unless it is there.

    Readable for every user inside the containers, whose ids are not ours; the folder is closed to all
    others on this machine.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
        path.chmod(0o444)

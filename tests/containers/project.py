"""The compose project under test, driven by the program's own verbs, and what is done to it from outside."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rdt_e2e.cluster.compose import NODES
from tests.containers.base import ROOT, restored_network

PROGRAM = str(Path(sys.executable).with_name("rdt-e2e"))
VERB_TIMEOUT_S = 400.0
COLD_S = 600.0
"""Longest wait for a job to reach its syncs: vLLM starts, on few cores."""


class Job:
    """A running `rdt-e2e compose sync`, with what it has printed so far."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.lines.append(line.rstrip())
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def output(self) -> str:
        """All lines."""
        return "\n".join(self.lines)

    @property
    def error(self) -> str:
        """The error that it ended with, without the program's name."""
        mark = "rdt-e2e: error: "
        errors = [line.removeprefix(mark) for line in self.lines if line.startswith(mark)]
        assert errors, self.output
        return errors[-1]

    def await_line(self, pattern: str, timeout_s: float = COLD_S) -> None:
        """Wait until a line matches."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._matches(pattern), timeout_s)
        assert self._matches(pattern), f"no {pattern!r} in:\n{self.output}"

    def _matches(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self.lines)

    def seconds_of(self, step: str) -> float:
        """How long a step took by the job's own line."""
        (said,) = re.findall(rf"\] {re.escape(step)}: ([\d.]+) s$", self.output, re.MULTILINE)
        return float(said)

    def end(self, timeout_s: float = COLD_S) -> int:
        """Wait for the end; its exit status."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.output}") from error
        self._reader.join()
        return status

    def close(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(90)
            self._process.kill()
        self._reader.join()


@dataclass
class Project:
    """Head, trainer and inference, up and healthy.

    Attributes:
        name: Of the compose project, so that it can be told from any other.
        runs: Where run directories are copied to.
        environment: Of every command.
    """

    name: str
    runs: Path
    environment: Mapping[str, str]

    def deploy(self) -> None:
        """Start what does not run, and wait until it is healthy."""
        try:
            self._verb("deploy", "--no-build")
        except AssertionError as error:
            for node in NODES:
                with contextlib.suppress(AssertionError):
                    error.add_note(self.podman("logs", "--tail", "40", self.container(node)))
            raise

    def down(self) -> None:
        """Remove everything that is the project's."""
        self._verb("down", "--volumes")

    @contextlib.contextmanager
    def job(self, *arguments: str) -> Iterator[Job]:
        """A sync across the containers, as `make sync TARGET=compose` runs it."""
        command = [PROGRAM, "compose", "sync", "--runs", str(self.runs), *arguments]
        job = Job(command, self.environment)
        try:
            yield job
        finally:
            job.close()

    def newest_run(self) -> Path:
        """The last run directory that was copied here."""
        return max(self.runs.iterdir())

    def podman(self, *arguments: str) -> str:
        """Standard output of a podman command that must succeed."""
        return output("podman", *arguments, environment=self.environment)

    def inside(self, service: str, script: str) -> str:
        """Run a shell script in a container."""
        return self.podman("exec", self.container(service), "bash", "-euc", script)

    def kill(self, service: str) -> None:
        """Kill a container, all of its processes at once."""
        self.podman("kill", self.container(service))

    def started_at(self, service: str) -> str:
        """When a container was started last."""
        return self.podman("inspect", "-f", "{{.State.StartedAt}}", self.container(service))

    def address(self, service: str) -> str:
        """IP address of a container."""
        place = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self.podman("inspect", "-f", place, self.container(service)).strip()

    def in_network_of(self, service: str, *command: str) -> str:
        """Run a command of this machine in a container's network namespace."""
        pid = self.podman("inspect", "-f", "{{.State.Pid}}", self.container(service)).strip()
        return output("nsenter", "-t", pid, "-n", *command, environment=self.environment)

    def num_bytes_sent(self, service: str) -> int:
        """Bytes that a container has sent since it started."""
        for line in self.in_network_of(service, "cat", "/proc/net/dev").splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                return int(counters.split()[8])
        raise AssertionError(f"{service} has no eth0")

    @contextlib.contextmanager
    def shaped(self, service: str, *discipline: str) -> Iterator[None]:
        """Put a queueing discipline on what a container sends, in place of one that is there."""
        self.in_network_of(service, "tc", "qdisc", "replace", "dev", "eth0", "root", *discipline)
        try:
            yield
        finally:
            # A container that was killed took it along.
            with contextlib.suppress(AssertionError):
                self.in_network_of(service, "tc", "qdisc", "del", "dev", "eth0", "root")

    def limited(self, service: str, rate: str) -> contextlib.AbstractContextManager[None]:
        """What a container sends goes at this rate, such as `100mbit`."""
        shape = ("rate", rate, "burst", "64kb", "latency", "400ms")
        return self.shaped(service, "tbf", *shape)

    def await_pulls(self, job: Job, sync: int = 2, num_bytes: int = 2_000_000) -> None:
        """Wait until a job's warm sync is on the wire: the trainer has sent that much since it began.

        The ones before it have passed then, so the deployment was able to sync.
        """
        job.await_line(rf"\] sync {sync} \(warm\) \.\.\.")
        before = self.num_bytes_sent("trainer")
        deadline = time.monotonic() + 120
        while self.num_bytes_sent("trainer") < before + num_bytes:
            assert time.monotonic() < deadline, f"nothing is pulled:\n{job.output}"
            time.sleep(0.05)

    def container(self, service: str) -> str:
        """Name of a container."""
        return f"{self.name}_{service}_1"

    def _verb(self, *arguments: str) -> None:
        done = subprocess.run(
            [PROGRAM, "compose", *arguments],
            cwd=ROOT,
            env=self.environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=VERB_TIMEOUT_S,
        )
        assert done.returncode == 0, f"rdt-e2e compose {' '.join(arguments)}:\n{done.stdout}"


def output(*command: str, environment: Mapping[str, str]) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@contextlib.contextmanager
def running_project(folder: Path, environment: Mapping[str, str]) -> Iterator[Project]:
    """Bring the compose file up under a name of its own; remove all of it afterwards.

    Args:
        folder: For run directories and small files.
        environment: Of podman.
    """
    # Where a Docker daemon runs as well, the image is still podman's.
    no_docker = folder / "docker"
    no_docker.write_text("#!/bin/sh\nexit 1\n")
    no_docker.chmod(0o755)
    name = f"rdt-e2e-test-{os.getpid()}"
    project = Project(
        name,
        folder / "runs",
        {
            **environment,
            "COMPOSE_PROJECT_NAME": name,
            "PATH": f"{folder}:{environment['PATH']}",
        },
    )
    with restored_network(environment):
        try:
            project.deploy()
            yield project
        finally:
            project.down()

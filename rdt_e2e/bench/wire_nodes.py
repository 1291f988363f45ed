"""A Ray node in each of the link's namespaces: two nodes with addresses and a fabric of their own."""

import contextlib
import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rdt_e2e.bench.link import ADDRESSES, Link
from rdt_e2e.bench.process import start_logged
from rdt_e2e.cluster.local import OBJECT_STORE_BYTES
from rdt_e2e.config import Config
from rdt_e2e.environment import ray_environment
from rdt_e2e.errors import EnvironmentCheckError

PORT = 6379
"""Of the head; nothing else listens in its namespace."""
HEAD = f"{ADDRESSES['trainer']}:{PORT}"


@contextlib.contextmanager
def wire_nodes(link: Link, config: Config, folder: Path) -> Iterator[Mapping[str, str]]:
    """Start the trainer's and the inference node for the length of a block.

    Args:
        link: Where; its namespaces end what the nodes leave.
        config: The run's configuration, with `cluster.address` at `HEAD`.
        folder: For sessions, logs and the token; removed after the link. Its path is short, because
            Ray's socket paths below it must stay under 108 characters.

    Yields:
        The environment of a driver that joins them.

    Raises:
        EnvironmentCheckError: A node did not start.
    """
    with contextlib.ExitStack() as stack:
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        own = {"RAY_ADDRESS": HEAD, "RAY_AUTH_TOKEN_PATH": str(token)}
        environment = os.environ | ray_environment(config) | own
        gpus = {"trainer": config.trainer.num_ranks, "inference": config.num_consumers}
        for role, how in (
            ("trainer", ("--head", f"--port={PORT}", "--include-dashboard=false")),
            ("inference", (f"--address={HEAD}",)),
        ):
            command = link.command(
                role,
                *("-m", "ray.scripts.scripts", "start", "--block", *how),
                *(f"--node-ip-address={ADDRESSES[role]}", f"--num-gpus={gpus[role]}"),
                *(f"--num-cpus={config.cluster.cpus_per_node}", "--disable-usage-stats"),
                *(f"--resources={json.dumps({role: 1})}", "--include-log-monitor=false"),
                *(f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={folder / role[0]}"),
            )
            log = folder / f"{role}.log"
            process = stack.enter_context(_node(command, environment, log))
            if role == "trainer":
                _wait_for_head(link, process, log, config.cluster.start_timeout_s)
        yield environment


@contextlib.contextmanager
def _node(
    command: list[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    process = start_logged(command, environment, log)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def _wait_for_head(
    link: Link, process: subprocess.Popen[bytes], log: Path, timeout_s: float
) -> None:
    """Wait until the head answers the other namespace."""
    host, port = HEAD.split(":")
    probe = f"import socket; socket.create_connection(({host!r}, {port}), timeout=1)"
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        done = subprocess.run(
            link.command("inference", "-c", probe), check=False, stderr=subprocess.DEVNULL
        )
        if done.returncode == 0:
            return
        time.sleep(0.1)
    lines = log.read_text(errors="replace").strip().splitlines()
    raise EnvironmentCheckError(
        f"no Ray head answers at {HEAD} in {link.namespaces['trainer']}: "
        f"{lines[-1].strip() if lines else 'it wrote no log'}"
    )

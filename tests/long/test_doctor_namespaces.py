"""The doctor between two network namespaces: two nodes with addresses and an interface of their own."""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rdt_e2e.config import load_config
from rdt_e2e.environment import ray_environment

PORT = 6399
TIMEOUT_S = 300
CONFIG = {"cluster.target": "ray", "cluster.address": f"10.213.7.1:{PORT}"}

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="needs root and the `ip` program, to make network namespaces",
)


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


class Namespace:
    """A network namespace with one end of a veth pair."""

    def __init__(self, name: str, link: str, address: str) -> None:
        self.name, self.address = name, address
        ip("link", "set", link, "netns", name)
        ip("-n", name, "addr", "add", f"{address}/30", "dev", link)
        ip("-n", name, "link", "set", link, "up")
        ip("-n", name, "link", "set", "lo", "up")

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, sys.executable, *arguments]

    def end(self) -> None:
        """End what runs here, by id, and remove the namespace."""
        alive = [psutil.Process(int(pid)) for pid in ip("netns", "pids", self.name).split()]
        for process in alive:
            process.terminate()
        _, alive = psutil.wait_procs(alive, timeout=20)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=20)
        ip("netns", "del", self.name)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Namespace, dict[str, str]]]:
    """Ray in two namespaces; gives the trainer's, and the environment of a driver."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    environment = os.environ | ray_environment(load_config("local", CONFIG | {"sync.iters": 1}))
    environment |= {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_ADDRESS": CONFIG["cluster.address"]}
    mark = f"{os.getpid() % 10_000}"
    links = (f"rdt{mark}t", f"rdt{mark}i")
    names = (f"rdt-e2e-{mark}-trainer", f"rdt-e2e-{mark}-inference")
    made: list[Namespace] = []
    started: list[subprocess.Popen[bytes]] = []
    # Short: Ray's socket paths below it must stay under 108 characters.
    temporary = Path(f"/tmp/rdt{mark}")
    try:
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ("10.213.7.1", "10.213.7.2"), strict=True):
            ip("netns", "add", name)
            made.append(Namespace(name, link, address))
        for node, how in zip(
            made,
            (["--head", f"--port={PORT}"], [f"--address={CONFIG['cluster.address']}"]),
            strict=True,
        ):
            started.append(
                subprocess.Popen(
                    node.command(
                        *("-m", "ray.scripts.scripts", "start", "--block", *how),
                        *(f"--node-ip-address={node.address}", "--num-gpus=2", "--num-cpus=8"),
                        *("--object-store-memory=268435456", "--disable-usage-stats"),
                        *("--include-log-monitor=false", f"--temp-dir={temporary}/{len(started)}"),
                        *(["--include-dashboard=false"] if how[0] == "--head" else []),
                    ),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            if how[0] == "--head":
                wait_for_port(made[0])
        wait_for_nodes(made[0], environment)
        yield made[0], environment
    finally:
        for node in made:
            node.end()
        for process in started:
            process.wait(20)
        if not made:
            subprocess.run(["ip", "link", "del", links[0]], capture_output=True, check=False)
        shutil.rmtree(temporary, ignore_errors=True)


def wait_for_port(node: Namespace) -> None:
    probe = (
        "import socket, time\n"
        "for _ in range(600):\n"
        "    try:\n"
        f"        socket.create_connection(('{node.address}', {PORT}), timeout=1)\n"
        "        break\n"
        "    except OSError:\n"
        "        time.sleep(0.1)\n"
        "else:\n"
        "    raise SystemExit('no Ray head')\n"
    )
    subprocess.run(node.command("-c", probe), check=True, timeout=120)


def wait_for_nodes(node: Namespace, environment: dict[str, str]) -> None:
    probe = (
        "import ray, time\n"
        f"ray.init(address='{CONFIG['cluster.address']}', log_to_driver=False)\n"
        "for _ in range(600):\n"
        "    if sum(one['Alive'] for one in ray.nodes()) == 2:\n"
        "        break\n"
        "    time.sleep(0.1)\n"
        "else:\n"
        "    raise SystemExit('the second node did not join')\n"
    )
    subprocess.run(node.command("-c", probe), env=environment, check=True, timeout=120)


def test_each_namespace_reads_from_the_other(nodes: tuple[Namespace, dict[str, str]]) -> None:
    trainer, environment = nodes
    settings = [f"--set={key}={value}" for key, value in CONFIG.items()]
    done = subprocess.run(
        trainer.command(
            "-m", "rdt_e2e.cli", "doctor", "--pair", "--group", "pair", "--json", *settings
        ),
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.stdout, done.stderr
    content = json.loads(done.stdout)
    found = {check["id"]: check for check in content["checks"]}
    assert found["pair.nodes"]["found"].startswith("trainer 10.213.7.1, inference 10.213.7.2")
    # Passed means that the bytes arrived as they were sent, in both directions.
    assert found["pair.read-cpu"]["status"] == "pass", found["pair.read-cpu"]
    assert "tcp/" in found["pair.transport"]["found"]

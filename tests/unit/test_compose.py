"""The image, the compose files and their driver: what must agree, and what they do."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rdt_e2e import __version__
from rdt_e2e.cluster.compose import (
    JOB_NODE,
    MAX_STARTS,
    NODES,
    ComposeTarget,
    find_engine,
    make_token,
)
from rdt_e2e.config import load_config
from rdt_e2e.console import Console
from rdt_e2e.doctor.registry import THEMES
from rdt_e2e.environment import ray_environment
from rdt_e2e.errors import EnvironmentCheckError

ROOT = Path(__file__).parents[2]
NODE_SCRIPT = ROOT / "containers/node.sh"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
ADDRESS = {"cluster.address": "head:6379"}


def compose(name="docker-compose.yml"):
    return yaml.safe_load((ROOT / name).read_text())


def env_file(lock):
    lines = (ROOT / f"containers/ray-{lock}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize(
    ("lock", "profile", "overrides"), [("cpu", "local", {}), ("cuda", "kimi-k2", ADDRESS)]
)
def test_environment_of_the_nodes_is_that_of_the_package(lock, profile, overrides):
    assert env_file(lock) == ray_environment(load_config(profile, overrides))


def test_every_container_has_the_environment_and_the_token():
    for name, service in compose()["services"].items():
        assert service["env_file"] == "containers/ray-${LOCK:-cpu}.env", name
        assert service["secrets"] == ["ray-token"]
        path = service["environment"]["RAY_AUTH_TOKEN_PATH"]
        assert path == f"/run/secrets/{service['secrets'][0]}"
        assert not [key for key in service["environment"] if key == "RAY_AUTH_TOKEN"]
    assert compose()["secrets"]["ray-token"]["file"] == ".secrets/ray-token"
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert ".secrets/" in ignored


def test_own_variables_are_keys_of_the_configuration(monkeypatch):
    for name, value in compose()["services"]["inference"]["environment"].items():
        if name.startswith("RDT_E2E_"):
            monkeypatch.setenv(name, re.sub(r"\$\{\w+:-(.*)\}", r"\1", value))
    config = load_config("local")
    assert config.cluster.target == "ray"
    assert config.cluster.address == "head:6379"


def test_gpus_fit_the_default_profile():
    config = load_config("local")
    (default,) = re.findall(
        r"NUM_GPUS:-(\d+)", compose()["services"]["trainer"]["environment"]["NUM_GPUS"]
    )
    assert int(default) >= max(config.trainer.num_ranks, config.num_consumers)


def test_run_directories_go_where_they_are_fetched_from():
    services = compose()["services"]
    assert "runs:/runs" in services[JOB_NODE]["volumes"]
    assert "runs:/runs:ro" in services["head"]["volumes"]
    assert "RDT_E2E_PATHS__RUNS_DIR=/runs" in DOCKERFILE
    for service in services.values():
        for volume in service["volumes"]:
            assert volume.split(":")[0] in compose()["volumes"]


def test_commands_are_roles_of_the_node_script():
    script = NODE_SCRIPT.read_text()
    roles = set(re.findall(r"^  ([a-z |-]+)\)", script, re.MULTILINE))
    roles = {role for group in roles for role in group.split(" | ")}
    for service in compose()["services"].values():
        assert service["command"][0] in roles
    assert compose("docker-compose.gpu.yml")["services"]["trainer"]["command"][0] in roles


def test_gpu_file_gives_rdma_what_it_needs_and_no_more():
    services = compose("docker-compose.gpu.yml")["services"]
    for name in ("trainer", "inference"):
        service = services[name]
        assert service["cap_add"] == ["IPC_LOCK"]
        assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
        assert service["devices"] == ["/dev/infiniband:/dev/infiniband"]
        assert service["network_mode"] == "host"
        assert "privileged" not in service
        groups = re.sub(r"\$\{CHECK_GROUPS-(.*)\}", r"\1", service["environment"]["CHECK_GROUPS"])
        assert set(groups.split()) <= {theme.group for theme in THEMES}
    assert set(services) == set(compose()["services"])


def test_image_tag_is_the_release_and_the_lock():
    for service in compose()["services"].values():
        assert service["image"] == f"localhost/rdt-e2e:{__version__}-${{LOCK:-cpu}}"
    assert f'image.version="{__version__}"' in DOCKERFILE
    targets = set(re.findall(r"^FROM packages AS (\w+)$", DOCKERFILE, re.MULTILINE))
    assert targets == {"cpu", "cuda"}
    assert {path.stem for path in (ROOT / "requirements").glob("c*.lock")} >= targets


def test_image_holds_what_it_says():
    assert "UCX_MODULES=^efa" in DOCKERFILE
    assert DOCKERFILE.count("RUN rdt-e2e doctor --image") == 2
    assert DOCKERFILE.count("USER 1000\n") == 2
    assert DOCKERFILE.count("compileall") == 2
    for package in ("bash", "wget", "tini", "ibverbs-providers", "perftest", "infiniband-diags"):
        assert re.search(rf"\b{package}\b", DOCKERFILE), package
    for target in ("cpu", "cuda"):
        assert f"scripts/setup.sh {target} packages-only" in DOCKERFILE
        assert f"containers/install.sh {target}\n" in DOCKERFILE
    # Some builders know neither heredocs nor these options of COPY.
    assert "<<" not in DOCKERFILE
    assert not re.search(r"COPY .*--(link|parents)", DOCKERFILE)


def test_build_context_holds_what_is_copied_and_no_secret():
    kept = {
        line[1:].rstrip("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
    assert all(list(ROOT.glob(one)) for one in kept)
    needed = {
        "containers/*.sh",
        "rdt_e2e",
        "configs",
        "requirements",
        "scripts/setup.sh",
        "pyproject.toml",
        "setup.py",
    }
    assert needed <= kept
    assert not {".secrets", ".git", ".venv", "tests"} & kept


def node(*arguments, folder, **variables):
    """Run the node script with programs that only say how they were called."""
    for name in ("ray", "rdt-e2e"):
        program = folder / name
        program.write_text(
            f'#!/bin/bash\nprintf "%s" {name}; printf " [%s]" "$@"; echo\n${{FAIL_{name[0]}:-true}}\n'
        )
        program.chmod(0o755)
    return subprocess.run(
        [str(NODE_SCRIPT), *arguments],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
    )


def test_head_holds_no_gpus(tmp_path):
    done = node("head", folder=tmp_path)
    assert "[--num-gpus=0]" in done.stdout
    assert "[--head] [--port=6379]" in done.stdout
    assert done.returncode == 0


def test_kubernetes_start_line_is_read_as_a_shell_would(tmp_path):
    line = """ray start --block --resources='{"trainer":1}' --num-gpus=8"""
    done = node("kuberay", folder=tmp_path, KUBERAY_GEN_RAY_START_CMD=line)
    assert done.stdout.splitlines()[-1] == (
        'ray [start] [--block] [--resources={"trainer":1}] [--num-gpus=8]'
    )


def test_failed_check_keeps_ray_from_starting(tmp_path):
    done = node(
        "kuberay",
        folder=tmp_path,
        CHECK_GROUPS="node gpu",
        CHECK_CONFIG="kimi-k2",
        FAIL_r="exit 1",
        KUBERAY_GEN_RAY_START_CMD="ray start",
    )
    assert done.returncode == 1
    assert done.stdout == "rdt-e2e [doctor] [--config] [kimi-k2] [--group] [node] [--group] [gpu]\n"


def test_worker_without_a_head_ends_and_names_it(tmp_path):
    done = node("trainer", folder=tmp_path, NUM_GPUS="2", RAY_HEAD="127.0.0.1:1", HEAD_WAIT_S="0")
    assert done.returncode == 1
    assert "no Ray head answers at 127.0.0.1:1" in done.stderr
    assert "ray [" not in done.stdout


def test_other_commands_run_as_they_are(tmp_path):
    assert node("rdt-e2e", "sync", folder=tmp_path).stdout == "rdt-e2e [sync]\n"


class Engine:
    """Answers compose commands by their first word, and keeps them."""

    def __init__(self, **failures):
        self.calls = []
        self.failures = failures
        self.runs = ["old"]
        self.containers = ""

    def __call__(self, command, **_):
        arguments = [str(one) for one in command[1:]]
        self.calls.append(arguments)
        output, status = b"", 0
        if "ls" in arguments:
            output = "\n".join(self.runs).encode()
        if arguments[0] == "ps":
            output = self.containers.encode()
        if arguments[0] == "logs":
            output = b"Ray did not start\n"
        word = next((one for one in arguments if one in self.failures), None)
        if word is not None:
            status = self.failures[word]
            if isinstance(status, list):
                status = status.pop(0) if status else 0
        return subprocess.CompletedProcess(command, status, output, b"")


def target(tmp_path, engine, clock=lambda: 0.0):
    return ComposeTarget(
        tmp_path, ["engine"], {"LOCK": "cpu"}, Console(io.StringIO()), engine, clock, lambda _: None
    )


def test_deploy_builds_starts_and_waits_for_each_node(tmp_path):
    engine = Engine(exec=[1, 1, 0])
    target(tmp_path, engine).deploy()
    assert engine.calls[0] == ["build", "head"]
    assert engine.calls[1] == ["up", "-d", *NODES]
    checked = [call[2] for call in engine.calls[2:] if call[0] == "exec"]
    assert checked == ["head"] * 3 + ["trainer", "inference"]
    assert (tmp_path / ".secrets/ray-token").exists()


def test_unhealthy_node_is_named(tmp_path):
    times = iter([0.0, 1.0, 1000.0])
    with pytest.raises(EnvironmentCheckError, match=r"container head is not healthy .*logs head"):
        target(tmp_path, Engine(exec=1), lambda: next(times)).deploy()


def podman_list(**states):
    labels = [{"com.docker.compose.service": node} for node in states]
    return json.dumps(
        [
            {"Labels": label, "State": state, "ExitCode": status}
            for label, (state, status) in zip(labels, states.values(), strict=True)
        ]
    )


def docker_list(**states):
    return "\n".join(
        json.dumps({"Service": node, "Labels": "a=b,c=d", "State": state, "ExitCode": status})
        for node, (state, status) in states.items()
    )


@pytest.mark.parametrize("listed", [podman_list, docker_list])
def test_node_that_ends_is_started_again(listed, tmp_path):
    engine = Engine(exec=[1, 0])
    engine.containers = listed(head=("running", 0), trainer=("exited", 1))
    target(tmp_path, engine).deploy(build=False)
    # Noticed while the head was waited for.
    assert [call for call in engine.calls if call[0] == "up"] == [
        ["up", "-d", *NODES],
        ["up", "-d", "trainer"],
    ]


def test_node_that_keeps_ending_is_named_with_its_last_lines(tmp_path):
    engine = Engine(exec=1)
    engine.containers = podman_list(head=("exited", 7))
    expected = r"container head ended with status 7 .* 3 times .*\nRay did not start$"
    with pytest.raises(EnvironmentCheckError, match=expected):
        target(tmp_path, engine).deploy()
    assert engine.calls.count(["up", "-d", "head"]) == MAX_STARTS - 1
    assert engine.calls[-1][-1] == "head"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["docker", "compose"], ["compose", "ps", "--all", "--format", "json"]),
        (["podman-compose"], ["ps", "--format", "json"]),
    ],
)
def test_every_engine_lists_ended_containers(command, expected, tmp_path):
    engine = Engine(exec=[1, 0])
    driver = dataclasses.replace(target(tmp_path, engine), command=command)
    driver.deploy(build=False)
    assert [call for call in engine.calls if "ps" in call] == [expected]


def test_failed_build_is_named(tmp_path):
    with pytest.raises(EnvironmentCheckError, match=r"engine build head failed \(status 2\)"):
        target(tmp_path, Engine(build=2)).deploy()


def test_status_of_the_job_is_passed_on(tmp_path):
    engine = Engine(sync=3)
    assert target(tmp_path, engine).sync("local", ["--iters", "5"], tmp_path) == 3
    job = next(call for call in engine.calls if "sync" in call)
    assert job[:4] == ["exec", "-T", "inference", "bash"]
    assert job[job.index("job") + 1 :] == ["rdt-e2e", "sync", "--config", "local", "--iters", "5"]


def test_job_that_ends_with_its_container_is_named(tmp_path):
    engine = Engine(sync=137, true=1)
    with pytest.raises(EnvironmentCheckError, match=r"container inference ended \(status 137"):
        target(tmp_path, engine).sync("local", [], tmp_path)


def test_interrupt_reaches_the_job(tmp_path):
    engine = Engine()

    def interrupted(command, **options):
        done = engine(command, **options)
        if "sync" in command:
            raise KeyboardInterrupt
        return done

    with pytest.raises(KeyboardInterrupt):
        target(tmp_path, interrupted).sync("local", [], tmp_path)
    assert engine.calls[-1][:3] == ["exec", "-T", "inference"]
    assert "kill -INT" in engine.calls[-1][-1]


def test_job_needs_a_deployment(tmp_path):
    with pytest.raises(EnvironmentCheckError, match="make deploy TARGET=compose"):
        target(tmp_path, Engine(exec=1)).sync("local", [], tmp_path)


@pytest.mark.parametrize(("volumes", "options"), [(False, []), (True, ["--volumes"])])
def test_down_keeps_volumes_unless_told(volumes, options, tmp_path):
    engine = Engine()
    target(tmp_path, engine).down(volumes=volumes)
    assert engine.calls == [["down", *options]]
    assert not (tmp_path / ".secrets/ray-token").exists()


def test_token_is_made_once_in_a_closed_folder(tmp_path):
    path = tmp_path / ".secrets/ray-token"
    make_token(path)
    first = path.read_text()
    make_token(path)
    assert path.read_text() == first
    assert len(first) == 64
    assert path.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("programs", "status", "expected"),
    [
        (["docker", "podman", "podman-compose"], 0, "docker compose"),
        (["docker", "podman", "podman-compose"], 1, "podman-compose"),
        (["podman", "podman-compose"], 0, "podman-compose"),
    ],
)
def test_engine_that_is_found(programs, status, expected, tmp_path, monkeypatch):
    for name in programs:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_engine(Engine(compose=status))
    assert " ".join(found).removeprefix(f"{tmp_path}/") == expected


def test_engine_of_the_lock_file_needs_podman_alone(tmp_path, monkeypatch):
    (tmp_path / "podman").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_engine(Engine()) == [str(Path(sys.executable).with_name("podman-compose"))]


@pytest.mark.parametrize("programs", [[], ["podman-compose"]])
def test_no_engine_says_what_to_install(programs, tmp_path, monkeypatch):
    for name in programs:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentCheckError, match="install Docker"):
        find_engine(Engine())

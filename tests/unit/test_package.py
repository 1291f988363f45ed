"""The package as a whole: its boundaries, its size, and what an installed copy holds."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from rdt_e2e import __version__
from rdt_e2e.profiles import profile_names

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "rdt_e2e").rglob("*.py"))
MAX_LINES = 400

MAY_IMPORT = {
    "vllm": (
        "inference/",
        "bench/bake.py",
        "bench/peer_trainer.py",
        "bench/nccl_symbols.py",
    ),
    "nixl": ("fabric/",),
    "ray": (
        "fabric/",
        "trainer/",
        "inference/",
        "cluster/",
        "sync/driver.py",
        "doctor/pair.py",
        "bench/",
        "profiling/metrics.py",
        "profiling/nodes.py",
        "profiling/transport.py",
    ),
    "kubernetes": ("cluster/kube_api.py",),
    "transformers": ("mini_kimi/", "inference/"),
}
"""Library to the parts of the package that may import it; a part is a folder or a file."""

NO_TORCH = (
    "checkpoint/index.py",
    "cli/",
    "config.py",
    "console.py",
    "doctor/context.py",
    "doctor/registry.py",
    "doctor/run.py",
    "environment.py",
    "errors.py",
    "fabric/devices.py",
    "fabric/topology.py",
    "profiling/attribution.py",
    "profiling/build.py",
    "profiling/command.py",
    "profiling/compare.py",
    "profiling/critical_path.py",
    "profiling/hooks.py",
    "profiling/html.py",
    "profiling/lines.py",
    "profiling/metrics.py",
    "profiling/nodes.py",
    "profiling/progress.py",
    "profiling/text.py",
    "profiling/timeline.py",
    "profiling/trace.py",
    "sizing/",
)
"""Parts that must answer without torch."""


def imports_of(path: Path) -> set[str]:
    """Top-level names of the libraries that a module imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_boundaries(path):
    part = str(path.relative_to(ROOT / "rdt_e2e"))
    for library in imports_of(path) & set(MAY_IMPORT):
        assert part.startswith(MAY_IMPORT[library]), f"{library} is not for {part}"
    if part.startswith(NO_TORCH):
        assert "torch" not in imports_of(path)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_is_short_and_says_what_it_is(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text)), "no module docstring"


def test_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


def test_installed_copy_holds_profiles_and_every_module(tmp_path):
    build = (
        "import os, sys; os.chdir(sys.argv[1]); "
        "from setuptools import build_meta; build_meta.build_wheel(sys.argv[2])"
    )
    source = tmp_path / "source"
    source.mkdir()
    # Built from a copy: setuptools leaves a build folder where it works.
    for name in ("rdt_e2e", "configs", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-c", build, str(source), str(tmp_path)], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    assert {f"rdt_e2e/configs/{name}.yaml" for name in profile_names()} <= names
    assert {str(path.relative_to(ROOT)) for path in MODULES} <= names
    assert "rdt_e2e/py.typed" in names
    templates = (ROOT / "rdt_e2e" / "profiling" / "templates").iterdir()
    assert {str(path.relative_to(ROOT)) for path in templates} <= names
    assert not [name for name in names if name.startswith("tests")]

    done = subprocess.run(
        [sys.executable, "-P", "-c", "from rdt_e2e import cli; cli.main()", "config"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("name: local\n")

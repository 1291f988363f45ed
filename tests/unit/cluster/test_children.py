"""Ending what a killed driver left, and nothing else."""

import json
import subprocess
import sys

import psutil
import pytest

from rdt_e2e.cluster import children

DRIVER = """
import subprocess, sys
from pathlib import Path
from rdt_e2e.cluster.children import noted
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
with noted(Path(sys.argv[1])):
    print(child.pid, flush=True)
    sys.stdin.readline()
child.kill()
child.wait()
"""


@pytest.fixture
def driver(tmp_path):
    """A driver with a child that outlives it."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    yield process, child
    process.kill()
    process.communicate()
    if child.is_running():
        child.kill()


def test_children_of_a_killed_driver_are_ended(tmp_path, driver):
    process, child = driver
    process.kill()
    process.wait()
    assert children.end_orphans(tmp_path) == 1
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert list(tmp_path.iterdir()) == []
    assert children.end_orphans(tmp_path) == 0


def test_children_of_a_driver_that_lives_are_left_alone(tmp_path, driver):
    process, child = driver
    assert children.end_orphans(tmp_path) == 0
    assert child.is_running()
    process.communicate("\n", timeout=30)
    assert list(tmp_path.iterdir()) == []


def test_another_process_of_the_same_id_is_left_alone(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as other:
        started = psutil.Process(other.pid).create_time()
        record = {"driver": [other.pid, started - 100], "children": [[other.pid, started - 50]]}
        (tmp_path / "1.json").write_text(json.dumps(record))
        assert children.end_orphans(tmp_path) == 0
        assert other.poll() is None
        other.kill()

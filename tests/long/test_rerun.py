"""Drivers that are killed, and what the next run finds: on a cluster that stays up, the trainer."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault_table import FaultTable

COMMAND = Path(sys.executable).with_name("rdt-e2e")
STARTS_WITHIN_S = 300
NUM_SYNCS = 15


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A deployment of this test's own, stopped at the end."""
    made = os.environ | {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "RDT_E2E_PATHS__RUNS_DIR": str(tmp_path / "runs"),
    }
    made.pop("RAY_ADDRESS", None)
    subprocess.run([COMMAND, "deploy"], env=made, check=True, capture_output=True)
    yield made
    subprocess.run([COMMAND, "down"], env=made, check=True, capture_output=True)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A folder with room for 16 KB, or None where nothing may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        yield None
        return
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def newest_record(environment: dict[str, str]) -> dict[str, Any]:
    """The record of the run that began last."""
    folders = Path(environment["RDT_E2E_PATHS__RUNS_DIR"]).iterdir()
    newest = max(folder.name for folder in folders if folder.is_dir())
    record: dict[str, Any] = json.loads(
        Path(environment["RDT_E2E_PATHS__RUNS_DIR"], newest, "run.json").read_text()
    )
    return record


@pytest.mark.timeout(1500)  # Three runs, each of which starts vLLM.
def test_a_killed_driver_costs_the_next_run_only_an_engine(
    tmp_path: Path,
    environment: dict[str, str],
    full_disk: Path | None,
    fault_table: FaultTable,
) -> None:
    output = tmp_path / "first.txt"
    with output.open("w") as out:
        first = subprocess.Popen([COMMAND, "sync", "--iters=500"], env=environment, stdout=out)
    deadline = time.monotonic() + STARTS_WITHIN_S
    while "sync 2 (warm)" not in output.read_text():
        assert first.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait(30)

    after_the_kill = []
    if full_disk is not None:
        filled = run(environment, "sync", "--iters=1", f"--set=paths.runs_dir={full_disk}")
        after_the_kill.append(filled.stdout)
        assert filled.returncode == 2, filled.stdout + filled.stderr
        assert f"run directory {full_disk}" in filled.stderr
        assert "No space left on device" in filled.stderr
        assert "verdict   PASS" in filled.stdout
        fault_table.add(
            "disk full in the run directory",
            None,
            "the sync and its checks end well; then EnvironmentCheckError, names the run directory",
            "as ever",
        )

    second = run(environment, "soak", f"--syncs={NUM_SYNCS}")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "kept from an earlier run, weights in memory" in second.stdout
    after_the_kill.append(second.stdout)
    # vLLM's coordinator of the data-parallel ranks outlives its driver.
    assert "processes that a killed run had left" in after_the_kill[0]
    assert "verdict   PASS" in second.stdout
    soak = newest_record(environment)["soak"]
    assert len(soak["samples"]) == NUM_SYNCS
    ranks = soak["slopes"]["trainer"] + soak["slopes"]["inference"]
    assert [rank["num_registered"] for rank in ranks] == [0, 0, 0]
    fault_table.add(
        "driver killed (SIGKILL) between syncs",
        None,
        "its engine ends with it; the next run ends vLLM's coordinator, which stays",
        "next `rdt-e2e soak` passes; trainer weights stayed in memory",
    )

    # The same cluster as one that is not ours to stop: `down` ends the trainer ranks alone.
    state = json.loads(run(environment, "status").stdout)
    other = environment | {
        "RDT_E2E_CLUSTER__TARGET": "ray",
        "RDT_E2E_CLUSTER__ADDRESS": state["address"],
        "RAY_AUTH_TOKEN_PATH": str(Path(state["folder"], "token")),
    }
    ended = run(other, "down")
    assert "trainer ranks on the cluster" in ended.stdout, ended.stdout + ended.stderr
    assert run(environment, "status").returncode == 0


def test_a_run_directory_that_cannot_be_made(
    environment: dict[str, str], fault_table: FaultTable
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    started = time.monotonic()
    failed = run(environment, "sync", "--set=paths.runs_dir=/dev/full/runs")
    assert failed.returncode == 2
    assert "paths.runs_dir" in failed.stderr
    fault_table.add(
        "run directory that cannot be written",
        time.monotonic() - started,
        "EnvironmentCheckError, names paths.runs_dir; nothing was started",
        "as ever",
    )

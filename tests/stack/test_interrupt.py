"""Ctrl-C at several points of a run: everything it started is gone, and the next run starts clean."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rdt_e2e.config import Config

ENDS_WITHIN_S = 60
REACHES_WITHIN_S = 240


def descendants(root: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return root.children(recursive=True)
    return []


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


class Run:
    """A `rdt-e2e sync` in a process of its own, with a state folder and run folder of its own."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    Path(sys.executable).with_name("rdt-e2e"),
                    "sync",
                    f"--set=paths.runs_dir={folder / 'runs'}",
                    f"--set=paths.cache_dir={config.paths.cache_dir}",
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"XDG_STATE_HOME": str(folder / "state")},
                start_new_session=True,
            )
        self.seen: dict[int, psutil.Process] = {}

    def reach(self, line: str) -> None:
        """Wait until the program has printed `line`."""
        deadline = time.monotonic() + REACHES_WITHIN_S
        while line not in self.output.read_text(errors="replace"):
            assert self.process.poll() is None, self.output.read_text(errors="replace")
            assert time.monotonic() < deadline, f"{line!r} was not printed in time"
            self.watch()
            time.sleep(0.1)

    def watch(self) -> None:
        """Remember every process the run has started so far."""
        for process in descendants(psutil.Process(self.process.pid)):
            self.seen.setdefault(process.pid, process)
        state = self.folder / "state" / "rdt-e2e" / "cluster.json"
        with contextlib.suppress(FileNotFoundError, ValueError, psutil.NoSuchProcess):
            # The nodes are children of the run, but their children may outlive them.
            for pid, _ in json.loads(state.read_text())["processes"]:
                for process in descendants(psutil.Process(pid)):
                    self.seen.setdefault(process.pid, process)

    def interrupt(self) -> int:
        """Press Ctrl-C once; returns the exit status."""
        self.watch()
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def left_over(self) -> list[str]:
        """Processes of the run that are still alive."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=10)
        return [f"{p.pid} {' '.join(p.cmdline())[:80]}" for p in alive if p.is_running()]


@pytest.mark.parametrize(
    "line",
    ["Ray cluster ...", "trainer fleet: 2 ranks", "inference fleet: 2 ranks"],
)
def test_nothing_is_left_after_ctrl_c(tmp_path: Path, config: Config, line: str) -> None:
    memory_before = shared_memory()
    run = Run(tmp_path, config)
    run.reach(line)
    status = run.interrupt()
    text = run.output.read_text(errors="replace")
    assert status == 130, text
    assert "interrupted" in text
    assert run.left_over() == []
    assert not (tmp_path / "state" / "rdt-e2e" / "cluster.json").exists()
    assert shared_memory() - memory_before == set()
    (written,) = (tmp_path / "runs").glob("*/run.json")
    assert json.loads(written.read_text())["verdict"] == "ERROR"

"""A process of the benchmark that ends with all it started, whatever happens."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CHILD = ("-m", "rdt_e2e.bench.child")
"""What Python is given to run one task; the file of the task follows."""
INTERRUPT_WAIT_S = 60.0
"""How long a task that ran out of time may take to stop what it started."""


def start_logged(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a process whose output goes to a file; Ctrl-C is for us, who then end it in order."""
    with log.open("wb") as stream:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextlib.contextmanager
def task_process(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A task's process; at the end of the block it and all it started are gone.

    Args:
        command: The whole command line.
        environment: Its environment; XDG_STATE_HOME has to be its own.
        log: Where its output goes.
    """
    process = start_logged(command, environment, log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPT_WAIT_S)
        # Its group: an engine core outlives a parent that crashed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _stop_cluster(environment)


def log_tail(log: Path) -> str:
    """The last lines of a task's output, on one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])


def _stop_cluster(environment: Mapping[str, str]) -> None:
    """Stop the task's local cluster, if it has one and could not do so itself."""
    state = Path(environment["XDG_STATE_HOME"], "rdt-e2e", "cluster.json")
    if state.is_file():
        subprocess.run(
            [sys.executable, "-m", "rdt_e2e.cli", "down", "--force"],
            env=dict(environment),
            stdout=subprocess.DEVNULL,
            check=False,
        )

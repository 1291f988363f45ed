"""Processes of a driver, by id: so that what a killed one leaves behind can be ended.

vLLM's data-parallel coordinator is a child of the driver and does not notice when that is killed: it would
stay for ever. A driver writes its children down, and the next program ends those of one that is gone.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import psutil

Identity = tuple[int, float]
"""Process id and start time (seconds since the epoch); together they name a process for good."""
END_TIMEOUT_S = 10.0


def identity(process: psutil.Process) -> Identity:
    """What names a process for good."""
    return process.pid, process.create_time()


def find(pid: int, create_time: float) -> psutil.Process | None:
    """The process of that identity, if it still runs."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - create_time) < 1.0
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


@contextlib.contextmanager
def noted(folder: Path) -> Iterator[None]:
    """Keep this process's children on record for the length of a block.

    Args:
        folder: Where the record lies; one for all drivers of this user.
    """
    driver = psutil.Process()
    children = []
    for child in driver.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            children.append(identity(child))
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / f"{driver.pid}.json"
    record.write_text(json.dumps({"driver": identity(driver), "children": children}))
    try:
        yield
    finally:
        record.unlink(missing_ok=True)


def end_orphans(folder: Path) -> int:
    """End what drivers that are gone have left running.

    Args:
        folder: Where `noted` kept the records.

    Returns:
        Number of processes ended.
    """
    ended = []
    for record in folder.glob("*.json"):
        try:
            content = json.loads(record.read_text())
        except (OSError, ValueError):  # Being written or removed by a driver that lives.
            continue
        if find(*content["driver"]) is not None:
            continue
        left = [process for one in content["children"] if (process := find(*one)) is not None]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ended += left
        record.unlink(missing_ok=True)
    psutil.wait_procs(ended, timeout=END_TIMEOUT_S)
    return len(ended)

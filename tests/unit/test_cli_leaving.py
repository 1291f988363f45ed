"""What the program leaves running when it ends: nothing."""

import subprocess
import sys

PROGRAM = """
import atexit, os, sys

def report():
    alive = os.path.exists(f"/proc/{tracker_pid}")
    print("left running" if alive else "gone", os.path.exists(f"/dev/shm/{leaked}"))

atexit.register(report)  # Runs last.
from rdt_e2e.cli.leaving import end_resource_tracker
atexit.register(end_resource_tracker)
import multiprocessing
from multiprocessing import resource_tracker, shared_memory

# A semaphore's own clean-up at exit talks to the tracker once more.
held = multiprocessing.get_context("spawn").Semaphore()
leaked = shared_memory.SharedMemory(create=True, size=1).name.lstrip("/")
tracker_pid = resource_tracker._resource_tracker._pid
sys.exit(3)
"""


def test_resource_tracker_has_done_its_work_when_the_program_ends():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "gone False\n"
    assert done.returncode == 3


def test_there_may_be_none():
    script = "from rdt_e2e.cli.leaving import end_resource_tracker as end; end(); end()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

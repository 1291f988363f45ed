"""What this process holds and has open, for the run's record and the soak's slopes."""

import os

import psutil

from rdt_e2e.fabric.agent import num_registered

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where the kernel keeps it, not a file of ours


def process_figures() -> dict[str, int | None]:
    """Memory, open files, shared memory segments of the machine, and NIXL registrations."""
    process = psutil.Process()
    return {
        "pid": process.pid,
        "rss_bytes": process.memory_info().rss,
        "num_fds": process.num_fds(),
        "num_shm": len(os.listdir(SHARED_MEMORY)),
        "num_registered": num_registered(),
    }

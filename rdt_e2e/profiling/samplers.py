"""What a node says about itself before and after a sync: NIC counters, GPUs, memory, its clock."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from rdt_e2e.fabric.devices import read_ports

NIC_FOLDERS = ("counters", "hw_counters")
WORD_COUNTERS = frozenset({"port_rcv_data", "port_xmit_data"})
"""Counted by the kernel in units of 4 bytes.

Source: `Documentation/ABI/stable/sysfs-class-infiniband` of Linux.
"""
WORD_BYTES = 4
GPU_QUERY = "index,uuid,name,memory.used,memory.total,utilization.gpu"
GPU_TIMEOUT_S = 10.0


def sample_node(root: Path = Path("/")) -> dict[str, Any]:
    """Everything below, with the time at which it was taken on this machine's monotonic clock."""
    memory = psutil.virtual_memory()
    return {
        "taken": time.monotonic(),
        "boot_id": boot_id(root),
        "memory_used_bytes": memory.total - memory.available,
        "memory_total_bytes": memory.total,
        "nics": read_nic_counters(root),
        "nic_rates_gbps": {port.name: port.rate_gbps for port in read_ports(root)},
        "gpus": read_gpus(),
    }


def boot_id(root: Path = Path("/")) -> str:
    """Identity of the machine's uptime: where it is equal, monotonic clocks are the same clock."""
    with contextlib.suppress(OSError):
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def read_nic_counters(root: Path = Path("/")) -> dict[str, int]:
    """Every counter of every RDMA port, by "device:port:counter"; data counters in bytes.

    Args:
        root: Root of the file system to read.
    """
    found = {}
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        for folder in NIC_FOLDERS:
            for file in sorted((port / folder).glob("*")):
                # Some counters answer with an error on some drivers.
                with contextlib.suppress(OSError, ValueError):
                    value = int(file.read_text())
                    value *= WORD_BYTES if file.name in WORD_COUNTERS else 1
                    found[f"{port.parents[1].name}:{port.name}:{file.name}"] = value
    return found


def counter_difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What moved between two readings; a counter that went back was reset, and is left out."""
    return {
        key: value - before[key]
        for key, value in after.items()
        if key in before and value > before[key]
    }


def read_gpus() -> list[dict[str, Any]]:
    """GPUs of this machine as the driver's own tool names them; empty without one. Memory in bytes."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=GPU_TIMEOUT_S
        )
        return [_gpu(line) for line in done.stdout.splitlines() if line.strip()]
    return []


def _gpu(line: str) -> dict[str, Any]:
    index, uuid, name, used_mib, total_mib, busy = (part.strip() for part in line.split(","))
    return {
        "index": int(index),
        "uuid": uuid,
        "name": name,
        "memory_used_bytes": int(used_mib) << 20,
        "memory_total_bytes": int(total_mib) << 20,
        "busy_percent": int(busy) if busy.isdigit() else None,
    }


def sample_process(device_type: str) -> dict[str, Any]:
    """Memory of this process, in bytes; that of its GPU as well with device "cuda"."""
    found: dict[str, Any] = {
        "pid": os.getpid(),
        "rss_bytes": psutil.Process().memory_info().rss,
    }
    if device_type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        found |= {
            "gpu_free_bytes": free,
            "gpu_total_bytes": total,
            "gpu_allocated_bytes": torch.cuda.memory_allocated(),
            "gpu_reserved_bytes": torch.cuda.memory_reserved(),
        }
    return found

"""The NIC of this process's GPU, chosen before its NIXL agent exists."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rdt_e2e.environment import NET_DEVICES, use_net_devices
from rdt_e2e.fabric.topology import DISTANCES, choose_nics, read_topology


@dataclass(frozen=True)
class NicChoice:
    """What `pin_nic` did, for the run's summary; it crosses processes.

    Attributes:
        net_devices: Value of `UCX_NET_DEVICES` in this process, or None when UCX chooses by itself.
        gpu: PCI address of the process's GPU; empty without one.
        reason: Why, in words.
    """

    net_devices: str | None
    gpu: str
    reason: str


def pin_nic(device: torch.device, root: Path = Path("/")) -> NicChoice:
    """Restrict UCX in this process to the NICs near its GPU; the user's own choice stays.

    Call it once per process, before the first NIXL agent: UCX reads the variable when the agent's
    backend is created, and never again. A node-wide variable cannot do this, since every Ray worker
    of a node starts with the same environment.

    Args:
        device: The device that holds the process's weights; for CUDA, the GPU already selected.
        root: Root of the file system whose sysfs is read; another one in tests.

    Returns:
        The choice; `net_devices` is None where nothing was pinned.
    """
    if NET_DEVICES in os.environ:
        return NicChoice(os.environ[NET_DEVICES], "", f"{NET_DEVICES} was set before")
    if device.type != "cuda":
        return NicChoice(None, "", "the weights are in CPU memory: any NIC will do")
    gpu = gpu_address(device)
    plan = choose_nics(read_topology(root))
    assignment = plan.for_gpu(gpu)
    if assignment is None:
        reason = (
            "no RDMA port of this machine can be used" if not plan.usable else "GPU not in sysfs"
        )
        return NicChoice(None, gpu, reason)
    if agent_exists():
        return NicChoice(None, gpu, "too late: this process has loaded NIXL's UCX already")
    use_net_devices(assignment.net_devices)
    shared = ", shared with another GPU" if assignment.shared else ""
    return NicChoice(assignment.net_devices, gpu, f"{DISTANCES[assignment.distance]}{shared}")


def gpu_address(device: torch.device) -> str:
    """PCI address of a CUDA device, as sysfs writes it.

    Args:
        device: A CUDA device that this process sees.

    Source: `torch.cuda.get_device_properties` (pci_domain_id, pci_bus_id, pci_device_id).
    """
    # These three are missing from torch's own type stub.
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def agent_exists() -> bool:
    """Whether Ray has built this process's NIXL agent, after which pinning has no effect."""
    util = sys.modules.get("ray.experimental.rdt.util")
    if util is None:
        return False
    managers = getattr(util, "transport_managers", {})
    manager = managers.get("NIXL") if isinstance(managers, dict) else None
    return getattr(manager, "_nixl_agent", None) is not None

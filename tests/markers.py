"""The marks of the test suite and what each needs; the only place that skips for lack of a device."""

import os
import shutil
import subprocess

import pytest

FOLDER_MARKS = ("stack", "long", "containers", "gpu", "gpu2", "cluster")
"""A test under `tests/<mark>/` carries that mark; pyproject.toml says what each means."""

NUM_GPUS = {"gpu": 1, "gpu2": 2}
"""CUDA devices that a mark needs on this machine."""

CLUSTER_ADDRESS = "RDT_E2E_CLUSTER__ADDRESS"
"""The variable that names the Ray head for the mark `cluster`."""


def num_cuda_devices() -> int:
    """CUDA devices of this machine, as the driver's own tool counts them."""
    # Not torch.cuda: importing torch would make collecting the unit tests take seconds.
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


def has_container_engine() -> bool:
    """Whether containers can be run: podman as root, or `docker` with a daemon that answers."""
    if shutil.which("podman") is not None and os.geteuid() == 0:
        return True
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True).returncode == 0


def skip_without_devices(items: list[pytest.Item]) -> None:
    """Add a skip, with its reason, to each item whose mark needs what is not here."""
    marked = {
        name: [item for item in items if item.get_closest_marker(name)] for name in FOLDER_MARKS
    }
    if any(marked[name] for name in NUM_GPUS):
        found = num_cuda_devices()
        for name, needed in NUM_GPUS.items():
            if found < needed:
                for item in marked[name]:
                    item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, found {found}"))
    if CLUSTER_ADDRESS not in os.environ:
        for item in marked["cluster"]:
            item.add_marker(pytest.mark.skip(reason=f"needs {CLUSTER_ADDRESS}"))
    if marked["containers"] and not has_container_engine():
        for item in marked["containers"]:
            item.add_marker(pytest.mark.skip(reason="needs podman as root, or a Docker daemon"))

"""The NIC of a process: pinned once, by its GPU, and only where nobody else has chosen."""

import os
import sys
import types

import pytest
import torch

from rdt_e2e.environment import NET_DEVICES
from rdt_e2e.fabric import pinning
from rdt_e2e.fabric.pinning import pin_nic
from tests import machines

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def on_gpu(monkeypatch):
    """Say which GPU this process has."""
    monkeypatch.delenv(NET_DEVICES, raising=False)

    def choose(address):
        monkeypatch.setattr(pinning, "gpu_address", lambda device: address)

    return choose


def test_the_nic_near_the_gpu(on_gpu, tmp_path):
    on_gpu("0000:54:00.0")
    choice = pin_nic(CUDA, machines.roce_node(tmp_path).root)
    assert os.environ[NET_DEVICES] == choice.net_devices == "mlx5_5:1"
    assert (choice.gpu, choice.reason) == ("0000:54:00.0", "same PCIe switch")


def test_a_shared_nic_is_said(on_gpu, tmp_path):
    machine = machines.roce_node(tmp_path)
    machine.port_file("mlx5_5", "state", "1: DOWN")
    on_gpu("0000:54:00.0")
    choice = pin_nic(CUDA, machine.root)
    assert choice.net_devices == "mlx5_4:1"
    assert choice.reason == "same NUMA node, shared with another GPU"


def test_the_users_choice_stays(on_gpu, tmp_path, monkeypatch):
    monkeypatch.setenv(NET_DEVICES, "mlx5_7:1")
    on_gpu("0000:54:00.0")
    choice = pin_nic(CUDA, machines.roce_node(tmp_path).root)
    assert os.environ[NET_DEVICES] == choice.net_devices == "mlx5_7:1"
    assert "was set before" in choice.reason


def test_nothing_to_pin(on_gpu, tmp_path):
    on_gpu("0000:54:00.0")
    for device, build, reason in (
        (CPU, machines.roce_node, "CPU memory"),
        (CUDA, machines.efa_node, "no RDMA port"),
        (CUDA, machines.infiniband_vm, "GPU not in sysfs"),
    ):
        choice = pin_nic(device, build(tmp_path / build.__name__ / device.type).root)
        assert choice.net_devices is None
        assert reason in choice.reason
    assert NET_DEVICES not in os.environ


def test_too_late_is_said(on_gpu, tmp_path, monkeypatch):
    on_gpu("0000:54:00.0")
    util = types.ModuleType("ray.experimental.rdt.util")
    manager = types.SimpleNamespace(_nixl_agent=None)
    vars(util)["transport_managers"] = {"NIXL": manager}
    monkeypatch.setitem(sys.modules, util.__name__, util)
    assert not pinning.agent_exists()
    manager._nixl_agent = object()
    choice = pin_nic(CUDA, machines.roce_node(tmp_path).root)
    assert choice.net_devices is None
    assert choice.reason.startswith("too late")
    assert NET_DEVICES not in os.environ


def test_rays_manager_is_where_it_is_looked_for():
    # Guards the name that `agent_exists` reads in Ray 2.60.
    from ray.experimental.rdt import util
    from ray.experimental.rdt.nixl_tensor_transport import NixlTensorTransport

    assert isinstance(util.transport_managers, dict)
    assert NixlTensorTransport()._nixl_agent is None

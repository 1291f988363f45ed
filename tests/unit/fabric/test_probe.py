"""What is read out of UCX's log and of this process; the probe itself runs in the doctor's tests."""

from pathlib import Path

import pytest
import torch

from rdt_e2e.fabric import probe
from rdt_e2e.fabric.peer import ReadResult, checksum

LOG = """\
[1796004464.085839] [vm:7446 :0] ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from /x/libucp.so)
[1796004464.114020] [vm:7446 :0] ucp_worker.c:1997 UCX  INFO    probe self cfg#0 rma_am(tcp/lo)  am(tcp/lo cma/memory)
[1796004464.115155] [vm:7446 :0]   | probe self cfg#0                                         |
[1796004464.115155] [vm:7446 :0] ucp_worker.c:1997 UCX  INFO    probe inter-node cfg#1 rma(rc_mlx5/mlx5_0:1 rc_mlx5/ibp3:1) am(ud_mlx5/mlx5_0:1)
"""


def test_lanes_of_ucxs_log():
    assert probe.ucx_lanes(LOG) == [
        "cma/memory",
        "rc_mlx5/ibp3:1",
        "rc_mlx5/mlx5_0:1",
        "tcp/lo",
        "ud_mlx5/mlx5_0:1",
    ]
    assert probe.ucx_lanes(LOG, to_peer=True) == [
        "rc_mlx5/ibp3:1",
        "rc_mlx5/mlx5_0:1",
        "ud_mlx5/mlx5_0:1",
    ]
    assert probe.ucx_lanes("") == []


def test_a_log_that_is_not_there_is_empty(tmp_path):
    assert probe.read_ucx_log(tmp_path / "none") == ""


def test_libraries_are_told_apart():
    found = probe.loaded_libraries()
    assert set(found) == set(probe.LOADED_LIBRARIES)
    assert all(Path(file).name.startswith(name) for name, files in found.items() for file in files)


def test_cpu_probe_does_without_torch():
    assert probe._api_module(cuda=False) in {"nixl_cu12._api", "nixl_cu13._api"}
    assert probe._api_module(cuda=True) == "nixl._api"


@pytest.mark.parametrize("num_bytes", [8, 4096])
def test_checksum_sees_values_and_places(num_bytes):
    data = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    first = checksum(data)
    assert checksum(data.clone()) == first
    changed = data.clone()
    changed[3] += 1
    assert checksum(changed) != first
    if num_bytes > 8:
        assert checksum(torch.cat([data[8:16], data[:8], data[16:]])) != first


def test_bandwidth_is_in_billions_of_bytes():
    assert ReadResult(2 * 10**9, 0.5, is_same=True, lanes=()).gb_per_s == 4.0

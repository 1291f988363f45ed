"""Which ports are rails, on made-up trees of what people really have."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests import fake_fabric
from tests.ansible_modules import ANSIBLE, load

ports = load("library/rdma_ports.py")

EXPECTED = {
    "eight rails": (8, {}, "ucx"),
    "eight rails, infiniband": (8, {}, "ucx"),
    "bluefield beside eight rails": (8, {"management": 1}, "ucx"),
    "bluefield alone": (1, {}, "ucx"),
    "slow front-end beside eight rails": (8, {"slower": 1}, "ucx"),
    "default route on one nic": (8, {"management": 1}, "ucx"),
    "one nic for everything": (1, {}, "ucx"),
    "vm nic without gids": (0, {"no_gid": 1}, "none"),
    "vm nic beside infiniband": (8, {"no_gid": 1}, "ucx"),
    "efa": (0, {"efa": 4}, "libfabric"),
    "bond": (0, {"bond": 1}, "none"),
    "bond beside eight rails": (8, {"bond": 1}, "ucx"),
    "dead link": (7, {"link_down": 1}, "ucx"),
    "degraded link": (7, {"degraded": 1}, "ucx"),
    "no subnet manager": (0, {"no_subnet_manager": 8}, "none"),
    "roce v1 only": (0, {"no_roce_v2": 1}, "none"),
    "software rdma": (0, {"software": 1}, "none"),
    "no rdma": (0, {}, "none"),
}
"""Made-up host to its rails, its exclusions by reason, and its transport."""


def test_every_case_is_expected():
    assert EXPECTED.keys() == fake_fabric.CASES.keys()


@pytest.mark.parametrize("case", EXPECTED)
def test_case(case, tmp_path):
    host = ports.find_ports(fake_fabric.build(tmp_path, fake_fabric.CASES[case]()))
    num_rails, reasons, transport = EXPECTED[case]
    assert [rail.rail for rail in host.rails] == list(range(num_rails))
    assert Counter(port.reason for port in host.ports if port.reason) == reasons
    assert host.transport == transport
    assert not host.problems


def test_every_reason_occurs_in_some_case():
    seen = {reason for _, reasons, _ in EXPECTED.values() for reason in reasons}
    assert seen | {"not_in_map"} == set(ports.EXCLUSIONS)


def test_roce_takes_the_ipv4_row_of_version_2(tmp_path):
    rail = ports.find_ports(fake_fabric.build(tmp_path, fake_fabric.rails(1))).rails[0]
    assert (rail.gid_index, rail.gid_type, rail.gid) == (3, "RoCE v2", "::ffff:10.1.0.10")


def test_roce_row_of_a_vlan_comes_after_the_ports_own(tmp_path):
    # The VLAN's row stands first in the table.
    vlan = ("0000:0000:0000:0000:0000:ffff:0a02:0005", "RoCE v2")
    nic = replace(fake_fabric.rails(1)[0], gids=(vlan, *fake_fabric.roce_gids(0)))
    fake_fabric.build(tmp_path, [nic])
    owner = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0"
    owner.write_text("ens0np0.100\n")
    assert ports.find_ports(tmp_path).rails[0].gid_index == 4


def test_global_ipv6_is_taken_where_there_is_no_ipv4(tmp_path):
    address = ("2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2")
    nic = replace(fake_fabric.rails(1)[0], gids=(*fake_fabric.roce_gids(0)[:2], address))
    assert ports.find_ports(fake_fabric.build(tmp_path, [nic])).rails[0].gid_index == 2


def test_infiniband_takes_row_0(tmp_path):
    rails = ports.find_ports(fake_fabric.build(tmp_path, fake_fabric.infiniband(2))).rails
    assert [(rail.gid_index, rail.lid) for rail in rails] == [(0, 1), (0, 2)]


def test_rail_map_decides_and_orders(tmp_path):
    fake_fabric.build(tmp_path, [*fake_fabric.rails(), fake_fabric.bluefield(8)])
    host = ports.find_ports(tmp_path, ["mlx5_8", "mlx5_2"])
    assert [rail.device for rail in host.rails] == ["mlx5_8", "mlx5_2"]
    assert {port.reason for port in host.ports if not port.usable} == {"not_in_map"}


def test_rail_map_problems_name_the_device_and_the_reason(tmp_path):
    fake_fabric.build(tmp_path, fake_fabric.CASES["dead link"]())
    host = ports.find_ports(tmp_path, ["mlx5_0", "mlx5_3", "mlx5_77"])
    assert host.problems == [
        "rail 1 is mlx5_3, which cannot be one: the link is DOWN",
        "rail 2 is mlx5_77, which this host lacks (found: mlx5_0, mlx5_1, mlx5_2, mlx5_3, mlx5_4, "
        "mlx5_5, mlx5_6, mlx5_7)",
    ]
    assert [rail.rail for rail in host.rails] == [0]


@pytest.mark.parametrize("case", ["dead link", "degraded link"])
def test_a_broken_rail_is_suspected(case, tmp_path):
    host = ports.find_ports(fake_fabric.build(tmp_path, fake_fabric.CASES[case]()))
    assert len(host.suspects) == 1
    assert host.suspects[0].startswith("mlx5_3 is the same kind of NIC as the rails")


def test_a_bond_can_be_allowed(tmp_path):
    fake_fabric.build(tmp_path, fake_fabric.CASES["bond"]())
    assert len(ports.find_ports(tmp_path, allow_bond=True).rails) == 1


def test_an_ipv6_default_route_is_seen(tmp_path):
    fake_fabric.build(tmp_path, fake_fabric.rails(2))
    zeros = "0" * 32
    row = f"{zeros} 00 {zeros} 00 fe800000000000000000000000000001 00000400 1 0 00000003 ens1np0"
    (tmp_path / "proc/net/ipv6_route").write_text(f"{row}\n")
    assert [rail.device for rail in ports.find_ports(tmp_path).rails] == ["mlx5_0"]


def test_each_gpu_has_the_rail_below_its_switch(tmp_path):
    host = ports.find_ports(fake_fabric.build(tmp_path, fake_fabric.rails(), num_gpus=8))
    nearest = [gpu["nearest"] for gpu in ports.find_gpus(tmp_path, host.rails)]
    assert nearest == [[f"mlx5_{rail}"] for rail in range(8)]


def test_a_gpu_without_a_shared_switch_has_the_rails_of_its_numa_node(tmp_path):
    # GPU 7 is on node 1; rails 0 to 3 are on node 0 and 4 to 6 on node 1.
    host = ports.find_ports(fake_fabric.build(tmp_path, fake_fabric.rails(7), num_gpus=8))
    gpu = ports.find_gpus(tmp_path, host.rails)[7]
    assert gpu["nearest"] == [rail.device for rail in host.rails if rail.numa_node == 1]
    assert gpu["nearest"]


def test_an_unreadable_gid_row_is_passed_over(tmp_path):
    fake_fabric.build(tmp_path, fake_fabric.rails(1))
    row = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/gids/0"
    row.unlink()
    row.mkdir()  # Reading it fails, as reading an unused row does.
    assert ports.find_ports(tmp_path).rails[0].gid_index == 3


def test_program_prints_json(tmp_path):
    fake_fabric.build(tmp_path, fake_fabric.CASES["dead link"](), num_gpus=1)
    # Isolated: what runs on a bare host has nothing but the standard library.
    command = [
        sys.executable,
        "-I",
        str(ANSIBLE / "library/rdma_ports.py"),
        "--root",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer.keys() == {
        "ports",
        "rails",
        "gpus",
        "transport",
        "problems",
        "suspects",
        "summary",
    }
    assert len(answer["rails"]) == 7
    assert answer["summary"][3] == (
        "not a rail: mlx5_3/1 Ethernet 400 Gb/s: link_down, the link is DOWN"
    )


def test_this_machine_can_be_read():
    # Whatever it has: real trees hold attributes that cannot be read and links that go up.
    host = ports.find_ports(Path("/"))
    assert host.transport in ("ucx", "libfabric", "none")

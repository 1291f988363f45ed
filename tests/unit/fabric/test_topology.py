"""Ports, GPUs and the choice of NICs, on trees shaped like real machines."""

import pytest

from rdt_e2e.fabric.devices import read_gpus, read_ports
from rdt_e2e.fabric.topology import DISTANCES, choose_nics, read_topology, short_address
from tests import machines


def plan_of(machine):
    return choose_nics(read_topology(machine.root))


def devices_of(plan):
    return [assignment.net_devices for assignment in plan.assignments]


def enslave(machine, netdev, device, master):
    """Put a device's interface below another one."""
    (machine.root / "sys/devices/virtual/net" / master).mkdir(parents=True)
    folder = (machine.root / f"sys/class/infiniband/{device}/device").resolve()
    path = folder.relative_to(machine.root.resolve()) / "net" / netdev / "master"
    machine.link(str(path), f"sys/devices/virtual/net/{master}")


def test_a_port_is_read_whole(tmp_path):
    machine = machines.roce_node(tmp_path)
    port = read_ports(machine.root)[3]
    assert (port.name, port.state, port.link_layer) == ("mlx5_3:1", "ACTIVE", "Ethernet")
    assert (port.rate_gbps, port.numa_node, port.driver) == (400, 0, "mlx5_core")
    assert port.pci == "0000:35:00.0"
    assert port.pci_path[0] == "pci0000:03"
    assert port.netdevs == ("rail3",)
    assert port.roce_gid is not None
    assert (port.roce_gid.index, port.roce_gid.ipv4) == (3, "10.1.3.7")
    assert [gid.index for gid in port.gids] == [0, 1, 2, 3]


def test_no_rdma_and_no_gpu(tmp_path):
    assert read_ports(tmp_path) == ()
    assert read_gpus(tmp_path) == ()
    plan = choose_nics(read_topology(tmp_path))
    assert (plan.assignments, plan.usable, plan.excluded) == ((), (), {})


def test_each_gpu_has_the_nic_of_its_switch(tmp_path):
    plan = plan_of(machines.roce_node(tmp_path))
    assert devices_of(plan) == [f"mlx5_{index}:1" for index in range(8)]
    assert {DISTANCES[a.distance] for a in plan.assignments} == {"same PCIe switch"}
    assert not any(a.shared for a in plan.assignments)
    assert plan.excluded == {
        "mlx5_8:1": "100 Gb/s beside ports of 400 Gb/s",
        "mlx5_9:1": "100 Gb/s beside ports of 400 Gb/s",
    }


def test_names_that_do_not_follow_the_bus(tmp_path):
    machine = machines.roce_node(tmp_path)
    for index in (0, 5):
        machine.drop_port(f"mlx5_{index}")
    # The kernel named the two cards the other way round.
    for index, other in ((0, 5), (5, 0)):
        folder = (
            f"pci0000:{index:02x}/0000:{index:02x}:01.0/0000:{index:x}1:00.0/0000:{index:x}2:02.0"
        )
        machine.add_port(
            f"mlx5_{other}",
            f"{folder}/0000:{index:x}6:00.0",
            numa_node=index // 4,
            gids=machines.roce_gids(f"10.1.{index}.9"),
        )
    devices = devices_of(plan_of(machine))
    assert (devices[0], devices[5]) == ("mlx5_5:1", "mlx5_0:1")


def test_a_dead_link_makes_two_gpus_share(tmp_path):
    machine = machines.roce_node(tmp_path)
    machine.port_file("mlx5_2", "state", "1: DOWN")
    plan = plan_of(machine)
    assert plan.excluded["mlx5_2:1"] == "its link is DOWN"
    lost = plan.assignments[2]
    assert lost.shared
    assert DISTANCES[lost.distance] == "same NUMA node"
    assert lost.ports[0].numa_node == 0


def test_domains_of_a_virtual_machine_are_matched_by_numa_node(tmp_path):
    plan = plan_of(machines.infiniband_vm(tmp_path))
    assert devices_of(plan) == [f"mlx5_{index}:1" for index in range(8)]
    assert {DISTANCES[a.distance] for a in plan.assignments} == {"same NUMA node"}
    assert "GID table is empty" in plan.excluded["mlx5_an0:1"]


def test_efa_is_not_for_ucx(tmp_path):
    plan = plan_of(machines.efa_node(tmp_path))
    assert plan.usable == ()
    assert all("LIBFABRIC" in reason for reason in plan.excluded.values())


def test_bluefield_is_left_out_only_beside_others(tmp_path):
    machine = machines.roce_node(tmp_path)
    machine.add_port(
        "mlx5_10",
        "pci0000:f4/0000:f4:01.0/0000:f5:00.0",
        gids=machines.roce_gids("10.3.0.1"),
        device_id=machines.BLUEFIELD3,
    )
    assert "BlueField" in plan_of(machine).excluded["mlx5_10:1"]
    for index in range(8):
        machine.write(f"sys/class/infiniband/mlx5_{index}/device/device", machines.BLUEFIELD3)
    plan = plan_of(machine)
    assert len(plan.usable) == 9


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"netdev": "mgmt0"}, "carries the default route (mgmt0)"),
        ({"link_layer": "InfiniBand", "lid": "0x0"}, "LID 0"),
        ({"gids": [(0, "fe80:0:0:0:0:0:0:1", "RoCE v2")]}, "no RoCE v2 GID with a routable"),
        ({"gids": machines.roce_gids("10.9.0.1")[:1]}, "no RoCE v2 GID"),
        ({"rate": "200 Gb/sec (2X NDR)"}, "200 Gb/s beside ports of 400 Gb/s"),
        ({"state": "2: INIT"}, "its link is INIT"),
        ({"link_layer": "Unspecified"}, "link layer Unspecified"),
    ],
)
def test_why_a_port_is_left_out(tmp_path, changes, reason):
    machine = machines.roce_node(tmp_path)
    machine.drop_port("mlx5_8")
    arguments = {"gids": machines.roce_gids("10.9.0.1"), "netdev": "extra"} | changes
    if arguments["netdev"] == "mgmt0":
        (tmp_path / "sys/class/net/mgmt0/mtu").unlink()
    machine.add_port("mlx5_20", "pci0000:e0/0000:e0:01.0/0000:e1:00.0", **arguments)
    assert reason in plan_of(machine).excluded["mlx5_20:1"]


def test_a_bond_is_left_out(tmp_path):
    machine = machines.roce_node(tmp_path)
    machine.add_port(
        "mlx5_bond_0",
        "pci0000:e0/0000:e0:01.0/0000:e1:00.0",
        gids=machines.roce_gids("10.9.0.1"),
    )
    assert plan_of(machine).excluded["mlx5_bond_0:1"].startswith("a bond")
    enslave(machine, "rail1", "mlx5_1", "bond0")
    machine.write("sys/devices/virtual/net/bond0/bonding/mode", "802.3ad 4")
    assert plan_of(machine).excluded["mlx5_1:1"].startswith("a bond")


def test_the_nic_of_accelerated_networking_is_left_out(tmp_path):
    machine = machines.roce_node(tmp_path)
    enslave(machine, "rail1", "mlx5_1", "eth0")
    assert "mlx5_1:1" not in plan_of(machine).excluded
    machine.link("sys/devices/virtual/net/eth0/device/driver", "sys/bus/vmbus/drivers/hv_netvsc")
    assert plan_of(machine).excluded["mlx5_1:1"] == "the virtual machine's own NIC"


def test_ethernet_beside_infiniband_is_another_network(tmp_path):
    machine = machines.infiniband_vm(tmp_path)
    machine.add_port(
        "mlx5_9", "pci0300:00/0300:00:00.0", gids=machines.roce_gids("10.9.0.1"), netdev="eth2"
    )
    assert plan_of(machine).excluded["mlx5_9:1"].startswith("Ethernet beside InfiniBand")


def test_the_only_nic_may_carry_the_default_route(tmp_path):
    machine = machines.Machine(tmp_path)
    machine.add_gpu("pci0000:00/0000:00:06.0", -1)
    machine.add_port(
        "mlx5_0",
        "pci0000:00/0000:00:07.0",
        numa_node=-1,
        gids=machines.roce_gids("10.0.0.9"),
        netdev="eth0",
    )
    machine.write(
        "proc/net/route", "Iface\neth0\t00000000\t0100000A\t3\t0\t0\t0\t00000000\t0\t0\t0"
    )
    plan = plan_of(machine)
    assert devices_of(plan) == ["mlx5_0:1"]
    # A flat bus without NUMA nodes, as on a virtual machine, says nothing about distance.
    assert DISTANCES[plan.assignments[0].distance] == "unknown"


def test_more_nics_than_gpus_are_shared_out_evenly(tmp_path):
    machine = machines.roce_node(tmp_path)
    for index in (1, 3, 5, 7):
        path = (
            f"pci0000:{index:02x}/0000:{index:02x}:01.0/0000:{index:x}1:00.0/0000:{index:x}2:00.0"
        )
        machine.write(f"sys/devices/{path}/0000:{index:x}4:00.0/vendor", "0x0000")
    plan = plan_of(machine)
    assert [a.gpu.pci[5:7] for a in plan.assignments] == ["04", "24", "44", "64"]
    names = [name for a in plan.assignments for name in a.net_devices.split(",")]
    assert sorted(names) == [f"mlx5_{index}:1" for index in range(8)]
    assert all(len(a.ports) == 2 for a in plan.assignments)
    assert plan.assignments[1].ports[0].name == "mlx5_2:1"


def test_a_gpu_given_to_a_virtual_machine_does_not_count(tmp_path):
    machine = machines.roce_node(tmp_path)
    machine.add_gpu("pci0000:e0/0000:e0:01.0/0000:e4:00.0", driver="vfio-pci")
    assert len(read_gpus(machine.root)) == 8


def test_addresses_of_other_forms(tmp_path):
    plan = plan_of(machines.roce_node(tmp_path))
    assert short_address("00000000:1B:00.0") == "0000:1b:00.0"
    assert plan.for_gpu("00000000:34:00.0").net_devices == "mlx5_3:1"
    assert plan.for_gpu("0000:99:00.0") is None

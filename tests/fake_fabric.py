"""Made-up ``/sys`` and ``/proc`` trees: what hosts with RDMA hardware show, and hosts that lack some.

Written from the kernel's own formats (sysfs-class-infiniband, sysfs-bus-pci), not copied off a machine.
Links are relative, so that a tree can be moved into a container.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

MELLANOX, AMAZON, NVIDIA = "0x15b3", "0x1d0f", "0x10de"
CONNECTX_7, CONNECTX_6_DX, CONNECTX_VF, BLUEFIELD_3 = "0x1021", "0x101d", "0x101e", "0xa2dc"
NUM_RAILS = 8

RUNNING = {
    "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro quiet",
    "proc/sys/net/ipv4/conf/all/rp_filter": "1",
    "proc/sys/net/ipv4/conf/all/arp_ignore": "0",
    "proc/sys/vm/max_map_count": "65530",
    "proc/sys/vm/zone_reclaim_mode": "0",
    "proc/sys/kernel/numa_balancing": "1",
    "proc/sys/net/core/rmem_max": "212992",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "schedutil",
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "0",
}
"""What the running kernel of every made-up host shows; some settings are missing on purpose."""

OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)"

MODULES = ("ib_uverbs", "ib_umad", "rdma_cm", "rdma_ucm")


@dataclass(frozen=True)
class Nic:
    """One PCI function with one RDMA port.

    Attributes:
        slot: Number below its own root port; decides the PCI address.
        gids: Rows of the GID table: (address, type).
    """

    device: str
    slot: int
    vendor: str = MELLANOX
    model: str = CONNECTX_7
    driver: str = "mlx5_core"
    netdev: str = ""
    link_layer: str = "Ethernet"
    state: str = "4: ACTIVE"
    rate: str = "400 Gb/sec (4X NDR)"
    lid: str = "0x0"
    gids: tuple[tuple[str, str], ...] = ()
    master: str = ""
    virtual_function: bool = False

    @property
    def pci(self) -> str:
        """PCI address of the function."""
        return f"0000:{0x18 + 0x10 * self.slot:02x}:00.0"


def roce_gids(rail: int) -> tuple[tuple[str, str], ...]:
    """The usual four rows: link-local and IPv4, each as RoCE v1 and v2; index 3 is the one to use."""
    local = f"fe80:0000:0000:0000:0e42:a1ff:fe00:00{rail:02x}"
    mapped = f"0000:0000:0000:0000:0000:ffff:0a01:{rail:02x}0a"
    return (
        (local, "IB/RoCE v1"),
        (local, "RoCE v2"),
        (mapped, "IB/RoCE v1"),
        (mapped, "RoCE v2"),
    )


NO_GIDS = (("0000:0000:0000:0000:0000:0000:0000:0000", ""),) * 4


def rails(count: int = NUM_RAILS) -> list[Nic]:
    """RoCE rails as on an HGX host."""
    return [
        Nic(f"mlx5_{rail}", rail, netdev=f"ens{rail}np0", gids=roce_gids(rail))
        for rail in range(count)
    ]


def infiniband(count: int = NUM_RAILS) -> list[Nic]:
    """InfiniBand rails with a subnet manager."""
    guid = "fe80:0000:0000:0000:0e42:a103:0000:000"
    return [
        replace(
            nic,
            netdev=f"ib{rail}",
            link_layer="InfiniBand",
            lid=f"0x{rail + 1:x}",
            gids=((f"{guid}{rail}", ""),),
        )
        for rail, nic in enumerate(rails(count))
    ]


def bluefield(slot: int) -> Nic:
    """A BlueField-3 port beside the rails, as fast as they are."""
    return Nic(
        f"mlx5_{slot}", slot, model=BLUEFIELD_3, netdev=f"ens{slot}f0np0", gids=roce_gids(slot)
    )


def virtual_nic() -> Nic:
    """A VM's accelerated front-end NIC: an RDMA device whose GID table stays empty."""
    return Nic(
        "mlx5_0",
        0,
        model=CONNECTX_VF,
        netdev="eth0",
        rate="100 Gb/sec (4X EDR)",
        gids=NO_GIDS,
        virtual_function=True,
    )


def efa(count: int = 4) -> list[Nic]:
    """AWS EFA devices."""
    gid = (("fe80:0000:0000:0000:0000:00ff:fe00:0001", "IB/RoCE v1"),)
    return [
        Nic(
            f"rdmap{slot}s0",
            slot,
            vendor=AMAZON,
            model="0xefa2",
            driver="efa",
            link_layer="Unspecified",
            rate="100 Gb/sec (4X EDR)",
            gids=gid,
        )
        for slot in range(count)
    ]


def bond() -> Nic:
    """Two ports bonded behind one RDMA device."""
    return Nic("mlx5_bond_0", 9, model=CONNECTX_6_DX, netdev="bond0", gids=roce_gids(9))


def _with(nics: list[Nic], position: int, **changes: object) -> list[Nic]:
    changed = list(nics)
    changed[position] = replace(nics[position], **changes)  # type: ignore[arg-type]
    return changed


CASES: dict[str, Callable[[], list[Nic]]] = {
    "eight rails": rails,
    "eight rails, infiniband": infiniband,
    "bluefield beside eight rails": lambda: [*rails(), bluefield(8)],
    "bluefield alone": lambda: [bluefield(0)],
    "slow front-end beside eight rails": lambda: [
        *rails(),
        Nic(
            "mlx5_8",
            8,
            model=CONNECTX_6_DX,
            netdev="eno1",
            rate="25 Gb/sec (1X EDR)",
            gids=roce_gids(8),
        ),
    ],
    "default route on one nic": lambda: [
        *rails(),
        Nic("mlx5_8", 8, netdev="eth0", gids=roce_gids(8)),
    ],
    "one nic for everything": lambda: [Nic("mlx5_0", 0, netdev="eth0", gids=roce_gids(0))],
    "vm nic without gids": lambda: [virtual_nic()],
    "vm nic beside infiniband": lambda: [
        replace(virtual_nic(), device="mlx5_8", slot=8),
        *infiniband(),
    ],
    "efa": efa,
    "bond": lambda: [bond()],
    "bond beside eight rails": lambda: [*rails(), bond()],
    "dead link": lambda: _with(rails(), 3, state="1: DOWN", gids=NO_GIDS),
    "degraded link": lambda: _with(rails(), 3, rate="200 Gb/sec (4X HDR)"),
    "no subnet manager": lambda: [replace(nic, state="2: INIT", lid="0x0") for nic in infiniband()],
    "roce v1 only": lambda: [replace(rails(1)[0], gids=roce_gids(0)[:1])],
    "software rdma": lambda: [Nic("rxe0", -1, vendor="", netdev="eth0", gids=roce_gids(0))],
    "no rdma": list,
}
"""Every made-up host, by what it shows."""


def build(root: Path, nics: list[Nic], num_gpus: int = 0) -> Path:
    """Write one host's tree.

    Args:
        root: Folder to fill; becomes the prefix of ``/sys`` and ``/proc``.
        nics: Its RDMA devices.
        num_gpus: NVIDIA GPUs; GPU i shares a PCIe switch with the NIC of slot i.

    Returns:
        The root.
    """
    for path, value in RUNNING.items():
        _write(root / path, value)
    for module in MODULES:
        (root / "sys/module" / module).mkdir(parents=True)
    for folder in (
        "sys/class/infiniband",
        "sys/class/net",
        "sys/class/iommu",
        "sys/bus/pci/devices",
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for nic in nics:
        _build_nic(root, nic)
    for gpu in range(num_gpus):
        function = _switch(gpu) / f"0000:{0x19 + 0x10 * gpu:02x}:00.0"
        _build_function(root, function, {"vendor": NVIDIA, "device": "0x2330", "class": "0x030200"})
    if num_gpus:
        _write(root / "proc/driver/nvidia/version", OPEN_DRIVER)
    header = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    route = "eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    _write(root / "proc/net/route", header + route)
    return root


def _switch(slot: int) -> Path:
    """Where the functions of a slot lie: each slot has a root port and a switch of its own."""
    bus = 0x15 + 0x10 * slot
    return Path(
        f"sys/devices/pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0/0000:{bus + 2:02x}:00.0"
    )


def _build_function(root: Path, place: Path, attributes: dict[str, str]) -> Path:
    function = root / place
    for name, value in attributes.items():
        _write(function / name, value)
    _write(function / "numa_node", "0" if int(function.name[5:7], 16) < 0x58 else "1")
    (function / "config").write_bytes(pcie_config())
    _link(root / "sys/bus/pci/devices" / function.name, function)
    return function


def pcie_config(register: int = 0x2810) -> bytes:
    """Configuration space with a power-management and a PCI Express capability; the register is
    Device Control (512 bytes, relaxed ordering on)."""
    config = bytearray(256)
    config[0x06] = 0x10
    config[0x34] = 0x40
    config[0x40:0x42] = bytes((0x01, 0x60))
    config[0x60:0x62] = bytes((0x10, 0x00))
    config[0x68:0x6A] = register.to_bytes(2, "little")
    return bytes(config)


def _build_nic(root: Path, nic: Nic) -> None:
    device = root / "sys/class/infiniband" / nic.device
    port = device / "ports/1"
    values = {"state": nic.state, "rate": nic.rate, "link_layer": nic.link_layer, "lid": nic.lid}
    for name, value in values.items():
        _write(port / name, value)
    for index, (address, kind) in enumerate(nic.gids):
        _write(port / "gids" / str(index), address)
        _write(port / "gid_attrs/types" / str(index), kind)
        if nic.netdev and kind:
            _write(port / "gid_attrs/ndevs" / str(index), nic.netdev)
    if nic.link_layer == "Ethernet":
        configfs = root / "sys/kernel/config/rdma_cm" / nic.device / "ports/1"
        _write(configfs / "default_roce_mode", "IB/RoCE v1")
        _write(configfs / "default_roce_tos", "0")
    if nic.netdev:
        _write(root / "sys/class/net" / nic.netdev / "mtu", "1500")
        if nic.netdev.startswith("bond"):
            _write(root / "sys/class/net" / nic.netdev / "bonding/mode", "802.3ad 4")
    if not nic.vendor:
        return
    function = _build_function(
        root,
        _switch(nic.slot) / nic.pci,
        {"vendor": nic.vendor, "device": nic.model, "class": "0x020000"},
    )
    if nic.netdev:
        _write(function / "net" / nic.netdev / "dev_port", "0")
    driver = root / "sys/bus/pci/drivers" / nic.driver
    driver.mkdir(parents=True, exist_ok=True)
    _link(function / "driver", driver)
    if nic.virtual_function:
        (function / "physfn").mkdir()
    _link(device / "device", function)


def _write(path: Path, value: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))

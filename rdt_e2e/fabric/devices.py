"""RDMA ports and GPUs of a machine, read from sysfs and proc below any root.

Nothing is opened for writing and nothing needs root. A file that is missing or that the kernel refuses
to read (an empty GID entry answers with an error) counts as absent.
"""

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_MAX_GIDS = 256

NVIDIA_VENDOR = "0x10de"
AMAZON_VENDOR = "0x1d0f"
MELLANOX_VENDOR = "0x15b3"

_BLUEFIELD_DEVICES = frozenset({"0xa2d2", "0xa2d6", "0xa2dc", "0xa2df"})
"""PCI device ids of BlueField 1 to 4 network controllers (pci.ids)."""

_DISPLAY_CLASSES = ("0x0300", "0x0302")
"""PCI classes of GPUs: VGA controller and 3D controller."""


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table.

    Attributes:
        index: Its index.
        value: The address, in the kernel's colon form.
        kind: `IB/RoCE v1` or `RoCE v2`, as the kernel names it.
        netdev: Network interface it belongs to; empty when the kernel gives none.
    """

    index: int
    value: str
    kind: str
    netdev: str

    @property
    def ipv4(self) -> str | None:
        """The IPv4 address that this entry maps, or None."""
        mapped = ipaddress.IPv6Address(self.value).ipv4_mapped
        return None if mapped is None else str(mapped)


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device.

    Attributes:
        device: Verbs name, such as `mlx5_0` or `ibp0`.
        port: Port number, from 1.
        state: `ACTIVE`, `DOWN` and so on.
        link_layer: `InfiniBand` or `Ethernet`; what the kernel says otherwise.
        rate_gbps: Speed of the link in Gb/s; 0 when unknown.
        lid: InfiniBand local id; 0 when none has been assigned.
        gids: Entries of the GID table that are in use.
        netdevs: Network interfaces of the device.
        pci: PCI address, or an empty string for a virtual device.
        pci_path: PCI addresses from the root port down to the device, after the host bridge's name.
        numa_node: NUMA node; -1 when the kernel does not know.
        driver: Kernel driver, such as `mlx5_core`.
        vendor: PCI vendor id, such as `0x15b3`.
        device_id: PCI device id.
        is_bond: Whether it is one device over several bonded links, or one of these links.
        is_vm_nic: Whether it is a virtual machine's own NIC, given to it by the hypervisor.
    """

    device: str
    port: int
    state: str
    link_layer: str
    rate_gbps: float
    lid: int
    gids: tuple[Gid, ...]
    netdevs: tuple[str, ...]
    pci: str
    pci_path: tuple[str, ...]
    numa_node: int
    driver: str
    vendor: str
    device_id: str
    is_bond: bool
    is_vm_nic: bool

    @property
    def name(self) -> str:
        """What UCX calls it: `device:port`."""
        return f"{self.device}:{self.port}"

    @property
    def is_efa(self) -> bool:
        """Whether it is an Elastic Fabric Adapter, which UCX does not drive well."""
        return self.vendor == AMAZON_VENDOR or self.driver == "efa"

    @property
    def is_bluefield(self) -> bool:
        """Whether it belongs to a BlueField data processing unit."""
        return self.vendor == MELLANOX_VENDOR and self.device_id in _BLUEFIELD_DEVICES

    @property
    def roce_gid(self) -> Gid | None:
        """The RoCE v2 entry to use: the first that maps an IPv4 address, else the first."""
        entries = [gid for gid in self.gids if gid.kind == "RoCE v2"]
        mapped = [gid for gid in entries if gid.ipv4 is not None]
        # An address of the link alone (fe80) reaches no other subnet.
        routable = [gid for gid in entries if not gid.value.startswith("fe80")]
        return next(iter([*mapped, *routable]), None)


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU.

    Attributes:
        pci: PCI address.
        pci_path: As for `RdmaPort`.
        numa_node: NUMA node; -1 when the kernel does not know.
    """

    pci: str
    pci_path: tuple[str, ...]
    numa_node: int


def read_ports(root: Path) -> tuple[RdmaPort, ...]:
    """Every port of every RDMA device, in the order of names.

    Args:
        root: Root of the file system to read; `/` for this machine.
    """
    devices = sorted(_children(root / "sys/class/infiniband"), key=_natural)
    return tuple(
        _read_port(root / "sys/class/infiniband" / device, device, int(number))
        for device in devices
        for number in sorted(_children(root / "sys/class/infiniband" / device / "ports"))
        if number.isdigit()
    )


def read_gpus(root: Path) -> tuple[Gpu, ...]:
    """Every NVIDIA GPU that its driver holds, in the order of PCI addresses.

    A container may see only some GPUs in use, but all of them on the bus: the bus counts, so that two
    containers of one host choose NICs from the same picture.

    Args:
        root: Root of the file system to read; `/` for this machine.
    """
    bus = root / "sys/bus/pci/devices"
    listed = {address.lower() for address in _children(root / "proc/driver/nvidia/gpus")}
    for address in _children(bus):
        device = bus / address
        if _text(device / "vendor") != NVIDIA_VENDOR:
            continue
        if not _text(device / "class").startswith(_DISPLAY_CLASSES):
            continue
        driver = _link_name(device / "driver")
        if driver in {"", "nvidia"}:  # Others (vfio-pci) have given it to a virtual machine.
            listed.add(address)
    return tuple(
        Gpu(address, _pci_path(bus / address), _int(_text(bus / address / "numa_node"), -1))
        for address in sorted(listed)
    )


def _read_port(folder: Path, device: str, number: int) -> RdmaPort:
    port, pci = folder / "ports" / str(number), folder / "device"
    path = _pci_path(pci)
    netdevs = tuple(sorted(_children(pci / "net")))
    driver = _link_name(pci / "driver")
    masters = [pci / "net" / name / "master" for name in netdevs]
    return RdmaPort(
        device=device,
        port=number,
        state=_text(port / "state").rpartition(":")[2].strip(),
        link_layer=_text(port / "link_layer"),
        rate_gbps=_rate(_text(port / "rate")),
        lid=_int(_text(port / "lid"), 0),
        gids=_read_gids(port),
        netdevs=netdevs,
        pci=path[-1] if len(path) > 1 else "",
        pci_path=path,
        numa_node=_int(_text(pci / "numa_node"), -1),
        driver=driver,
        vendor=_text(pci / "vendor"),
        device_id=_text(pci / "device"),
        is_bond="bond" in device or any((master / "bonding").exists() for master in masters),
        # Accelerated networking puts the NIC below the hypervisor's own interface.
        is_vm_nic=driver == "mana"
        or any(_link_name(master / "device" / "driver") == "hv_netvsc" for master in masters),
    )


def _read_gids(port: Path) -> tuple[Gid, ...]:
    found = []
    for index in sorted(int(name) for name in _children(port / "gids") if name.isdigit()):
        if index >= _MAX_GIDS:
            break
        value = _text(port / "gids" / str(index))
        if value in {"", _EMPTY_GID}:
            continue
        attributes = port / "gid_attrs"
        kind = _text(attributes / "types" / str(index))
        found.append(Gid(index, value, kind, _text(attributes / "ndevs" / str(index))))
    return tuple(found)


def _pci_path(device: Path) -> tuple[str, ...]:
    """`("pci0000:16", "0000:16:01.0", ..., device)` from where a sysfs link leads."""
    parts = os.path.realpath(device).split("/")
    bridges = [index for index, part in enumerate(parts) if part.startswith("pci")]
    if not bridges:
        return ()
    start = bridges[-1]
    below = [part for part in parts[start + 1 :] if _PCI_ADDRESS.fullmatch(part)]
    return (parts[start], *below)


def _children(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _link_name(path: Path) -> str:
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def _int(text: str, default: int) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return default


def _rate(text: str) -> float:
    match = re.match(r"[0-9.]+", text)
    return 0.0 if match is None else float(match.group())


def _natural(name: str) -> list[tuple[int, str]]:
    """Order `mlx5_2` before `mlx5_10`."""
    pieces = re.findall(r"\d+|\D+", name)
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]

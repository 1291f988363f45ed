"""Which RDMA ports of this host can be rails, and why the others cannot.

Reads sysfs only and changes nothing. It runs in three ways, with the Python of a bare host (3.9 or
later, standard library alone): as an Ansible module, as a program that prints JSON
(``python3 rdma_ports.py --root /``), and imported by tests. ``root`` is a prefix of ``/sys`` and
``/proc``, so that a made-up tree gives the same answers as a real one.

The decisions, in the order in which they are taken, are listed in `EXCLUSIONS`.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

DOCUMENTATION = r"""
module: rdma_ports
short_description: Find the RDMA ports of a host that can be rails
description: Reads sysfs, decides for every RDMA port whether it is a rail, and says why not.
options:
  root: {description: Prefix of /sys and /proc., type: str, default: /}
  rails: {description: The rails' devices in order., type: list, elements: str, default: []}
  allow_bond: {description: Accept a bonded port., type: bool, default: false}
author: rdt-e2e
"""

EXCLUSIONS = {
    "efa": "an AWS EFA port; NIXL reaches it through LIBFABRIC, not UCX",
    "software": "a software RDMA device without a PCI function",
    "bond": "part of a bond; two ports behind one device cannot be pinned to a GPU",
    "link_down": "the link is not up",
    "no_subnet_manager": "the InfiniBand port has no LID; is a subnet manager running?",
    "no_gid": "the GID table is empty (usual for a VM's front-end NIC)",
    "no_roce_v2": "no GID of type RoCE v2; the interface may have no address",
    "management": "it carries the default route or is a BlueField beside other NICs",
    "slower": "slower than the rails of this host, and another kind of NIC",
    "degraded": "the same kind of NIC as the fastest rail, but at a lower rate",
    "not_in_map": "not in the rail map of this host",
}
"""Every reason for which a port is no rail, in the order in which they are decided."""

_AMAZON, _NVIDIA = "0x1d0f", "0x10de"
_BLUEFIELDS = {f"0x15b3:{device}" for device in ("0xa2d2", "0xa2d6", "0xa2dc", "0xa2df")}
"""PCI ids of the network functions of BlueField 1, 2, 3 and 4."""


@dataclass
class Port:
    """One port of one RDMA device.

    Attributes:
        rate_gbps: Line rate in Gbit/s; 0 when the port does not say.
        gid_index: Row of the GID table to use; -1 when there is none to choose.
        reason: Key of `EXCLUSIONS`, or empty for a rail.
        rail: Position among the rails of the host; -1 for a port that is none.
    """

    device: str
    port: int
    pci: str
    pci_path: list[str]
    model: str
    driver: str
    numa_node: int
    netdev: str
    link_layer: str
    state: str
    rate_gbps: float
    lid: int
    mtu: int
    gid_index: int = -1
    gid: str = ""
    gid_type: str = ""
    virtual_function: bool = False
    reason: str = ""
    detail: str = ""
    rail: int = -1

    @property
    def usable(self) -> bool:
        """Whether the port can be a rail."""
        return not self.reason


@dataclass
class Host:
    """What was found on one host.

    Attributes:
        problems: What a rail map asks for and the host lacks.
        suspects: Ports that look like rails and are none, where there is no rail map.
    """

    ports: list[Port] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)

    @property
    def rails(self) -> list[Port]:
        """The usable ports, in rail order."""
        return sorted((port for port in self.ports if port.usable), key=lambda port: port.rail)

    @property
    def transport(self) -> str:
        """Which NIXL backend this host's ports need: ucx, libfabric or none."""
        if self.rails:
            return "ucx"
        return "libfabric" if any(port.reason == "efa" for port in self.ports) else "none"


def find_ports(root: Path, rails: list[str] | None = None, allow_bond: bool = False) -> Host:
    """Read every RDMA port below a root and decide which are rails.

    Args:
        root: Prefix of ``/sys`` and ``/proc``.
        rails: Device names that are the rails, in order; empty or None takes every usable port.
        allow_bond: Accept bonded ports.
    """
    devices = sorted((root / "sys/class/infiniband").glob("*"))
    ports = [
        _read_port(root, device, int(number.name))
        for device in devices
        for number in sorted((device / "ports").glob("[0-9]*"))
    ]
    ports.sort(key=lambda port: (port.pci or "~", port.device, port.port))
    host = Host(ports)
    for port in ports:
        _exclude_alone(root, port, allow_bond)
    if rails:
        _take_map(host, rails)
    else:
        _exclude_among(root, host)
        for number, port in enumerate(port for port in ports if port.usable):
            port.rail = number
        host.suspects = _broken_rails(host)
    for port in ports:
        port.detail = port.detail or EXCLUSIONS.get(port.reason, "")
    return host


def find_gpus(root: Path, rails: list[Port]) -> list[dict[str, object]]:
    """NVIDIA GPUs and the rails nearest to each: those that share the longest PCI path.

    Returns:
        One entry per GPU, by PCI address: pci, numa_node, nearest (device names; those of the same
        NUMA node when no PCI switch or root port is shared).
    """
    gpus = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _read(device / "vendor") != _NVIDIA or not _read(device / "class").startswith("0x03"):
            continue
        path, numa_node = _pci_path(device), _number(_read(device / "numa_node"), -1)
        shared = {rail.device: _shared(path, rail.pci_path) for rail in rails}
        best = max(shared.values(), default=0)
        nearest = [name for name, depth in shared.items() if best and depth == best]
        if not nearest:
            nearest = [rail.device for rail in rails if rail.numa_node == numa_node]
        gpus.append({"pci": device.name, "numa_node": numa_node, "nearest": nearest})
    return gpus


def summarise(host: Host) -> list[str]:
    """One line per port: the rail number or the reason, for people."""
    lines = []
    for port in host.ports:
        what = f"{port.device}/{port.port} {port.link_layer or 'unknown'} {port.rate_gbps:g} Gb/s"
        if port.usable:
            lines.append(f"rail {port.rail}: {what}, GID index {port.gid_index}")
        else:
            lines.append(f"not a rail: {what}: {port.reason}, {port.detail}")
    return lines


def _exclude_alone(root: Path, port: Port, allow_bond: bool) -> None:
    """Take the decisions that need no other port."""
    if port.driver == "efa" or port.model.startswith(_AMAZON):
        port.reason = "efa"
    elif not port.pci:
        port.reason = "software"
    elif _is_bonded(root, port) and not allow_bond:
        port.reason = "bond"
    elif port.link_layer == "InfiniBand" and port.state == "INIT":
        port.reason = "no_subnet_manager"
    elif port.state != "ACTIVE":
        port.reason, port.detail = "link_down", f"the link is {port.state or 'in no state'}"
    elif port.link_layer == "InfiniBand" and port.lid == 0:
        port.reason = "no_subnet_manager"
    elif not port.gid_type:
        port.reason = "no_gid"
    elif port.link_layer == "Ethernet" and port.gid_index < 0:
        port.reason = "no_roce_v2"


def _exclude_among(root: Path, host: Host) -> None:
    """Take the decisions that compare ports; none of them may leave the host without a rail."""
    candidates = [port for port in host.ports if port.usable]
    default_route = _default_route_interfaces(root)
    front = {
        port.device: f"{port.netdev} carries the default route"
        if port.netdev in default_route
        else "a BlueField beside other NICs, usually for storage and management"
        for port in candidates
        if port.netdev in default_route or port.model in _BLUEFIELDS
    }
    if len(front) < len(candidates):
        for port in candidates:
            if port.device in front:
                port.reason, port.detail = "management", front[port.device]
    candidates = [port for port in candidates if port.usable]
    fastest = max((port.rate_gbps for port in candidates), default=0.0)
    models = Counter(port.model for port in candidates if port.rate_gbps == fastest)
    for port in candidates:
        if port.rate_gbps < fastest:
            port.reason = "degraded" if port.model in models else "slower"
            port.detail = (
                f"{EXCLUSIONS[port.reason]}: {port.rate_gbps:g} instead of {fastest:g} Gb/s"
            )


def _broken_rails(host: Host) -> list[str]:
    """Broken ports of the rails' own model: without them, rails are numbered unlike on the peer."""
    models = {port.model for port in host.rails}
    return [
        f"{port.device} is the same kind of NIC as the rails and is none ({port.reason}); repair it, "
        "or set fabric_rails so that rail numbers agree between hosts"
        for port in host.ports
        if port.model in models and port.reason in ("link_down", "degraded", "no_gid", "no_roce_v2")
    ]


def _take_map(host: Host, rails: list[str]) -> None:
    """Follow the rail map of the inventory: its devices and no others, in its order."""
    by_device = {port.device: port for port in host.ports}
    for number, name in enumerate(rails):
        port = by_device.get(name)
        if port is None:
            found = ", ".join(by_device) or "none"
            host.problems.append(f"rail {number} is {name}, which this host lacks (found: {found})")
        elif not port.usable:
            detail = port.detail or EXCLUSIONS[port.reason]
            host.problems.append(f"rail {number} is {name}, which cannot be one: {detail}")
        else:
            port.rail = number
    for port in host.ports:
        if port.usable and port.device not in rails:
            port.reason = "not_in_map"


def _read_port(root: Path, device: Path, number: int) -> Port:
    port_dir, pci_dir = device / "ports" / str(number), device / "device"
    on_pci = (pci_dir / "vendor").exists()
    pci_path = _pci_path(pci_dir) if on_pci else []
    rate = re.match(r"[\d.]+", _read(port_dir / "rate"))
    layer = _read(port_dir / "link_layer")
    netdev = _netdev(device, port_dir, number)
    port = Port(
        device=device.name,
        port=number,
        pci=pci_path[-1] if pci_path else "",
        pci_path=pci_path,
        model=f"{_read(pci_dir / 'vendor')}:{_read(pci_dir / 'device')}" if on_pci else "",
        driver=(pci_dir / "driver").resolve().name if (pci_dir / "driver").exists() else "",
        numa_node=_number(_read(pci_dir / "numa_node"), -1),
        netdev=netdev,
        link_layer=layer,
        state=_read(port_dir / "state").partition(":")[2].strip(),
        rate_gbps=float(rate.group()) if rate else 0.0,
        lid=_number(_read(port_dir / "lid"), 0),
        mtu=_number(_read(root / "sys/class/net" / netdev / "mtu"), 0) if netdev else 0,
        virtual_function=(pci_dir / "physfn").exists(),
    )
    _choose_gid(port, port_dir)
    return port


def _choose_gid(port: Port, port_dir: Path) -> None:
    """Choose the GID: on InfiniBand the first; on Ethernet RoCE v2, IPv4 before global IPv6."""
    ranked = []
    for row in (port_dir / "gids").glob("[0-9]*"):
        try:
            address = ipaddress.IPv6Address(_read(row))
        except ValueError:
            continue
        if int(address) == 0:
            continue
        index, kind = int(row.name), _read(port_dir / "gid_attrs/types" / row.name)
        if port.link_layer == "InfiniBand":
            rank = 0
        elif kind != "RoCE v2":
            rank = 9
        else:
            rank = 0 if address.ipv4_mapped else 2 if address.is_link_local else 1
        owner = _read(port_dir / "gid_attrs/ndevs" / row.name)
        # A VLAN or macvlan on top has rows of its own in the same table.
        text = f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)
        ranked.append((rank, owner not in ("", port.netdev), index, text, kind))
    if not ranked:
        return
    rank, _, index, text, kind = min(ranked)
    port.gid_type = kind or "InfiniBand"
    if rank < 9:
        port.gid_index, port.gid = index, text


def _netdev(device: Path, port_dir: Path, number: int) -> str:
    """The network interface of a port: as the GID table says, else the one of the PCI function."""
    for row in sorted((port_dir / "gid_attrs/ndevs").glob("[0-9]*"), key=lambda p: int(p.name)):
        name = _read(row)
        # A VLAN's name has a dot; the port itself is what it lies on.
        if name and "." not in name:
            return name
    for net in sorted((device / "device/net").glob("*")):
        # dev_port counts from 0 and tells the ports of one function apart.
        if _number(_read(net / "dev_port"), number - 1) == number - 1:
            return net.name
    return ""


def _is_bonded(root: Path, port: Port) -> bool:
    net = root / "sys/class/net" / port.netdev
    bonded = bool(port.netdev) and ((net / "bonding").exists() or (net / "master").exists())
    return bonded or "bond" in port.device


def _default_route_interfaces(root: Path) -> set[str]:
    rows = [line.split() for line in _read(root / "proc/net/route").splitlines()[1:]]
    found = {row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"}
    for row in (line.split() for line in _read(root / "proc/net/ipv6_route").splitlines()):
        # Destination ::/0 through a gateway; the rejecting entry of every table is on lo.
        if len(row) == 10 and row[0] == "0" * 32 and row[1] == "00" and row[9] != "lo":
            found.add(row[9])
    return found


def _pci_path(device: Path) -> list[str]:
    """The PCI functions from the root complex down to a device, from its place in sysfs."""
    parts = device.resolve().parts
    return [part for part in parts if re.fullmatch(r"(pci)?[0-9a-f]{4}:[0-9a-f:.]{2,7}", part)]


def _shared(one: list[str], other: list[str]) -> int:
    """PCI functions that two paths share below the root complex."""
    depth = 0
    while depth < min(len(one), len(other)) and one[depth] == other[depth]:
        depth += 1
    return max(depth - 1, 0)


def _read(path: Path) -> str:
    # Some attributes exist and cannot be read: an unused GID row answers EINVAL.
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str, default: int) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return default


def report(
    root: Path, rails: list[str] | None = None, allow_bond: bool = False
) -> dict[str, object]:
    """Everything this module tells, as plain JSON types."""
    host = find_ports(root, rails, allow_bond)
    return {
        "ports": [asdict(port) | {"usable": port.usable} for port in host.ports],
        "rails": [asdict(port) for port in host.rails],
        "gpus": find_gpus(root, host.rails),
        "transport": host.transport,
        "problems": host.problems,
        "suspects": host.suspects,
        "summary": summarise(host),
    }


def run_module() -> None:
    """Answer Ansible."""
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(
        argument_spec={
            "root": {"type": "str", "default": "/"},
            "rails": {"type": "list", "elements": "str", "default": []},
            "allow_bond": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    given = module.params
    found = report(Path(given["root"] or "/"), given["rails"], given["allow_bond"])
    module.exit_json(changed=False, **found)


def run_program(arguments: list[str]) -> None:
    """Print the report as JSON."""
    parser = argparse.ArgumentParser(description="Find the RDMA ports that can be rails.")
    parser.add_argument("--root", type=Path, default=Path("/"), help="prefix of /sys and /proc")
    parser.add_argument("--rail", action="append", dest="rails", help="a rail's device; repeatable")
    parser.add_argument("--allow-bond", action="store_true", help="accept bonded ports")
    given = parser.parse_args(arguments)
    json.dump(report(given.root, given.rails, given.allow_bond), sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    # Ansible hands over its arguments by other means and leaves the command line empty.
    if len(sys.argv) > 1:
        run_program(sys.argv[1:])
    else:
        run_module()

"""Which NIC belongs to which GPU, by the PCI tree, and which NICs belong to none.

A GPU reads through a NIC below the same PCIe switch at full speed; through the other socket it loses a
third or more (ucx#10929). UCX sees one GPU per Ray worker and then picks NICs for it that its neighbours
pick as well (ucx#11680); nothing above UCX chooses, so this does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rdt_e2e.fabric.devices import Gpu, RdmaPort, read_gpus, read_ports

SLOW_SHARE = 0.6
"""A port below this share of the fastest usable one is not part of the fabric: beside 400 Gb/s, 200 is
not, and a link that came up one step slow would hold every rank back."""

DISTANCES = ("same PCIe switch", "same host bridge", "same NUMA node", "other NUMA node", "unknown")
"""From near to far, as `distance` counts them."""


@dataclass(frozen=True)
class Topology:
    """What `choose_nics` needs to know about a machine.

    Attributes:
        gpus: GPUs in the order of PCI addresses.
        ports: All RDMA ports.
        default_routes: Network interfaces that carry a default route.
    """

    gpus: tuple[Gpu, ...]
    ports: tuple[RdmaPort, ...]
    default_routes: frozenset[str]


@dataclass(frozen=True)
class Assignment:
    """The NICs of one GPU.

    Attributes:
        gpu: The GPU.
        ports: Its ports, nearest first.
        distance: Index into `DISTANCES` of the farthest of them.
        shared: Whether another GPU uses one of them too.
    """

    gpu: Gpu
    ports: tuple[RdmaPort, ...]
    distance: int
    shared: bool

    @property
    def net_devices(self) -> str:
        """The value of `UCX_NET_DEVICES` for this GPU's process."""
        return ",".join(port.name for port in self.ports)


@dataclass(frozen=True)
class NicPlan:
    """The choice for a whole machine.

    Attributes:
        assignments: One per GPU, in the order of GPUs; empty when no port can be used.
        usable: Ports of the fabric.
        excluded: Names of the other ports, each with the reason.
    """

    assignments: tuple[Assignment, ...]
    usable: tuple[RdmaPort, ...]
    excluded: dict[str, str]

    def for_gpu(self, pci: str) -> Assignment | None:
        """The assignment of the GPU at a PCI address, whatever the width of its domain."""
        wanted = short_address(pci)
        return next((a for a in self.assignments if short_address(a.gpu.pci) == wanted), None)


def read_topology(root: Path) -> Topology:
    """Read a machine's GPUs, RDMA ports and default routes.

    Args:
        root: Root of the file system to read; `/` for this machine.
    """
    return Topology(read_gpus(root), read_ports(root), _default_routes(root))


def choose_nics(topology: Topology) -> NicPlan:
    """Choose the ports of each GPU by PCIe distance.

    Every GPU gets the nearest port that no other has; with fewer ports than GPUs they share, with more
    each gets the same number.

    Args:
        topology: The machine.

    Returns:
        The plan, with a reason for every port left out.
    """
    usable, excluded = fabric_ports(topology)
    pairs = sorted(
        (distance(gpu, port), index, slot)
        for index, gpu in enumerate(topology.gpus)
        for slot, port in enumerate(usable)
    )
    taken: dict[int, list[int]] = {index: [] for index in range(len(topology.gpus))}
    users = [0] * len(usable)
    per_gpu = max(1, len(usable) // max(1, len(topology.gpus)))
    # One round gives each GPU at most one more port, so that no GPU takes its neighbour's.
    for round_number in range(per_gpu):
        for _, index, slot in pairs:
            if len(taken[index]) == round_number and users[slot] == 0:
                taken[index].append(slot)
                users[slot] += 1
    for index, slots in taken.items():
        if not slots and usable:
            _, _, slot = min((far, users[s], s) for far, i, s in pairs if i == index)
            slots.append(slot)
            users[slot] += 1
    assignments = [
        _assign(topology.gpus[index], usable, slots, users)
        for index, slots in taken.items()
        if slots
    ]
    return NicPlan(tuple(assignments), usable, excluded)


def fabric_ports(topology: Topology) -> tuple[tuple[RdmaPort, ...], dict[str, str]]:
    """Split the ports into those of the fabric and the others, each of these with the reason."""
    excluded: dict[str, str] = {}
    candidates = []
    for port in topology.ports:
        reason = _unusable(port)
        if reason is None:
            candidates.append(port)
        else:
            excluded[port.name] = reason
    for reason_of in (_is_slow, _is_of_other_link_layer, _is_dpu, _is_management):
        # Each rule compares with what the ones before it left.
        rejected = {port.name: reason_of(port, candidates, topology) for port in candidates}
        excluded |= {name: reason for name, reason in rejected.items() if reason is not None}
        candidates = [port for port in candidates if rejected[port.name] is None]
    return tuple(candidates), excluded


def distance(gpu: Gpu, port: RdmaPort) -> int:
    """How far a port is from a GPU: an index into `DISTANCES`.

    A shared bridge below the host bridge is a switch (or a root port with one); in a virtual machine,
    where devices hang from the host bridge itself, only the bridge and the NUMA node speak.
    """
    shared = 0
    for left, right in zip(gpu.pci_path, port.pci_path, strict=False):
        if left != right:
            break
        shared += 1
    if shared >= 2:
        return 0
    same_node = gpu.numa_node == port.numa_node
    nodes_known = -1 not in (gpu.numa_node, port.numa_node)
    if nodes_known and not same_node:
        return 3
    is_flat = len(gpu.pci_path) == len(port.pci_path) == 2
    if shared == 1 and (nodes_known or not is_flat):
        return 1
    return 2 if nodes_known else 4


def short_address(pci: str) -> str:
    """A PCI address in lower case with a four-digit domain, as sysfs writes it."""
    domain, _, rest = pci.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest.count(":") == 1 else pci.lower()


def _assign(
    gpu: Gpu, usable: Sequence[RdmaPort], slots: Sequence[int], users: Sequence[int]
) -> Assignment:
    ports = tuple(usable[slot] for slot in slots)
    return Assignment(
        gpu,
        ports,
        max(distance(gpu, port) for port in ports),
        any(users[slot] > 1 for slot in slots),
    )


def _unusable(port: RdmaPort) -> str | None:
    if port.is_efa:
        return "EFA, which NIXL drives through LIBFABRIC and not through UCX"
    if port.state != "ACTIVE":
        return f"its link is {port.state or 'of unknown state'}"
    if port.is_bond:
        return "a bond, which RDMA reads disconnect from"
    if port.is_vm_nic:
        return "the virtual machine's own NIC"
    if port.link_layer == "InfiniBand":
        return "LID 0: no subnet manager has configured it" if port.lid == 0 else None
    if port.link_layer != "Ethernet":
        return f"link layer {port.link_layer or 'unknown'}"
    if not port.gids:
        return "its GID table is empty (a virtual machine's own NIC, or no address on it)"
    return None if port.roce_gid is not None else "no RoCE v2 GID with a routable address"


def _is_slow(port: RdmaPort, others: Sequence[RdmaPort], _topology: Topology) -> str | None:
    fastest = max(other.rate_gbps for other in others)
    if port.rate_gbps < SLOW_SHARE * fastest:
        return f"{port.rate_gbps:g} Gb/s beside ports of {fastest:g} Gb/s"
    return None


def _is_of_other_link_layer(
    port: RdmaPort, others: Sequence[RdmaPort], _topology: Topology
) -> str | None:
    layers = [other.link_layer for other in others]
    if "InfiniBand" in layers and port.link_layer != "InfiniBand":
        return "Ethernet beside InfiniBand ports: not part of that fabric"
    return None


def _is_dpu(port: RdmaPort, others: Sequence[RdmaPort], _topology: Topology) -> str | None:
    # Where every port is a BlueField (SuperNICs), they are the fabric.
    if port.is_bluefield and any(not other.is_bluefield for other in others):
        return "a BlueField DPU beside the fabric's NICs (storage or management)"
    return None


def _is_management(port: RdmaPort, others: Sequence[RdmaPort], topology: Topology) -> str | None:
    def routes(other: RdmaPort) -> bool:
        return bool(topology.default_routes & set(other.netdevs))

    if routes(port) and any(not routes(other) for other in others):
        return f"carries the default route ({', '.join(port.netdevs)}): the management network"
    return None


def _default_routes(root: Path) -> frozenset[str]:
    try:
        lines = (root / "proc/net/route").read_text().splitlines()[1:]
    except OSError:
        return frozenset()
    rows = [line.split() for line in lines]
    # Columns: interface, destination, gateway, flags, ..., mask; a default route is 0/0.
    return frozenset(
        row[0] for row in rows if len(row) > 7 and int(row[1], 16) == 0 and int(row[7], 16) == 0
    )

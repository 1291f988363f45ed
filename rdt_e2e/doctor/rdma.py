"""Checks of the RDMA ports: which are up, which are the fabric's, which GPU is near which.

`rails.py` has the checks of what lies around them: addresses, routes, PCIe.
"""

from collections.abc import Callable

from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Finding, Theme, fail, ok, skip, warn
from rdt_e2e.fabric.devices import RdmaPort
from rdt_e2e.fabric.topology import DISTANCES

THEME = Theme("rdma", "RDMA ports")

GOOD_RATE_GBPS = 200


def with_ports(question: Callable[[Context], Finding]) -> Callable[[Context], Finding]:
    """Make a check ask only where there are RDMA ports; `rdma.devices` speaks for the others."""

    def ask(context: Context) -> Finding:
        if not context.topology.ports:
            return skip("no RDMA device is here")
        return question(context)

    return ask


def roce_ports(context: Context) -> list[RdmaPort]:
    """Ports of the fabric that are RoCE, in the order of names."""
    return [port for port in context.nic_plan.usable if port.link_layer == "Ethernet"]


@THEME.check(
    "devices",
    "RDMA devices are here, and usable",
    looks_at="/sys/class/infiniband and /dev/infiniband/uverbs*",
    why="A container without the device files has NICs that it can see and not use: NCCL and UCX go over "
    "sockets, silently.",
    sources=("vllm#42075", "ray#62339", "kubernetes: k8s-rdma-shared-dev-plugin"),
)
def _devices(context: Context) -> Finding:
    devices = sorted({port.device for port in context.topology.ports})
    fix = (
        "docker: --device /dev/infiniband\n"
        "Kubernetes: the RDMA resource of your provider (rdma/ib, rdma/hca_shared_devices_a, ...)"
    )
    if not devices:
        if not context.wants_rdma:
            return skip("no RDMA device is here, and none is needed")
        return fail("no RDMA device in /sys/class/infiniband", fix)
    verbs = [name for name in context.names("/dev/infiniband") if name.startswith("uverbs")]
    if len(verbs) < len(devices):
        text = f"{len(devices)} devices in sysfs, {len(verbs)} device files in /dev/infiniband"
        return (fail if not verbs else warn)(text, fix)
    return ok(f"{len(devices)}: {devices[0]} to {devices[-1]}")


@THEME.check(
    "links",
    "Links are up",
    looks_at="state of every port",
    why="UCX skips a port that is down and puts its GPU on a neighbour's: half the bandwidth for two "
    "ranks, and the whole sync waits for them.",
    sources=("CE#35", "CE#91", "azhpc-images health checks"),
)
@with_ports
def _links(context: Context) -> Finding:
    ports = context.topology.ports
    down = [port for port in ports if port.state != "ACTIVE"]
    if len(down) == len(ports):
        return fail(
            f"all {len(ports)} ports are down", "rdma link show  # cable, switch port, driver"
        )
    # A spare port of a two-port card is often not cabled; one like the fabric's own is missed.
    missed = [p for p in down if p.device_id in {u.device_id for u in context.nic_plan.usable}]
    if missed:
        names = ", ".join(f"{port.name} ({port.state})" for port in missed)
        return warn(
            f"like the fabric's, but not up: {names}", "rdma link show  # cable, switch port"
        )
    spare = f"; spare: {', '.join(port.name for port in down)}" if down else ""
    return ok(f"{len(ports) - len(down)} of {len(ports)} active{spare}")


@THEME.check(
    "fabric",
    "Ports of the fabric",
    looks_at="state, link layer, rate, GIDs, driver and default route of every port",
    why="Management ports, BlueField DPUs, NICs of virtual machines, bonds and slower ports all look "
    "like RDMA devices. UCX takes them too, and fails or halves the bandwidth.",
    sources=("dynamo#10852", "smg#2520", "ompi#9881", "ucx#9727", "CE#36", "CE#15", "Dynamo guide"),
)
@with_ports
def _fabric(context: Context) -> Finding:
    plan = context.nic_plan
    left_out = "".join(f"\nnot {name}: {reason}" for name, reason in plan.excluded.items())
    if not plan.usable:
        if context.backend == "LIBFABRIC":
            return skip("the fabric is EFA; see rdma.efa")
        return fail(f"none can be used{left_out}", "rdma link show; show_gids  # on the host")
    names = ",".join(port.name for port in plan.usable)
    slowest = min(port.rate_gbps for port in plan.usable)
    text = f"{names} at {slowest:g} Gb/s{left_out}"
    if slowest < GOOD_RATE_GBPS:
        return warn(
            text, f"use NICs of {GOOD_RATE_GBPS} Gb/s or more; these will set the sync's time"
        )
    return ok(text)


@THEME.check(
    "affinity",
    "Each GPU has a NIC near it",
    looks_at="the PCI tree and NUMA nodes of GPUs and ports",
    why="Ray shows a worker one GPU, and UCX then picks NICs without knowing its neighbours: four of "
    "eight NICs carry everything. A NIC at the other socket loses a third.",
    sources=("ucx#11680", "ucx#11259", "ray#64542", "modelexpress#255", "ucx#10929", "ucx#11121"),
)
@with_ports
def _affinity(context: Context) -> Finding:
    plan = context.nic_plan
    if not context.topology.gpus:
        return skip("no GPU is here")
    if not plan.usable:
        return skip("no port can be used; see rdma.fabric")
    rows = [
        f"{a.gpu.pci} UCX_NET_DEVICES={a.net_devices} ({DISTANCES[a.distance]})"
        for a in plan.assignments
    ]
    text = "\n".join(rows)
    farthest = max(a.distance for a in plan.assignments)
    if any(a.shared for a in plan.assignments):
        text = f"{len(plan.usable)} ports for {len(rows)} GPUs\n{text}"
        return warn(text, "give the pod all NICs of the host (as many RDMA resources as GPUs)")
    if DISTANCES[farthest] == "other NUMA node":
        return warn(text, "give the pod all NICs of the host, or GPUs and NICs of one socket")
    return ok(text)


@THEME.check(
    "gid",
    "A usable RoCE v2 GID per port",
    looks_at="the GID tables, and UCX_IB_GID_INDEX",
    why="A GID of RoCE v1, or one of a link-local address, ends in endpoint time-outs; its index differs "
    "between ports and hosts, so a fixed UCX_IB_GID_INDEX is right only by luck.",
    sources=("ucx#7785", "ucx#2501", "ucx#10939", "uccl#803"),
)
@with_ports
def _gid(context: Context) -> Finding:
    ports, wanted = roce_ports(context), context.environ.get("UCX_IB_GID_INDEX", "auto")
    if not ports:
        return skip("no usable port is RoCE")
    by_index: dict[int, list[str]] = {}
    for port in ports:
        if port.roce_gid is not None:
            by_index.setdefault(port.roce_gid.index, []).append(port.name)
    text = "; ".join(f"index {index} on {', '.join(names)}" for index, names in by_index.items())
    if wanted != "auto":
        off = [
            port.name
            for port in ports
            if not any(str(g.index) == wanted and g.kind == "RoCE v2" for g in port.gids)
        ]
        if off:
            text = (
                f"UCX_IB_GID_INDEX={wanted} is no RoCE v2 entry on {', '.join(off)}\nusable: {text}"
            )
            return fail(text, "unset UCX_IB_GID_INDEX")
    if all(port.roce_gid is None or port.roce_gid.ipv4 is None for port in ports):
        return warn(f"IPv6 only: {text}", "give the ports IPv4 addresses, if peers do not answer")
    return ok(text)


@THEME.check(
    "efa",
    "EFA goes through LIBFABRIC",
    looks_at="vendor and driver of the ports, and the agent's plugins",
    why="UCX on EFA is emulated or disconnects under load; Ray chooses LIBFABRIC there, so that plugin "
    "must be in the NIXL build.",
    sources=("nixl#909", "nixl#1983", "nixl#1921", "ray#62339"),
)
@with_ports
def _efa(context: Context) -> Finding:
    if context.backend != "LIBFABRIC":
        return skip("no EFA here")
    if "error" in context.probe:
        fix = (
            "install the EFA installer 1.47 or newer, with its libfabric first on the loader's path"
        )
        return fail(f"no agent over LIBFABRIC: {context.probe['error']}", fix)
    return ok("an agent over LIBFABRIC can be built")


@THEME.check(
    "bond",
    "No bonded device, or none that is used",
    looks_at="names and interfaces of the devices, LIDs of InfiniBand ports",
    why="A bonded device (mlx5_bond_0) and a port with LID 0 are in every list of devices, and peers "
    "disconnect from them.",
    sources=("Dynamo guide: RDMA", "dynamo#10852"),
)
@with_ports
def _bond(context: Context) -> Finding:
    ports = context.topology.ports
    barred = [p for p in ports if p.is_bond or (p.link_layer == "InfiniBand" and p.lid == 0)]
    if not barred:
        return ok("none")
    names = ", ".join(port.name for port in barred)
    if context.nic_plan.usable:
        return ok(f"{names}, left out of every rank's UCX_NET_DEVICES")
    fix = "start the subnet manager, or break the bond for the fabric's ports; UCX_IB_ADDR_TYPE=eth"
    return fail(f"only {names}", fix)


@THEME.check(
    "counters",
    "Traffic can be counted",
    looks_at="port_xmit_data and port_rcv_data of the fabric's ports",
    why="Counters before and after a sync are the proof that bytes went over RDMA, and over all NICs.",
    sources=("llm-d: node-exporter with the infiniband collector",),
)
@with_ports
def _counters(context: Context) -> Finding:
    usable = context.nic_plan.usable
    if not usable:
        return skip("no port can be used; see rdma.fabric")
    folder = "/sys/class/infiniband/{}/ports/{}/counters/port_xmit_data"
    silent = [p.name for p in usable if context.number(folder.format(p.device, p.port)) is None]
    if silent:
        text = f"none on {', '.join(silent)}"
        return warn(text, "read them on the host: virtual functions often have none")
    return ok(f"{len(usable)} ports")

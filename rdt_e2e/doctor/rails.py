"""Checks of what lies around the RDMA ports: addresses, routes, frame sizes, the PCI bus."""

import re

from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Finding, ok, skip, warn
from rdt_e2e.doctor.rdma import THEME, roce_ports, with_ports

__all__ = ["THEME"]


@THEME.check(
    "subnets",
    "Rails are in subnets of their own",
    looks_at="the IPv4 routes of the ports' interfaces in /proc/net/route",
    why="Two rails in one subnet: the kernel answers through either, and connections of one rail arrive "
    "on the other and time out.",
    sources=("ucx#5598", "k8s-rdma-shared-dev-plugin#297"),
)
@with_ports
def _subnets(context: Context) -> Finding:
    by_network: dict[str, list[str]] = {}
    netdevs = sorted({name for port in roce_ports(context) for name in port.netdevs})
    rows = [line.split() for line in (context.text("/proc/net/route") or "").splitlines()[1:]]
    for row in rows:
        if len(row) > 7 and row[0] in netdevs and row[7] not in {"00000000", "FFFFFFFF"}:
            by_network.setdefault(f"{row[1]}/{row[7]}", []).append(row[0])
    if len(netdevs) < 2:
        return skip("fewer than two RoCE rails")
    shared = [sorted(set(names)) for names in by_network.values() if len(set(names)) > 1]
    if shared:
        fix = "one subnet per rail; or ip rule add from <address> table <n>, and arp_ignore=1"
        return warn(f"in one subnet: {', '.join(shared[0])}", fix)
    routed = {name for names in by_network.values() for name in names}
    missing = [name for name in netdevs if name not in routed]
    if missing:
        return warn(
            f"no route of its own: {', '.join(missing)}", "ip addr add <address>/<n> dev <rail>"
        )
    return ok(f"{len(netdevs)} rails, {len(by_network)} subnets")


@THEME.check(
    "arp",
    "Rails answer for their own addresses",
    looks_at="rp_filter, arp_ignore and arp_announce under /proc/sys/net/ipv4/conf",
    why="With several rails a strict rp_filter drops replies, and ARP answers that name another rail's "
    "address send packets the wrong way.",
    sources=("ucx#9839", "ucx#5598", "k8s-rdma-shared-dev-plugin#297"),
)
@with_ports
def _arp(context: Context) -> Finding:
    netdevs = sorted({name for port in roce_ports(context) for name in port.netdevs})
    if len(netdevs) < 2:
        return skip("fewer than two RoCE rails")
    allowed = {"rp_filter": (0, 2), "arp_ignore": (1, 2, 8), "arp_announce": (2,)}
    wrong = [
        key
        for key, values in allowed.items()
        if any(_conf(context, name, key) not in (None, *values) for name in netdevs)
    ]
    if wrong:
        good = {"rp_filter": 2, "arp_ignore": 1, "arp_announce": 2}
        settings = " ".join(f"net.ipv4.conf.all.{key}={good[key]}" for key in wrong)
        return warn(f"{', '.join(wrong)} not as several rails need", f"sysctl -w {settings}")
    return ok(f"{len(netdevs)} rails")


def _conf(context: Context, netdev: str, key: str) -> int | None:
    """The value in force: the kernel takes the larger of `all` and the interface's own."""
    values = [
        value
        for name in ("all", netdev)
        if (value := context.number(f"/proc/sys/net/ipv4/conf/{name}/{key}")) is not None
    ]
    return max(values, default=None)


@THEME.check(
    "mtu",
    "Jumbo frames on RoCE rails",
    looks_at="MTU of the ports' interfaces",
    why="RDMA over Ethernet takes the largest of 1024, 2048 and 4096 bytes that fits; at the default "
    "1500 it is 1024, and the rate of small packets bounds the bandwidth.",
    sources=("docs.nvidia.com: RoCE MTU", "NVIDIA doRoCE"),
)
@with_ports
def _mtu(context: Context) -> Finding:
    netdevs = sorted({name for port in roce_ports(context) for name in port.netdevs})
    sizes = {name: context.number(f"/sys/class/net/{name}/mtu") for name in netdevs}
    known = {name: size for name, size in sizes.items() if size is not None}
    if not known:
        return skip("no RoCE rail has an interface here")
    small = [name for name, size in known.items() if size < 4200]
    if small:
        text = f"{', '.join(small)} at {min(known.values())}"
        return warn(
            text, f"ip link set dev {small[0]} mtu 9000  # on every rail, and on the switch"
        )
    return ok(f"{min(known.values())} and more")


@THEME.check(
    "pcie",
    "PCIe links at full width and speed",
    looks_at="current and maximum link width and speed of GPUs and ports",
    why="A card that trained at x8, or one generation lower, moves half, and no counter of the network "
    "shows it.",
    sources=("azhpc-images health checks", "nccl#1939"),
)
@with_ports
def _pcie(context: Context) -> Finding:
    slow = []
    devices = {port.pci for port in context.nic_plan.usable if port.pci}
    for pci in sorted(devices):
        folder = f"/sys/bus/pci/devices/{pci}"
        width = context.number(f"{folder}/current_link_width")
        most = context.number(f"{folder}/max_link_width")
        speed, top = (_speed(context, f"{folder}/{w}_link_speed") for w in ("current", "max"))
        if (width and most and width < most) or (speed and top and speed < top):
            slow.append(f"{pci} x{width} at {speed:g} GT/s of x{most} at {top:g} GT/s")
    if slow:
        fix = f"lspci -vv -s {slow[0].split()[0]}  # LnkSta; reseat the card, or check the BIOS"
        return warn(", ".join(slow), fix)
    return ok(f"{len(devices)} devices") if devices else skip("no port has a PCI link here")


def _speed(context: Context, path: str) -> float:
    match = re.match(r"[0-9.]+", context.text(path) or "")
    return 0.0 if match is None else float(match.group())


@THEME.check(
    "iommu",
    "IOMMU passes through",
    looks_at="/sys/kernel/iommu_groups/*/type, on bare metal",
    why="An IOMMU that translates every access sends GPU-to-NIC traffic through the root complex: it "
    "fails, hangs, or runs at a fraction.",
    sources=("docs.nvidia.com: NCCL troubleshooting, PCI ACS", "ucx#11121"),
)
@with_ports
def _iommu(context: Context) -> Finding:
    types = {
        context.text(f"/sys/kernel/iommu_groups/{group}/type") or ""
        for group in context.names("/sys/kernel/iommu_groups")
    }
    if not types:
        return ok("off")
    if "hypervisor" in (context.text("/proc/cpuinfo") or "").split():
        return skip("a virtual machine needs it")
    if any(kind.startswith("DMA") for kind in types):
        fix = "kernel parameters: iommu=pt (and intel_iommu=on or amd_iommu=on), then reboot"
        return warn(f"translating ({', '.join(sorted(types))})", fix)
    return ok(", ".join(sorted(types)))


@THEME.check(
    "acs",
    "ACS is off on PCIe switches",
    looks_at="lspci -vvv, which shows it to root alone",
    why="Access control services send traffic between a GPU and a NIC below one switch up to the root "
    "complex and back.",
    sources=("docs.nvidia.com: NCCL troubleshooting, PCI ACS", "nccl#1939"),
)
@with_ports
def _acs(context: Context) -> Finding:
    if "hypervisor" in (context.text("/proc/cpuinfo") or "").split():
        return skip("a virtual machine needs it")
    listing = context.host.run(["lspci", "-vvv"])
    controls = re.findall(r"ACSCtl:.*", listing.stdout)
    if not controls:
        return skip("lspci shows it to root alone; on the host: sudo lspci -vvv | grep ACSCtl")
    num_on = sum("SrcValid+" in control for control in controls)
    if num_on:
        fix = "disable ACS in the BIOS; or ansible-playbook ansible/rdma.yml --tags pci  # reboots"
        return warn(f"on at {num_on} of {len(controls)} bridges", fix)
    return ok(f"off at all {len(controls)} bridges")

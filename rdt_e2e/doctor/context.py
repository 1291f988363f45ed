"""What the checks share: the machine, the configuration, and answers worth asking for only once."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rdt_e2e.config import Config
from rdt_e2e.doctor.host import CommandResult, Host
from rdt_e2e.doctor.pair_facts import PairFacts
from rdt_e2e.environment import process_environment
from rdt_e2e.fabric.topology import NicPlan, Topology, choose_nics, read_topology

PROBE_TIMEOUT_S = 14.0
"""Longest wait for a NIXL agent, in seconds: a cold import off a slow disk takes most of it."""
CUDA_PROBE_TIMEOUT_S = 60.0
"""The same with CUDA, whose libraries are some GB, in seconds."""

_GPU_QUERY = "pci.bus_id,name,driver_version,memory.total,memory.used"


@dataclass(frozen=True)
class GpuState:
    """One GPU as its driver's tool describes it; memory in MiB."""

    pci: str
    name: str
    driver_version: str
    total_mib: int
    used_mib: int


@dataclass(frozen=True)
class Raylet:
    """A Ray node's main process on this machine.

    Attributes:
        pid: Process id.
        address: The address that it told Ray is its own; empty when it cannot be read.
        cluster: Address of its cluster's head.
        environ: Its environment, or None when it belongs to another user.
    """

    pid: int
    address: str
    cluster: str
    environ: Mapping[str, str] | None


class Context:
    """One machine under one configuration.

    Args:
        host: The machine.
        config: What is to be run on it.
        at_build: Whether an image is being built: no GPU, no RDMA device and no cluster is there.
        pair: What was measured between the two nodes, or why it could not be; for the group `pair`.
    """

    def __init__(
        self,
        host: Host,
        config: Config,
        *,
        at_build: bool = False,
        pair: PairFacts | str | None = None,
    ) -> None:
        self.host = host
        self.config = config
        self.at_build = at_build
        self.pair = pair

    @property
    def wants_gpu(self) -> bool:
        """Whether the run needs real GPUs."""
        return self.config.trainer.device == "cuda" and not self.at_build

    @property
    def wants_rdma(self) -> bool:
        """Whether the weights cross a fabric: real GPUs, on more than one host."""
        return self.wants_gpu and self.config.cluster.target == "ray"

    @property
    def num_gpus_wanted(self) -> int:
        """GPUs that this host must have: the smaller fleet's on a cluster, both fleets' on one host."""
        fleets = (self.config.trainer.num_ranks, self.config.num_consumers)
        return sum(fleets) if self.config.cluster.target == "local" else min(fleets)

    @functools.cached_property
    def environ(self) -> Mapping[str, str]:
        """Environment of the run's processes on this machine.

        A local cluster is started by the run, which adds its own; a running one has what its
        containers or units gave it.
        """
        if self.config.cluster.target == "local" and not self.at_build:
            return {**self.host.environ, **process_environment(self.config)}
        return self.host.environ

    def text(self, path: str) -> str | None:
        """Content of a small file below the host's root, stripped; None when it cannot be read."""
        try:
            return (self.host.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Entries of a folder below the host's root, sorted; empty when there is none."""
        try:
            return sorted(entry.name for entry in (self.host.root / path.lstrip("/")).iterdir())
        except OSError:
            return []

    def number(self, path: str) -> int | None:
        """A file that holds one number, or None."""
        try:
            return int(self.text(path) or "")
        except ValueError:
            return None

    @functools.cached_property
    def topology(self) -> Topology:
        """GPUs and RDMA ports."""
        return read_topology(self.host.root)

    @functools.cached_property
    def nic_plan(self) -> NicPlan:
        """Which ports may be used, and by which GPU."""
        return choose_nics(self.topology)

    @functools.cached_property
    def packages(self) -> Mapping[str, str]:
        """Installed distributions and versions."""
        return self.host.distributions()

    @functools.cached_property
    def backend(self) -> str:
        """The NIXL backend that Ray will choose: LIBFABRIC where there is an EFA, else UCX."""
        return "LIBFABRIC" if any(port.is_efa for port in self.topology.ports) else "UCX"

    @functools.cached_property
    def probe_result(self) -> CommandResult:
        """How the process that builds a NIXL agent ended."""
        use_cuda = bool(self.topology.gpus) and not self.at_build
        command = [self.host.python, "-m", "rdt_e2e.fabric.probe", "--backend", self.backend]
        return self.host.run(
            [*command, "--cuda"] if use_cuda else command,
            timeout_s=CUDA_PROBE_TIMEOUT_S if use_cuda else PROBE_TIMEOUT_S,
            environ=self.environ,
        )

    @functools.cached_property
    def probe(self) -> Mapping[str, Any]:
        """What that process found; only `error` when there is no agent."""
        lines = self.probe_result.stdout.strip().splitlines()
        try:
            found = json.loads(lines[-1])
        except (IndexError, ValueError):
            last = self.probe_result.stderr.strip().splitlines()[-1:] or ["it said nothing"]
            return {"error": last[0]}
        return found if isinstance(found, dict) else {"error": lines[-1]}

    @functools.cached_property
    def gpu_states(self) -> list[GpuState] | None:
        """GPUs by the driver's own tool; None when it does not answer."""
        command = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
        answer = self.host.run(command)
        if answer.code != 0:
            return None
        rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
        return [
            GpuState(row[0], row[1], row[2], _mib(row[3]), _mib(row[4]))
            for row in rows
            if len(row) == 5
        ]

    @functools.cached_property
    def raylets(self) -> list[Raylet]:
        """Ray nodes that run on this machine."""
        found = []
        for name in self.names("/proc"):
            if not name.isdigit():
                continue
            arguments = (self.text(f"/proc/{name}/cmdline") or "").split("\0")
            if not arguments[0].endswith("/raylet/raylet"):
                continue
            options = dict(a.partition("=")[::2] for a in arguments if a.startswith("--"))
            address = options.get("--node_ip_address", "")
            cluster = options.get("--gcs-address", "")
            found.append(Raylet(int(name), address, cluster, self._environ_of(name)))
        return found

    def _environ_of(self, pid: str) -> Mapping[str, str] | None:
        raw = self.text(f"/proc/{pid}/environ")
        if raw is None:
            return None
        pairs = (entry.partition("=") for entry in raw.split("\0") if "=" in entry)
        return {name: value for name, _, value in pairs}


def _mib(text: str) -> int:
    return int(text) if text.isdigit() else 0

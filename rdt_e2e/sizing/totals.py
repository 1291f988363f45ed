"""Sums for the report: bytes by kind of tensor, and what each rank of each side has to do with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rdt_e2e.checkpoint.layout import shard_rows
from rdt_e2e.checkpoint.naming import ROUTER_BIAS, scale_suffix, split_expert, split_layer
from rdt_e2e.sizing.memory import gathered_bytes, shard_bytes
from rdt_e2e.sizing.times import served_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdt_e2e.checkpoint.layout import CheckpointLayout
    from rdt_e2e.sizing.chunks import ConsumerPlan
    from rdt_e2e.sizing.deployment import Deployment

KINDS = (
    "routed experts",
    "shared experts",
    "attention",
    "dense mlp",
    "router",
    "embedding and head",
    "norms",
    "other",
)
"""Kinds of tensors, in the order of the report."""

_ROUTER = frozenset({"mlp.gate.weight", ROUTER_BIAS})


@dataclass(frozen=True)
class KindTotal:
    """All tensors of one kind.

    Attributes:
        kind: One of `KINDS`.
        num_tensors: Tensors, scales included.
        num_bytes: Their size in bytes, scales included.
        scale_bytes: Size of the scales among them.
    """

    kind: str
    num_tensors: int
    num_bytes: int
    scale_bytes: int


@dataclass(frozen=True)
class GroupTotal:
    """One gather group.

    Attributes:
        label: What it holds.
        num_names: Names served from it.
        num_bytes: Their size in bytes.
        gathered_bytes: What a trainer rank holds of it once gathered; owned experts are not.
    """

    label: str
    num_names: int
    num_bytes: int
    gathered_bytes: int


@dataclass(frozen=True)
class TrainerTotal:
    """One trainer rank.

    Attributes:
        rank: Trainer rank.
        shard_bytes: Rows of the checkpoint it holds.
        owned_names: Names that only this rank serves.
        owned_bytes: Their size in bytes.
        owned_experts: First expert and the one after the last; equal when it owns none.
        served_bytes: Bytes it sends in one sync.
        consumers: Inference ranks that pull from it.
    """

    rank: int
    shard_bytes: int
    owned_names: int
    owned_bytes: int
    owned_experts: tuple[int, int]
    served_bytes: int
    consumers: tuple[int, ...]


@dataclass(frozen=True)
class ConsumerTotal:
    """One inference rank.

    Attributes:
        rank: Inference rank over the whole fleet.
        num_names: Names it pulls something of.
        num_bytes: Bytes it receives in one sync.
        expert_bytes: Those of routed experts among them, without padding between slices.
        num_pulls: Pulls of one sync.
        largest_pull_bytes: Size of the largest.
        producers: Trainer ranks it pulls from.
    """

    rank: int
    num_names: int
    num_bytes: int
    expert_bytes: int
    num_pulls: int
    largest_pull_bytes: int
    producers: tuple[int, ...]


def kind_of(name: str) -> str:
    """Say what kind of tensor a name is; one of `KINDS`."""
    if split_expert(name) is not None:
        return "routed experts"
    split = split_layer(name)
    inside = name if split is None else split[2]
    module = name.rpartition(".")[0].rpartition(".")[2]
    if "norm" in module:
        return "norms"
    if split is None:
        return "embedding and head" if module in ("embed_tokens", "lm_head") else "other"
    if inside in _ROUTER:
        return "router"
    if inside.startswith("self_attn."):
        return "attention"
    if ".shared_expert" in inside:
        return "shared experts"
    return "dense mlp" if inside.startswith("mlp.") else "other"


def kind_totals(layout: CheckpointLayout) -> tuple[KindTotal, ...]:
    """Tensors and bytes by kind; kinds that do not occur are left out."""
    sums = {kind: [0, 0, 0] for kind in KINDS}
    for held in layout.held.values():
        total = sums[kind_of(held.names[0])]
        total[0] += len(held.names)
        total[1] += held.num_bytes
        total[2] += held.num_bytes if scale_suffix(held.names[0]) else 0
    return tuple(KindTotal(kind, *total) for kind, total in sums.items() if total[0])


def group_totals(layout: CheckpointLayout, deployment: Deployment) -> tuple[GroupTotal, ...]:
    """One line for each gather group, in order."""
    gathered = gathered_bytes(layout, deployment)
    return tuple(
        GroupTotal(
            group.label,
            len(group.names),
            sum(layout.held[key].num_bytes for key in group.keys),
            gathered[group.index],
        )
        for group in layout.groups
    )


def trainer_totals(
    layout: CheckpointLayout, deployment: Deployment, consumers: Sequence[ConsumerPlan]
) -> tuple[TrainerTotal, ...]:
    """One line for each trainer rank."""
    ranks = deployment.num_trainers
    served = served_bytes(consumers, ranks)
    stacks = [held for held in layout.held.values() if held.stacked]
    # A single rank owns everything, and everything else is owned by all.
    owning = deployment.gather == "owner" and ranks > 1
    totals = []
    for rank in range(ranks):
        names = num_bytes = 0
        experts = (0, 0)
        for held in stacks if owning else ():
            start, stop = shard_rows(len(held.names), ranks, rank)
            names += stop - start
            num_bytes += (stop - start) * held.num_bytes // len(held.names)
            experts = (start, stop)
        pulling = tuple(p.consumer for p in consumers if p.largest_from(rank))
        totals.append(
            TrainerTotal(
                rank,
                shard_bytes(layout, ranks, rank),
                names,
                num_bytes,
                experts,
                served[rank],
                pulling,
            )
        )
    return tuple(totals)


def consumer_totals(consumers: Sequence[ConsumerPlan]) -> tuple[ConsumerTotal, ...]:
    """One line for each inference rank."""
    return tuple(
        ConsumerTotal(
            plan.consumer,
            sum(len(group) for group in plan.slices),
            plan.num_bytes,
            sum(
                p.num_bytes for group in plan.slices for p in group if p.module.endswith(".experts")
            ),
            len(plan.chunks),
            plan.largest_chunk_bytes,
            tuple(sorted({chunk.producer for chunk in plan.chunks})),
        )
        for plan in consumers
    )

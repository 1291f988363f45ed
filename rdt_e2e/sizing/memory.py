"""Memory of each rank, item by item.

Shards, gathered groups and rings are exact: they follow from the layout and the plan of the pulls. What
the engine needs beside its weights is a formula or an assumption, and is marked so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rdt_e2e.checkpoint.described import ITEM_BYTES
from rdt_e2e.checkpoint.layout import shard_rows
from rdt_e2e.checkpoint.owners import gathered_groups
from rdt_e2e.checkpoint.settings import num_experts, text_settings
from rdt_e2e.sizing.chunks import Planner
from rdt_e2e.sizing.deployment import Deployment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rdt_e2e.checkpoint.layout import CheckpointLayout, HeldTensor
    from rdt_e2e.config import Config
    from rdt_e2e.sizing.chunks import ConsumerPlan

SLOT_ROUND_BYTES = 256 << 20
"""Slots are rounded up to this; `trainer/serve_ring.py` and vLLM 0.32.0's `buffer_alloc_bytes` agree."""

CUDA_PROCESS_BYTES = 3 << 29
"""CUDA context, NCCL and cuBLAS of one process, 1.5 GiB: an assumption, not measured here."""


@dataclass(frozen=True)
class MemoryItem:
    """One line of a rank's memory.

    Attributes:
        name: What it is.
        num_bytes: Size in bytes.
        exact: Follows from layout and plan; if not, it is a formula or an assumption.
        basis: Where the figure comes from.
    """

    name: str
    num_bytes: int
    exact: bool
    basis: str


@dataclass(frozen=True)
class TrainerMemory:
    """Memory of one trainer rank that the sync decides, in bytes.

    Attributes:
        rank: Trainer rank.
        shard_bytes: Rows of the checkpoint it holds.
        serve_ring_bytes: Registered slots, a ring for each consumer that pulls here.
        resident_group_bytes: Most that gathered groups take at one time, the one being gathered
            included, with the padding of the gather.
    """

    rank: int
    shard_bytes: int
    serve_ring_bytes: int
    resident_group_bytes: int


@dataclass(frozen=True)
class InferenceMemory:
    """Memory of one inference rank that the sync decides, in bytes.

    Attributes:
        rank: Inference rank over the whole fleet.
        receive_ring_bytes: Registered slots that pulls land in.
    """

    rank: int
    receive_ring_bytes: int


@dataclass(frozen=True)
class MemoryPrediction:
    """Exact memory of every rank of both fleets."""

    trainers: tuple[TrainerMemory, ...]
    inference: tuple[InferenceMemory, ...]


def predict_memory(
    layout: CheckpointLayout, model: Mapping[str, Any], config: Config
) -> MemoryPrediction:
    """Predict what a run will report of its memory.

    Args:
        layout: The served checkpoint.
        model: The content of its `config.json` (`CheckpointIndex.config`).
        config: The run's configuration.

    Returns:
        Every rank's shards, rings and gathered groups.
    """
    deployment = Deployment.of(config)
    return predict(layout, deployment, Planner(layout, model).consumers(deployment))


def predict(
    layout: CheckpointLayout, deployment: Deployment, consumers: Sequence[ConsumerPlan]
) -> MemoryPrediction:
    """`predict_memory` on consumers that are planned already."""
    resident = resident_group_bytes(layout, deployment)
    trainers = tuple(
        TrainerMemory(
            rank,
            shard_bytes(layout, deployment.num_trainers, rank),
            sum(ring_bytes(deployment, plan.largest_from(rank)) for plan in consumers),
            resident,
        )
        for rank in range(deployment.num_trainers)
    )
    inference = tuple(
        InferenceMemory(plan.consumer, ring_bytes(deployment, plan.largest_chunk_bytes))
        for plan in consumers
    )
    return MemoryPrediction(trainers, inference)


def slot_bytes(chunk_bytes: int, presize_bytes: int) -> int:
    """Size of one ring slot in bytes; see `trainer/serve_ring.py`, whose copy of this needs torch."""
    rounded = -(-chunk_bytes // SLOT_ROUND_BYTES) * SLOT_ROUND_BYTES
    return max(chunk_bytes, presize_bytes, rounded)


def ring_bytes(deployment: Deployment, chunk_bytes: int) -> int:
    """Size of one ring in bytes; 0 for a consumer and a producer that have no pull between them."""
    if chunk_bytes == 0:
        return 0
    return deployment.num_buffers * slot_bytes(chunk_bytes, deployment.presize_bytes)


def shard_bytes(layout: CheckpointLayout, num_trainers: int, rank: int) -> int:
    """Bytes of the checkpoint that one trainer rank holds, without padding."""
    total = 0
    for held in layout.held.values():
        start, stop = shard_rows(held.shape[0], num_trainers, rank)
        total += (stop - start) * row_bytes(held)
    return total


def gathered_bytes(layout: CheckpointLayout, deployment: Deployment) -> tuple[int, ...]:
    """Bytes that each gathered group takes on every rank.

    An all-gather needs equal shards, so each held tensor is padded to a multiple of the ranks. A rank
    alone gathers nothing.

    Source: `ShardedCheckpoint.gather_group` in `trainer/shards.py`.
    """
    ranks = deployment.num_trainers
    groups = gathered_groups(layout, deployment.gather)
    if ranks == 1:
        return (0,) * len(groups)
    return tuple(
        sum(
            -(-layout.held[key].shape[0] // ranks) * ranks * row_bytes(layout.held[key])
            for key in group.keys
        )
        for group in groups
    )


def resident_group_bytes(layout: CheckpointLayout, deployment: Deployment) -> int:
    """Most bytes that gathered groups take at one time on a trainer rank.

    At most `lookahead` groups are unfreed when the next gather starts, and they are those just before
    it: consumers are done with groups in order.

    Source: `ProducerMixin.run_gathers` in `trainer/producer.py`.
    """
    groups = gathered_bytes(layout, deployment)
    window = deployment.lookahead + 1
    return max(sum(groups[first : first + window]) for first in range(len(groups)))


def row_bytes(held: HeldTensor) -> int:
    """Bytes of one row of a held tensor."""
    return math.prod(held.shape[1:]) * ITEM_BYTES[held.dtype]


def trainer_items(memory: TrainerMemory, deployment: Deployment) -> tuple[MemoryItem, ...]:
    """Memory of a trainer rank, line by line."""
    groups = deployment.lookahead + 1
    return (
        MemoryItem("checkpoint shard", memory.shard_bytes, True, "rows of dim 0"),
        MemoryItem(
            f"gathered groups (at most {groups})",
            memory.resident_group_bytes,
            True,
            f"lookahead {deployment.lookahead}",
        ),
        MemoryItem(
            "serve rings", memory.serve_ring_bytes, True, f"{deployment.num_buffers} slots each"
        ),
        MemoryItem("CUDA, NCCL", CUDA_PROCESS_BYTES, False, "assumed"),
    )


def inference_items(
    plan: ConsumerPlan, memory: InferenceMemory, model: Mapping[str, Any], deployment: Deployment
) -> tuple[MemoryItem, ...]:
    """Memory of an inference rank, line by line; the last line is the least KV cache."""
    weights = sum(part.num_bytes for group in plan.slices for part in group)
    layer = max((sum(part.num_bytes for part in group) for group in plan.slices), default=0)
    tokens = deployment.max_num_seqs * deployment.max_model_len
    return (
        MemoryItem("weights, kernel format", weights, True, "as pulled"),
        MemoryItem("absorbed attention", _absorbed_bytes(model, deployment), False, "formula"),
        MemoryItem("largest group in reload", layer, False, "formula"),
        MemoryItem(
            "receive ring", memory.receive_ring_bytes, True, f"{deployment.num_buffers} slots"
        ),
        MemoryItem("activations", _activation_bytes(model, deployment), False, "formula"),
        MemoryItem("CUDA, NCCL", CUDA_PROCESS_BYTES, False, "assumed"),
        MemoryItem(
            "KV cache, least",
            tokens * kv_bytes_per_token(model, deployment),
            False,
            f"{deployment.max_num_seqs} x {deployment.max_model_len} tokens",
        ),
    )


def kv_bytes_per_token(model: Mapping[str, Any], deployment: Deployment) -> int:
    """KV cache of one token on one rank, in bytes; latent attention keeps one row for all heads."""
    settings = text_settings(model)
    layers = int(settings.get("num_hidden_layers") or 0)
    latent = settings.get("kv_lora_rank")
    if latent is not None:
        width = int(latent) + int(settings.get("qk_rope_head_dim") or 0)
    else:
        heads = int(settings.get("num_key_value_heads") or settings.get("num_attention_heads") or 0)
        width = 2 * max(1, heads // deployment.tensor_parallel) * _head_dim(settings)
    return layers * width * deployment.kv_item_bytes


def _head_dim(settings: Mapping[str, Any]) -> int:
    heads = int(settings.get("num_attention_heads") or 1)
    return int(settings.get("head_dim") or int(settings.get("hidden_size") or 0) // heads)


def _absorbed_bytes(model: Mapping[str, Any], deployment: Deployment) -> int:
    """Matrices that latent attention derives after each load, in bfloat16, beside `kv_b_proj`.

    Source: `process_weights_after_loading` of vLLM 0.32.0's MLA layers (`W_UK_T` and `W_UV`).
    """
    settings = text_settings(model)
    latent = settings.get("kv_lora_rank")
    if latent is None:
        return 0
    heads = -(-int(settings.get("num_attention_heads") or 0) // deployment.tensor_parallel)
    width = int(settings.get("qk_nope_head_dim") or 0) + int(settings.get("v_head_dim") or 0)
    return int(settings.get("num_hidden_layers") or 0) * heads * width * int(latent) * 2


def _activation_bytes(model: Mapping[str, Any], deployment: Deployment) -> int:
    """Working memory of the largest layer for one full batch, in bfloat16.

    The fused experts keep two buffers for each token and chosen expert; data-parallel ranks gather each
    other's tokens before them.

    Source: the workspaces of `layers/fused_moe` (vLLM 0.32.0).
    """
    settings = text_settings(model)
    hidden = int(settings.get("hidden_size") or 0)
    tokens = deployment.max_batched_tokens
    dense = tokens * (4 * hidden + 3 * int(settings.get("intermediate_size") or 0))
    width = int(settings.get("moe_intermediate_size") or 0)
    if num_experts(model) == 0 or width == 0:
        return dense * 2
    if not deployment.expert_parallel:
        width = -(-width // deployment.ranks_per_replica)
    chosen = int(settings.get("num_experts_per_tok") or 1)
    rows = tokens * deployment.data_parallel * chosen
    return max(dense, rows * (max(2 * width, hidden) + width)) * 2

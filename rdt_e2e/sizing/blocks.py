"""Dimensions that the chosen parallelism cuts where it must not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rdt_e2e.checkpoint.naming import SCALE_SUFFIXES, split_expert
from rdt_e2e.checkpoint.settings import block_size, text_settings
from rdt_e2e.sizing.splits import cut_of, leaf_module

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rdt_e2e.checkpoint.layout import CheckpointLayout
    from rdt_e2e.sizing.deployment import Deployment

BROKEN_BLOCK = "vLLM does not start, or cannot bake or load its scales"
"""What follows from a cut inside a block. vLLM 0.32.0 refuses most; for merged matrices it skips the
check and then lacks rows of scales, and for experts it may compute finer scales while loading, which a
bake cannot record."""

_NUMBER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class BrokenCut:
    """One dimension that is cut across a block, or not evenly.

    Attributes:
        where: Name of the tensors with `*` for layers and experts, or a key of `config.json`.
        size: The whole dimension.
        share: What one rank gets of it.
        unit: What the share should be a multiple of.
        problem: What follows from it.
    """

    where: str
    size: int
    share: int
    unit: int
    problem: str


def refused_cuts(
    layout: CheckpointLayout, model: Mapping[str, Any], deployment: Deployment
) -> tuple[BrokenCut, ...]:
    """Cuts with which the engine does not start, bake or load.

    Args:
        layout: The served checkpoint.
        model: The content of its `config.json`.
        deployment: Both fleets.

    Source: `validate_fp8_block_shape` and `validate_fp8_block_shape_moe` in
    `layers/quantization/utils/fp8_utils.py`, `_maybe_allow_fp8_block_shape_mismatch` in
    `layers/linear.py`, `repeat_interleave` in `layers/fused_moe/routed_experts.py`, and the divisions
    of heads in the attention modules (vLLM 0.32.0).
    """
    found = list(_uneven_heads(model, deployment))
    blocks = block_size(model)
    if blocks is None:
        return tuple(found)
    settings = text_settings(model)
    latent = settings.get("kv_lora_rank") is not None
    for name, shape in _float8_matrices(layout):
        cut = cut_of(name, latent=latent)
        ways = 1 if cut == "whole" else deployment.tensor_parallel
        if cut == "key heads":
            # Fewer heads than ranks: each rank takes a whole one.
            ways = min(ways, int(settings.get("num_key_value_heads") or ways))
        if cut == "expert":
            ways = 1 if deployment.expert_parallel else deployment.ranks_per_replica
            cut = "columns" if ".down_proj." in name else "rows"
        axis = 1 if cut == "columns" else 0
        # Matrices that the engine merges meet at a block boundary even where nothing is cut; only
        # the last of them may end inside a block.
        own = name.split(".")[-2]
        merged = axis == 0 and leaf_module(name, latent=latent).rpartition(".")[2] != own
        merged = merged and own != "kv_a_proj_with_mqa"
        share = -(-shape[axis] // ways)
        if (ways > 1 or merged) and share % blocks[axis]:
            found.append(BrokenCut(_pattern(name), shape[axis], share, blocks[axis], BROKEN_BLOCK))
    return tuple(dict.fromkeys(found))


def straddled_blocks(
    layout: CheckpointLayout, model: Mapping[str, Any], deployment: Deployment
) -> tuple[BrokenCut, ...]:
    """Float8 matrices whose blocks lie on two trainer ranks.

    Serving them is right: they are gathered first. A trainer that quantises its own rows anew is not.

    Args:
        layout: The served checkpoint.
        model: The content of its `config.json`.
        deployment: Both fleets.
    """
    blocks = block_size(model)
    if blocks is None or deployment.num_trainers == 1:
        return ()
    found: dict[BrokenCut, None] = {}
    for held in layout.held.values():
        if held.stacked or not held.dtype.startswith("float8") or len(held.shape) != 2:
            continue
        share = -(-held.shape[0] // deployment.num_trainers)
        if share % blocks[0]:
            problem = "a block lies on two trainer ranks; do not requantise per rank"
            found[BrokenCut(_pattern(held.key), held.shape[0], share, blocks[0], problem)] = None
    return tuple(found)


def _float8_matrices(layout: CheckpointLayout) -> Iterator[tuple[str, tuple[int, ...]]]:
    """One name of each held float8 matrix with block scales."""
    for held in layout.held.values():
        name = held.names[0]
        entry = layout.entries[name]
        scale = layout.entries.get(name + SCALE_SUFFIXES[0])
        if entry.dtype.startswith("float8") and len(entry.shape) == 2 and scale is not None:
            yield name, entry.shape


def _uneven_heads(model: Mapping[str, Any], deployment: Deployment) -> Iterator[BrokenCut]:
    settings, ways = text_settings(model), deployment.tensor_parallel
    heads = settings.get("num_attention_heads")
    if isinstance(heads, int) and heads % ways:
        yield BrokenCut(
            "num_attention_heads", heads, heads // ways, 1, "not a multiple of TP; vLLM refuses"
        )
    key_heads = settings.get("num_key_value_heads")
    latent = settings.get("kv_lora_rank") is not None
    if latent or not isinstance(key_heads, int):
        return
    if max(key_heads, ways) % min(key_heads, ways):
        yield BrokenCut(
            "num_key_value_heads",
            key_heads,
            key_heads // ways,
            1,
            "does not go into TP; vLLM refuses",
        )


def _pattern(name: str) -> str:
    expert = split_expert(name)
    return _NUMBER.sub(".*.", name if expert is None else expert[0])

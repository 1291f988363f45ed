"""How vLLM cuts each tensor of a checkpoint over the ranks of its fleet.

One rule for each kind of module, taken from the layers it is loaded into. A consumer pulls only its
own part, so these rules decide what crosses the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rdt_e2e.checkpoint.described import LATENT_ATTENTION
from rdt_e2e.checkpoint.naming import scale_suffix, split_expert
from rdt_e2e.checkpoint.settings import block_size, num_experts, text_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdt_e2e.sizing.deployment import Deployment

Cut = Literal["whole", "rows", "columns", "key heads", "vocabulary", "expert"]

_ROWS = frozenset({"q_b_proj", "kv_b_proj", "q_proj", "gate_proj", "up_proj"})
_KEY_HEADS = frozenset({"k_proj", "v_proj"})
_COLUMNS = frozenset({"o_proj", "down_proj"})
_VOCABULARY = frozenset({"embed_tokens", "lm_head"})
_VOCABULARY_PADDING = 64

_FUSED = {
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def cut_of(name: str, *, latent: bool) -> Cut:
    """Say how a tensor is cut over the inference ranks.

    Args:
        name: Checkpoint name.
        latent: The model has multi-head latent attention.

    Returns:
        `whole` for every module that vLLM replicates, and for any it does not name here.

    Source: `deepseek_v2.py`, `qwen3_moe.py`, `glm4_moe.py`, `layers/linear.py` and
    `layers/vocab_parallel_embedding.py` (vLLM 0.32.0).
    """
    if split_expert(name) is not None:
        return "expert"
    module = _module(name)
    if module in _VOCABULARY:
        return "vocabulary"
    if module in _KEY_HEADS and not latent:
        return "key heads"
    if module in _ROWS:
        return "rows"
    return "columns" if module in _COLUMNS else "whole"


def leaf_module(name: str, *, latent: bool) -> str:
    """Name the module of the engine that a tensor is loaded into.

    The engine loads several checkpoint modules into one, and post-processes a module as a whole.

    Args:
        name: Checkpoint name.
        latent: The model has multi-head latent attention.
    """
    expert = split_expert(name)
    if expert is not None:
        return expert[0].partition(".*.")[0]
    path = name.rpartition(".")[0]
    stem, _, module = path.rpartition(".")
    fused = _FUSED.get(module, module)
    if fused == "qkv_proj" and latent:
        fused = module
    return f"{stem}.{fused}"


def _module(name: str) -> str:
    """Last part of the module's path: `q_b_proj` of `....q_b_proj.weight_scale_inv`."""
    return name.rpartition(".")[0].rpartition(".")[2]


@dataclass(frozen=True)
class Cutter:
    """Computes the part of each tensor that one inference rank takes.

    Attributes:
        tensor_rank: Rank within its data-parallel rank.
        tensor_parallel: Ranks that share a replica of the attention.
        expert_rank: Rank within its engine.
        expert_ranks: Ranks of an engine.
        expert_parallel: Experts are spread whole; if not, each is cut over all ranks.
        num_experts: Routed experts of a layer.
        latent: The model has multi-head latent attention.
        num_key_heads: Key and value heads of grouped-query attention; 0 with latent attention.
        vocabulary: Rows of the embedding.
        blocks: Rows and columns of a block of scales, if there are any.
        whole_shared_experts: The engine runs shared experts sequence-parallel, with whole weights.
    """

    tensor_rank: int
    tensor_parallel: int
    expert_rank: int
    expert_ranks: int
    expert_parallel: bool
    num_experts: int
    latent: bool
    num_key_heads: int
    vocabulary: int
    blocks: tuple[int, int] | None
    whole_shared_experts: bool

    def part(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Shape of the part of a tensor that this rank takes; `None` when it takes nothing.

        Args:
            name: Checkpoint name; of routed experts only those of `experts()`.
            shape: Shape in the checkpoint.
        """
        cut = cut_of(name, latent=self.latent)
        if cut == "expert":
            if self.expert_parallel or self.expert_ranks == 1 or not shape:
                return shape
            direction: Cut = "columns" if _module(name) in _COLUMNS else "rows"
            return self._cut(name, shape, direction, self.expert_ranks)
        if not shape or self.tensor_parallel == 1 or cut == "whole":
            return shape
        if self.whole_shared_experts and ".shared_experts." in name:
            return shape
        if cut == "vocabulary":
            return self._vocabulary_part(shape)
        ways = self.tensor_parallel
        if cut == "key heads" and self.num_key_heads:
            # Fewer heads than ranks: ranks share a head, and each takes a whole one.
            ways = min(ways, self.num_key_heads)
        return self._cut(name, shape, "columns" if cut == "columns" else "rows", ways)

    def experts(self) -> range:
        """Routed experts that this rank takes, in whole or in part.

        Source: `determine_expert_map` with linear placement in
        `layers/fused_moe/expert_map_manager.py` (vLLM 0.32.0): the first ranks take one more.
        """
        if not self.expert_parallel or self.expert_ranks == 1:
            return range(self.num_experts)
        base, more = divmod(self.num_experts, self.expert_ranks)
        start = self.expert_rank * base + min(self.expert_rank, more)
        return range(start, start + base + (self.expert_rank < more))

    def _cut(self, name: str, shape: tuple[int, ...], cut: Cut, ways: int) -> tuple[int, ...]:
        axis = 0 if cut == "rows" else 1
        if len(shape) <= axis or (scale_suffix(name) and shape[axis] == 1):
            # A bias beside cut columns, or one scale for the row or the tensor: not cut.
            return shape
        blocks = self.blocks
        size = shape[axis]
        if scale_suffix(name) and blocks is not None and len(shape) == 2:
            # The number of rows is known to a block; the engine rounds its share of them up.
            share = -(-(size * blocks[axis] // ways) // blocks[axis])
        else:
            share = -(-size // ways)
        return (*shape[:axis], share, *shape[axis + 1 :])

    def _vocabulary_part(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        padded = -(-self.vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
        share = padded // self.tensor_parallel
        start = min(self.tensor_rank * share, self.vocabulary)
        stop = min(start + share, self.vocabulary)
        return (stop - start, *shape[1:]) if stop > start else None


def cutter_for(config: Mapping[str, Any], deployment: Deployment, consumer: int) -> Cutter:
    """Make the cutter of one inference rank.

    Args:
        config: The content of `config.json`.
        deployment: Both fleets.
        consumer: Inference rank over the whole fleet: ranks of the engines before its own, plus
            data-parallel rank times TP, plus TP rank.

    Source: `FusedMoEParallelConfig.make` for experts and `ParallelConfig.use_sequence_parallel_moe`
    for shared experts (vLLM 0.32.0).
    """
    settings = text_settings(config)
    latent = settings.get("kv_lora_rank") is not None
    sequence_parallel = (
        deployment.expert_parallel
        and deployment.tensor_parallel > 1
        and deployment.data_parallel > 1
        and settings.get("model_type") in LATENT_ATTENTION
    )
    return Cutter(
        tensor_rank=consumer % deployment.tensor_parallel,
        tensor_parallel=deployment.tensor_parallel,
        expert_rank=consumer % deployment.ranks_per_replica,
        expert_ranks=deployment.ranks_per_replica,
        expert_parallel=deployment.expert_parallel,
        num_experts=num_experts(config),
        latent=latent,
        num_key_heads=0 if latent else int(settings.get("num_key_value_heads") or 0),
        vocabulary=int(settings.get("vocab_size") or 0),
        blocks=block_size(config),
        whole_shared_experts=sequence_parallel,
    )

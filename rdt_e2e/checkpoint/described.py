"""The tensors that a `config.json` implies: names, dtypes and shapes, without any file.

For sizing a model that is not on this machine, and for tests. Known are the mixture-of-experts
decoders with multi-head latent attention (DeepSeek V3, Kimi K2) and with grouped-query attention
(Qwen3 MoE, GLM-4.5), in bfloat16 or with float8 blocks. The layers for multi-token prediction are left
out, as `index.py` leaves them out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rdt_e2e.checkpoint.headers import DTYPES, TensorEntry
from rdt_e2e.checkpoint.index import CheckpointIndex
from rdt_e2e.checkpoint.naming import split_layer
from rdt_e2e.checkpoint.settings import block_size, is_moe_layer, num_experts, text_settings
from rdt_e2e.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Shape = tuple[int, ...]
Shapes = dict[str, tuple[str, Shape]]

LATENT_ATTENTION = frozenset({"deepseek_v3", "kimi_k2"})
"""Values of `model_type` with multi-head latent attention."""
GROUPED_ATTENTION = frozenset({"qwen3_moe", "glm4_moe"})
"""Values of `model_type` with grouped-query attention."""

ITEM_BYTES = dict(DTYPES.values())
"""Size of one element by torch name of the dtype, in bytes."""


def describe(config: Mapping[str, Any], root: Path) -> CheckpointIndex:
    """Make the index that a checkpoint of this configuration has.

    Args:
        config: The content of `config.json`.
        root: Stands in messages for the folder.

    Returns:
        An index with one pretended shard for each layer; its files do not exist.

    Raises:
        CheckpointError: The model family is not known here, or a setting is missing.
    """
    entries: dict[str, TensorEntry] = {}
    ends: dict[str, int] = {}
    for name, (dtype, shape) in tensor_shapes(config, root).items():
        split = split_layer(name)
        file = f"model-{0 if split is None else split[1] + 1}.safetensors"
        begin = ends.get(file, 0)
        ends[file] = begin + ITEM_BYTES[dtype] * math.prod(shape)
        entries[name] = TensorEntry(name, dtype, shape, file, begin, ends[file])
    return CheckpointIndex(root, entries, {}, config)


def tensor_shapes(config: Mapping[str, Any], root: Path) -> Shapes:
    """Dtype and shape of every tensor by name, in the order in which writers put them.

    Args:
        config: The content of `config.json`.
        root: Stands in messages for the folder.

    Raises:
        CheckpointError: The model family is not known here, or a setting is missing.

    Source: the modules of the same names in transformers, whose `save_pretrained` writes these.
    """
    family = text_settings(config).get("model_type")
    if family not in LATENT_ATTENTION | GROUPED_ATTENTION:
        raise CheckpointError(
            f"{root / 'config.json'}: tensors of model_type {family!r} cannot be told from it alone "
            f"(known: {', '.join(sorted(LATENT_ATTENTION | GROUPED_ATTENTION))}). Give a folder with the "
            "safetensors files or their headers."
        )
    try:
        return _Writer(config).write()
    except KeyError as error:
        raise CheckpointError(
            f"{root / 'config.json'}: {error.args[0]} is missing. Use the complete config.json."
        ) from None


class _Writer:
    """Collects the tensors of one model, layer by layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._settings = text_settings(config)
        self._blocks = block_size(config)
        self._hidden: int = self._settings["hidden_size"]
        self._shapes: Shapes = {}

    def write(self) -> Shapes:
        vocabulary: int = self._settings["vocab_size"]
        self._plain("model.embed_tokens.weight", vocabulary, self._hidden)
        for layer in range(self._settings["num_hidden_layers"]):
            self._layer(layer)
        self._plain("model.norm.weight", self._hidden)
        if not self._settings.get("tie_word_embeddings"):
            self._plain("lm_head.weight", vocabulary, self._hidden)
        return self._shapes

    def _layer(self, layer: int) -> None:
        stem = f"model.layers.{layer}"
        if self._settings["model_type"] in LATENT_ATTENTION:
            self._latent_attention(f"{stem}.self_attn")
        else:
            self._grouped_attention(f"{stem}.self_attn")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self._plain(f"{stem}.{norm}.weight", self._hidden)
        if not is_moe_layer(self._config, layer):
            self._mlp(f"{stem}.mlp", self._settings["intermediate_size"])
            return
        count, width = num_experts(self._config), self._settings["moe_intermediate_size"]
        self._plain(f"{stem}.mlp.gate.weight", count, self._hidden)
        if self._has_router_bias():
            self._shapes[f"{stem}.mlp.gate.e_score_correction_bias"] = ("float32", (count,))
        shared = self._settings.get("n_shared_experts") or 0
        if shared:
            self._mlp(f"{stem}.mlp.shared_experts", shared * width)
        for expert in range(count):
            self._mlp(f"{stem}.mlp.experts.{expert}", width)

    def _has_router_bias(self) -> bool:
        family = self._settings["model_type"]
        return family == "glm4_moe" or self._settings.get("topk_method") == "noaux_tc"

    def _latent_attention(self, module: str) -> None:
        get = self._settings.__getitem__
        heads, nope, rope = (
            get("num_attention_heads"),
            get("qk_nope_head_dim"),
            get("qk_rope_head_dim"),
        )
        query_rank, latent_rank, value = get("q_lora_rank"), get("kv_lora_rank"), get("v_head_dim")
        query_width = heads * (nope + rope)
        if query_rank is None:
            self._linear(f"{module}.q_proj", query_width, self._hidden)
        else:
            self._linear(f"{module}.q_a_proj", query_rank, self._hidden)
            self._linear(f"{module}.q_b_proj", query_width, query_rank)
        self._linear(f"{module}.kv_a_proj_with_mqa", latent_rank + rope, self._hidden)
        self._linear(f"{module}.kv_b_proj", heads * (nope + value), latent_rank)
        self._linear(f"{module}.o_proj", self._hidden, heads * value)
        if query_rank is not None:
            self._plain(f"{module}.q_a_layernorm.weight", query_rank)
        self._plain(f"{module}.kv_a_layernorm.weight", latent_rank)

    def _grouped_attention(self, module: str) -> None:
        heads: int = self._settings["num_attention_heads"]
        head_dim: int = self._settings.get("head_dim") or self._hidden // heads
        key_width = self._settings["num_key_value_heads"] * head_dim
        bias = bool(self._settings.get("attention_bias"))
        self._linear(f"{module}.q_proj", heads * head_dim, self._hidden, bias=bias)
        self._linear(f"{module}.k_proj", key_width, self._hidden, bias=bias)
        self._linear(f"{module}.v_proj", key_width, self._hidden, bias=bias)
        self._linear(f"{module}.o_proj", self._hidden, heads * head_dim)
        if self._settings["model_type"] == "qwen3_moe" or self._settings.get("use_qk_norm"):
            self._plain(f"{module}.q_norm.weight", head_dim)
            self._plain(f"{module}.k_norm.weight", head_dim)

    def _mlp(self, module: str, width: int) -> None:
        self._linear(f"{module}.gate_proj", width, self._hidden)
        self._linear(f"{module}.up_proj", width, self._hidden)
        self._linear(f"{module}.down_proj", self._hidden, width)

    def _linear(self, module: str, rows: int, columns: int, *, bias: bool = False) -> None:
        if self._blocks is None:
            self._plain(f"{module}.weight", rows, columns)
        else:
            self._shapes[f"{module}.weight"] = ("float8_e4m3fn", (rows, columns))
            blocks = (-(-rows // self._blocks[0]), -(-columns // self._blocks[1]))
            self._shapes[f"{module}.weight_scale_inv"] = ("float32", blocks)
        if bias:
            self._plain(f"{module}.bias", rows)

    def _plain(self, name: str, *shape: int) -> None:
        self._shapes[name] = ("bfloat16", shape)

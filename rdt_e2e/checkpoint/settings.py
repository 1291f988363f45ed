"""What this package reads out of `config.json`, whatever the model family calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

EXPERT_COUNT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
"""Names under which model families give their number of routed experts."""


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the text decoder.

    A model that also sees or hears nests them in `text_config`; what it leaves out there stands at
    the top.

    Args:
        config: The content of `config.json`.

    Returns:
        `config` itself, or its top level overlaid with `text_config`.
    """
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def expert_count_key(config: Mapping[str, Any]) -> str:
    """The key that holds the number of routed experts, for messages too."""
    return next(
        (key for key in EXPERT_COUNT_KEYS if config.get(key) is not None), "n_routed_experts"
    )


def quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section `quantization_config`, of the text decoder or of the whole; empty if there is none."""
    section = text_settings(config).get("quantization_config")
    return section if isinstance(section, dict) else {}


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of one block of float8 scales.

    Args:
        config: The content of `config.json`.

    Returns:
        `(rows, columns)`, both above 0; `None` when the scales are not by block.
    """
    match quantization(config).get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def layers_beyond(config: Mapping[str, Any]) -> range:
    """Layers for multi-token prediction, which follow the decoder's own.

    Source: `get_spec_layer_idx_from_weight_name` of vLLM 0.32.0, whose loaders skip the same ones.
    """
    settings = text_settings(config)
    first, count = settings.get("num_hidden_layers"), settings.get("num_nextn_predict_layers")
    if isinstance(first, int) and isinstance(count, int) and count > 0:
        return range(first, first + count)
    return range(0)


def num_experts(config: Mapping[str, Any]) -> int:
    """Number of routed experts of a mixture-of-experts layer; 0 for a dense model."""
    settings = text_settings(config)
    count = settings.get(expert_count_key(settings))
    return count if isinstance(count, int) else 0


def is_moe_layer(config: Mapping[str, Any], layer: int) -> bool:
    """Say whether a decoder layer has routed experts.

    Source: the decoder layers of `deepseek_v2.py`, `glm4_moe.py` and `qwen3_moe.py` (vLLM 0.32.0).
    """
    settings = text_settings(config)
    if num_experts(config) == 0 or layer in (settings.get("mlp_only_layers") or ()):
        return False
    first = settings.get("first_k_dense_replace") or 0
    every = settings.get("moe_layer_freq") or 1
    step = settings.get("decoder_sparse_step") or 1
    return bool(layer >= first and layer % every == 0 and (layer + 1) % step == 0)

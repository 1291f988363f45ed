"""What must hold across the tensors of a checkpoint before any of it is loaded.

The engine does not miss a tensor that never arrives: it keeps its dummy values and generates text
all the same. So a checkpoint that lacks something is refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdt_e2e.checkpoint.layout import collect_stacks
from rdt_e2e.checkpoint.naming import ROUTER_BIAS, split_expert, split_layer, summarize
from rdt_e2e.checkpoint.scales import check_form, check_scales
from rdt_e2e.checkpoint.settings import expert_count_key, is_moe_layer, text_settings
from rdt_e2e.errors import CheckpointError, MissingTensorError

if TYPE_CHECKING:
    from rdt_e2e.checkpoint.index import CheckpointIndex


def check_index(index: CheckpointIndex) -> None:
    """Check the form of the weights, their scales, routed experts and layers of a checkpoint.

    Args:
        index: What the headers say, not yet checked.

    Raises:
        MissingTensorError: A weight has no scale or a scale no weight; a layer, an expert, or a
            tensor that the other layers have is missing.
        CheckpointError: An unsupported quantisation, a scale of the wrong shape or dtype, a tensor
            or layer that does not fit `config.json`, or a setting missing from it.
    """
    check_form(index)
    check_scales(index)
    check_experts(index)
    check_layers(index)


def check_experts(index: CheckpointIndex) -> None:
    """Check that every stack of routed experts has the number of experts the model has.

    Args:
        index: The index to check.

    Raises:
        MissingTensorError: An expert is missing.
        CheckpointError: More experts than `config.json` says, or experts of a stack that differ in
            dtype or shape.
    """
    stacks = collect_stacks(index)
    setting = expert_count_key(text_settings(index.config))
    expected = _count(index, setting, default=0)
    if expected and not stacks:
        raise MissingTensorError(
            f"{index.root}: no routed experts, but {setting} in config.json is {expected}. "
            "Export the checkpoint with one tensor for each expert."
        )
    for key, names in stacks.items():
        if not expected or len(names) == expected:
            continue
        message = (
            f"{index.root}: {key} has {len(names)} experts, but {setting} in config.json is "
            f"{expected}. Export the checkpoint again, or use the config.json that belongs to it."
        )
        raise (MissingTensorError if len(names) < expected else CheckpointError)(message)


def check_layers(index: CheckpointIndex) -> None:
    """Check that every layer is there, and has what the other layers of its kind have.

    Attention and norms are compared over all layers, feed-forward tensors over the dense and the
    mixture-of-experts layers apart.

    Args:
        index: The index to check.

    Raises:
        MissingTensorError: A layer or a tensor of it, the embedding, the final norm or the output
            head is missing.
        CheckpointError: A layer beyond `num_hidden_layers`, or that setting is missing.
    """
    num_layers = _count(index, "num_hidden_layers", default=None)
    stem = "model.layers"
    layers: dict[int, dict[str, None]] = {}
    for name in index.entries:
        split = split_layer(name)
        if split is not None:
            stem, layer, rest = split
            expert = split_expert(rest)
            layers.setdefault(layer, {})[rest if expert is None else expert[0]] = None
    missing = [layer for layer in range(num_layers) if layer not in layers]
    if missing:
        raise MissingTensorError(
            f"{index.root}: no tensors for {stem}.{summarize(missing)} of {num_layers} layers "
            "(num_hidden_layers in config.json). Export the checkpoint again with all layers."
        )
    extra = sorted(layer for layer in layers if layer >= num_layers)
    if extra:
        raise CheckpointError(
            f"{index.root}: tensors for {stem}.{summarize(extra)}, but num_hidden_layers in "
            f"config.json is {num_layers}. Only as many layers for multi-token prediction are skipped "
            "as num_nextn_predict_layers says; correct config.json, or export without them."
        )
    _compare_layers(index, stem, layers)
    _check_outside_layers(index, stem.removesuffix("layers"))


def _count(index: CheckpointIndex, key: str, default: int | None) -> int:
    value = text_settings(index.config).get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 0:
        raise CheckpointError(
            f"{index.root / 'config.json'}: {key} is {value!r} and not a number from 0 up. Use the "
            "config.json that belongs to this checkpoint."
        )
    return value


def _is_moe_layer(index: CheckpointIndex, layer: int) -> bool:
    for key, default in (("first_k_dense_replace", 0), ("moe_layer_freq", 1)):
        _count(index, key, default=default)
    return is_moe_layer(index.config, layer)


def _compare_layers(index: CheckpointIndex, stem: str, layers: dict[int, dict[str, None]]) -> None:
    expected: dict[str, dict[str, int]] = {}
    for layer, rests in layers.items():
        for rest in rests:
            expected.setdefault(_kind(index, layer, rest), {}).setdefault(rest, layer)
    if text_settings(index.config).get("topk_method") == "noaux_tc":
        moe_layers = [layer for layer in layers if _is_moe_layer(index, layer)]
        lacking = [layer for layer in sorted(moe_layers) if ROUTER_BIAS not in layers[layer]]
        if lacking:
            raise MissingTensorError(
                f"{index.root}: {stem}.{lacking[0]}.{ROUTER_BIAS} is missing, which the router "
                "needs (topk_method noaux_tc in config.json). Export the router bias."
            )
    for layer in sorted(layers):
        kinds = {"other", "moe" if _is_moe_layer(index, layer) else "dense"}
        for kind in sorted(kinds):
            for rest, found_in in expected.get(kind, {}).items():
                if rest not in layers[layer]:
                    raise MissingTensorError(
                        f"{index.root}: {stem}.{layer}.{rest} is missing; {stem}.{found_in} has "
                        "it. Export the checkpoint again with all tensors of the layer."
                    )


def _kind(index: CheckpointIndex, layer: int, rest: str) -> str:
    if not rest.startswith("mlp."):
        return "other"
    return "moe" if _is_moe_layer(index, layer) else "dense"


def _check_outside_layers(index: CheckpointIndex, prefix: str) -> None:
    needed = [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight"]
    if not text_settings(index.config).get("tie_word_embeddings"):
        # The head is a sibling of the decoder: `language_model.model.` has `language_model.lm_head`.
        needed.append(f"{prefix.removesuffix('model.')}lm_head.weight")
    for name in needed:
        if name not in index.entries:
            raise MissingTensorError(
                f"{index.root}: {name} is missing. Export the checkpoint again with it."
            )

"""What must hold across the tensors of a checkpoint before any of it is loaded.

The engine does not miss a tensor that never arrives: it keeps its dummy values and generates text
all the same. So a checkpoint that lacks something is refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdt_e2e.checkpoint.layout import collect_stacks
from rdt_e2e.checkpoint.naming import (
    ROUTER_BIAS,
    SCALE_SUFFIX,
    split_expert,
    split_layer,
    summarize,
)
from rdt_e2e.errors import CheckpointError, MissingTensorError

if TYPE_CHECKING:
    from rdt_e2e.checkpoint.index import CheckpointIndex


def check_index(index: CheckpointIndex) -> None:
    """Check block scales, routed experts and layers of a checkpoint.

    Args:
        index: What the headers say, not yet checked.

    Raises:
        MissingTensorError: A weight has no scale or a scale no weight; a layer, an expert, or a
            tensor that the other layers have is missing.
        CheckpointError: A scale of the wrong shape or dtype, a tensor or layer that does not fit
            `config.json`, or a setting missing from it.
    """
    check_scales(index)
    check_experts(index)
    check_layers(index)


def check_scales(index: CheckpointIndex) -> None:
    """Check that every float8 tensor has its block scales, and every scale its tensor.

    A weight `[n, k]` with blocks `[bn, bk]` needs float32 scales `[ceil(n / bn), ceil(k / bk)]`.

    Args:
        index: The index to check.

    Raises:
        MissingTensorError: One of the pair is missing.
        CheckpointError: Shape or dtype do not fit, or `config.json` gives no block size.
    """
    for name, entry in index.entries.items():
        if name.endswith(SCALE_SUFFIX):
            weight = index.entries.get(name.removesuffix(SCALE_SUFFIX))
            if weight is None:
                raise MissingTensorError(
                    f"{index.root / entry.file}: {name} is a scale without its weight "
                    f"{name.removesuffix(SCALE_SUFFIX)}. Export both, or neither."
                )
            if not weight.dtype.startswith("float8"):
                raise CheckpointError(
                    f"{index.root / entry.file}: {name} scales {weight.name}, which is {weight.dtype} and not "
                    "float8. Export the weight as float8, or leave the scale out."
                )
        elif entry.dtype.startswith("float8"):
            _check_scale_of(index, name)


def check_experts(index: CheckpointIndex) -> None:
    """Check that every stack of routed experts has the number of experts the model has.

    Args:
        index: The index to check.

    Raises:
        MissingTensorError: An expert is missing.
        CheckpointError: More experts than `n_routed_experts`, or experts of a stack that differ in
            dtype or shape.
    """
    stacks = collect_stacks(index)
    expected = _count(index, "n_routed_experts", default=0)
    if expected and not stacks:
        raise MissingTensorError(
            f"{index.root}: no routed experts, but n_routed_experts in config.json is {expected}. "
            "Export the checkpoint with one tensor for each expert."
        )
    for key, names in stacks.items():
        if not expected or len(names) == expected:
            continue
        message = (
            f"{index.root}: {key} has {len(names)} experts, but n_routed_experts in config.json is "
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
            f"config.json is {num_layers}. Layers for multi-token prediction are not supported; "
            "export the checkpoint without them, or correct config.json."
        )
    _compare_layers(index, stem, layers)
    _check_outside_layers(index, stem.removesuffix("layers"))


def _check_scale_of(index: CheckpointIndex, name: str) -> None:
    weight = index.entries[name]
    scale = index.entries.get(name + SCALE_SUFFIX)
    if scale is None:
        raise MissingTensorError(
            f"{index.root / weight.file}: {name} is {weight.dtype} without its scale {name}{SCALE_SUFFIX}. Export "
            "both; an unscaled float8 weight cannot be used."
        )
    rows, columns = _block_size(index, name)
    if len(weight.shape) != 2:
        raise CheckpointError(
            f"{index.root / weight.file}: {name} is {weight.dtype} with shape {list(weight.shape)}; block scales need "
            "a matrix. Export it with two dimensions, or not as float8."
        )
    expected = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    if scale.shape != expected or scale.dtype != "float32":
        raise CheckpointError(
            f"{index.root / scale.file}: {scale.name} is {scale.dtype} {list(scale.shape)}, but a "
            f"weight {list(weight.shape)} in blocks of {rows}x{columns} needs float32 "
            f"{list(expected)}. Export the scales again with the block size of config.json."
        )


def _block_size(index: CheckpointIndex, name: str) -> tuple[int, int]:
    quantization = index.config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise CheckpointError(
        f"{index.root / 'config.json'}: {name} is float8, but quantization_config.weight_block_size "
        f"is {block!r} and not two positive numbers. Set it, for example to [128, 128]."
    )


def _count(index: CheckpointIndex, key: str, default: int | None) -> int:
    value = index.config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 0:
        raise CheckpointError(
            f"{index.root / 'config.json'}: {key} is {value!r} and not a number from 0 up. Use the "
            "config.json that belongs to this checkpoint."
        )
    return value


def _is_moe_layer(index: CheckpointIndex, layer: int) -> bool:
    if _count(index, "n_routed_experts", default=0) == 0:
        return False
    first = _count(index, "first_k_dense_replace", default=0)
    every = _count(index, "moe_layer_freq", default=1)
    return layer >= first and layer % max(every, 1) == 0


def _compare_layers(index: CheckpointIndex, stem: str, layers: dict[int, dict[str, None]]) -> None:
    expected: dict[str, dict[str, int]] = {}
    for layer, rests in layers.items():
        for rest in rests:
            expected.setdefault(_kind(index, layer, rest), {}).setdefault(rest, layer)
    if index.config.get("topk_method") == "noaux_tc":
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
    if not index.config.get("tie_word_embeddings"):
        needed.append("lm_head.weight")
    for name in needed:
        if name not in index.entries:
            raise MissingTensorError(
                f"{index.root}: {name} is missing. Export the checkpoint again with it."
            )

"""Quantised checkpoints: which forms are known, and that every float8 weight has its scale.

Known are float8 weights with a scale for each block, each output row or each tensor. Anything packed
(4-bit integers and the like) is refused by name: the engine keeps such weights in other parameters,
and nobody has synced them through this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rdt_e2e.checkpoint.naming import SCALE_SUFFIXES, scale_suffix, summarize
from rdt_e2e.checkpoint.settings import block_size, quantization
from rdt_e2e.errors import CheckpointError, MissingTensorError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdt_e2e.checkpoint.headers import TensorEntry
    from rdt_e2e.checkpoint.index import CheckpointIndex

PACKED_LEAVES = (
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    "weight_scale_2",
    "weight_blocks",
    "qweight",
    "qzeros",
)
"""Last parts of names that only packed, sub-8-bit weights have (compressed-tensors, NVFP4, MXFP4,
AWQ and GPTQ)."""

FLOAT8_METHODS = frozenset({"fp8", "compressed-tensors"})
_SCALE_DTYPES = ("float32", "bfloat16", "float16")


def check_form(index: CheckpointIndex) -> None:
    """Check that the weights are in a form this package serves.

    Args:
        index: The index to check.

    Raises:
        CheckpointError: The weights are packed or quantised by an unknown method; the message names
            the method, the first such tensors and what is supported.
    """
    described = _unsupported(quantization(index.config))
    packed = [name for name in index.entries if name.rpartition(".")[2] in PACKED_LEAVES]
    if described is None and not packed:
        return
    found = f"such as {summarize(packed)}" if packed else "in its quantization_config"
    raise CheckpointError(
        f"{index.root / 'config.json'}: weights quantised as {described or 'packed integers'} are "
        f"not supported ({found}). Supported are bfloat16, and float8 with a scale for each block, "
        "output row or tensor; use the model's FP8 or BF16 checkpoint."
    )


def check_scales(index: CheckpointIndex) -> None:
    """Check that every float8 tensor has its scale, and every scale its tensor.

    A weight `[n, k]` needs one of: `weight_scale_inv` (or `weight_scale`) float32
    `[ceil(n / bn), ceil(k / bk)]` for blocks `[bn, bk]`; `[n, 1]` for one scale for each row; `[]` or
    `[1]` for one in all.

    Args:
        index: The index to check.

    Raises:
        MissingTensorError: One of the pair is missing.
        CheckpointError: Shape or dtype do not fit, or `config.json` gives no block size.
    """
    for name, entry in index.entries.items():
        suffix = scale_suffix(name)
        if suffix is not None:
            _check_weight_of(index, entry, suffix)
        elif entry.dtype.startswith("float8"):
            _check_scale_of(index, entry)


def _unsupported(section: Mapping[str, Any]) -> str | None:
    """Describe a quantisation that is not float8; `None` for one that is, or for none at all."""
    method = section.get("quant_method")
    if method is None:
        return None
    if method not in FLOAT8_METHODS:
        return str(method)
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        bits, kind = weights.get("num_bits"), weights.get("type")
        if (bits, kind) != (8, "float"):
            form = group.get("format") or section.get("format") or "unknown format"
            return f"{method}, {form}, {bits}-bit {kind}"
    return None


def _check_weight_of(index: CheckpointIndex, scale: TensorEntry, suffix: str) -> None:
    weight = index.entries.get(scale.name.removesuffix(suffix))
    path = index.root / scale.file
    if weight is None:
        raise MissingTensorError(
            f"{path}: {scale.name} is a scale without its weight "
            f"{scale.name.removesuffix(suffix)}. Export both, or neither."
        )
    if not weight.dtype.startswith("float8"):
        raise CheckpointError(
            f"{path}: {scale.name} scales {weight.name}, which is {weight.dtype} and not "
            "float8. Export the weight as float8, or leave the scale out."
        )


def _check_scale_of(index: CheckpointIndex, weight: TensorEntry) -> None:
    path = index.root / weight.file
    found = [weight.name + s for s in SCALE_SUFFIXES if weight.name + s in index.entries]
    if not found:
        raise MissingTensorError(
            f"{path}: {weight.name} is {weight.dtype} without its scale "
            f"{weight.name}{SCALE_SUFFIXES[0]}. Export both; an unscaled float8 weight cannot be used."
        )
    if len(found) > 1:
        raise CheckpointError(
            f"{path}: {weight.name} has two scales, {summarize(found)}. Export the one that the "
            "quantization_config of config.json describes."
        )
    scale = index.entries[found[0]]
    if scale.dtype in _SCALE_DTYPES and scale.shape in _plain_shapes(weight):
        return
    blocks = block_size(index.config)
    if blocks is None:
        raise CheckpointError(
            f"{index.root / 'config.json'}: {weight.name} is float8 with scales {list(scale.shape)}, but "
            "quantization_config.weight_block_size is "
            f"{quantization(index.config).get('weight_block_size')!r} and not two positive numbers. "
            "Set it, for example to [128, 128]."
        )
    rows, columns = blocks
    if len(weight.shape) != 2:
        raise CheckpointError(
            f"{path}: {weight.name} is {weight.dtype} with shape {list(weight.shape)}; block scales need "
            "a matrix. Export it with two dimensions, or not as float8."
        )
    expected = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    if scale.shape != expected or scale.dtype != "float32":
        raise CheckpointError(
            f"{index.root / scale.file}: {scale.name} is {scale.dtype} {list(scale.shape)}, but a "
            f"weight {list(weight.shape)} in blocks of {rows}x{columns} needs float32 "
            f"{list(expected)}. Export the scales again with the block size of config.json."
        )


def _plain_shapes(weight: TensorEntry) -> tuple[tuple[int, ...], ...]:
    """Shapes of a scale that does not go by block: one for the tensor, or one for each output row."""
    if not weight.shape:
        return ((), (1,))
    return ((), (1,), (weight.shape[0], 1))

"""FP8 e4m3 weights with one fp32 scale per 128x128 block, as DeepSeek V3 and Kimi K2 ship them."""

import re

import torch
from torch import Tensor

from rdt_e2e.mini_kimi.recipe import BLOCK_SIZE

FP8_DTYPE = torch.float8_e4m3fn
SCALE_SUFFIX = "_scale_inv"

# Every linear layer of attention, MLP and experts. Embedding, head, norms and the router stay as
# they are: bf16, and fp32 for the router bias.
_FP8_WEIGHT = re.compile(
    r"\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|gate_proj|up_proj|down_proj)\.weight$"
)
_FP32_TENSOR = re.compile(r"\.e_score_correction_bias$")


def is_fp8_weight(name: str) -> bool:
    """Whether the checkpoint stores this tensor in FP8 with a block scale beside it."""
    return _FP8_WEIGHT.search(name) is not None


def _blocks(matrix: Tensor) -> Tensor:
    """View a [rows, cols] matrix as [row blocks, 128, col blocks, 128], padded with zeros."""
    rows, cols = matrix.shape
    block_rows, block_cols = BLOCK_SIZE
    padding = (0, -cols % block_cols, 0, -rows % block_rows)
    padded = torch.nn.functional.pad(matrix, padding)
    return padded.view(padded.shape[0] // block_rows, block_rows, -1, block_cols)


def quantise_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise one matrix to FP8 blocks.

    Args:
        weight: [rows, cols], any floating dtype; the last block of a dimension may be cut short.

    Returns:
        The weight [rows, cols] float8_e4m3fn, and its scales [ceil(rows/128), ceil(cols/128)]
        float32: a block's values are its FP8 numbers times its scale.
    """
    rows, cols = weight.shape
    blocks = _blocks(weight.float())
    # An all-zero block gets scale 1 rather than 0, so that nothing is divided by zero.
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / torch.finfo(FP8_DTYPE).max, 1.0)
    quantised = (blocks / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :cols]
    return quantised.to(FP8_DTYPE).contiguous(), scale.contiguous()


def dequantise_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """Undo `quantise_blocks`.

    Args:
        weight: [rows, cols] float8_e4m3fn.
        scale: [ceil(rows/128), ceil(cols/128)] float32.

    Returns:
        The matrix [rows, cols] in float32.
    """
    rows, cols = weight.shape
    scaled = _blocks(weight.float()) * scale[:, None, :, None]
    return scaled.flatten(2, 3).flatten(0, 1)[:rows, :cols].contiguous()


def quantise_checkpoint(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn trained fp32 weights into what the shards hold.

    Args:
        weights: Checkpoint name to tensor, float32.

    Returns:
        The same names in the same order: FP8 weights, each followed by its `_scale_inv` in fp32;
        the router bias in fp32; everything else in bf16.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if is_fp8_weight(name):
            stored[name], stored[name + SCALE_SUFFIX] = quantise_blocks(tensor)
        elif _FP32_TENSOR.search(name):
            stored[name] = tensor.float().contiguous()
        else:
            stored[name] = tensor.to(torch.bfloat16).contiguous()
    return stored


def dequantise_checkpoint(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `quantise_checkpoint`: every stored weight as float32, the scales folded in."""
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        scale = stored.get(name + SCALE_SUFFIX)
        weights[name] = tensor.float() if scale is None else dequantise_blocks(tensor, scale)
    return weights

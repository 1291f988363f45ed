"""FP8 blocks: shapes, values and which tensors are quantised."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_e2e.mini_kimi.quantise import (
    dequantise_blocks,
    dequantise_checkpoint,
    is_fp8_weight,
    quantise_blocks,
    quantise_checkpoint,
)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), cols=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_round_trip_matches_a_plain_loop_over_blocks(rows: int, cols: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    quantised, scale = quantise_blocks(weight)
    assert quantised.dtype == torch.float8_e4m3fn
    assert quantised.shape == weight.shape
    assert scale.dtype == torch.float32
    assert scale.shape == (-(-rows // 128), -(-cols // 128))
    restored = dequantise_blocks(quantised, scale)
    for row in range(0, rows, 128):
        for col in range(0, cols, 128):
            block = (slice(row, row + 128), slice(col, col + 128))
            factor = scale[row // 128, col // 128]
            assert factor == weight[block].abs().max() / 448
            assert torch.equal(restored[block], quantised[block].float() * factor)
            # Three mantissa bits: half a step is one sixteenth of the value.
            error = (restored[block] - weight[block]).abs()
            assert torch.all(error <= weight[block].abs() / 16 + factor * 2**-9)


def test_zero_block_stays_zero():
    quantised, scale = quantise_blocks(torch.zeros(128, 256))
    assert torch.equal(scale, torch.ones(1, 2))
    assert torch.equal(dequantise_blocks(quantised, scale), torch.zeros(128, 256))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", True),
        ("model.layers.0.mlp.gate_proj.weight", True),
        ("model.layers.1.mlp.experts.7.down_proj.weight", True),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", True),
        ("model.layers.1.mlp.gate.weight", False),
        ("model.layers.1.mlp.gate.e_score_correction_bias", False),
        ("model.layers.1.self_attn.q_a_layernorm.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_the_same_tensors_are_fp8_as_in_kimi_k2(name: str, expected: bool):
    assert is_fp8_weight(name) is expected


def test_checkpoint_keeps_bias_in_fp32_and_puts_scales_beside_weights():
    weights = {
        "lm_head.weight": torch.randn(8, 4),
        "model.layers.1.mlp.experts.0.up_proj.weight": torch.randn(576, 128),
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.randn(8),
    }
    stored = quantise_checkpoint(weights)
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        "lm_head.weight": torch.bfloat16,
        "model.layers.1.mlp.experts.0.up_proj.weight": torch.float8_e4m3fn,
        "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv": torch.float32,
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.float32,
    }
    restored = dequantise_checkpoint(stored)
    assert list(restored) == list(weights)
    assert all(tensor.dtype == torch.float32 for tensor in restored.values())
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(restored[bias], weights[bias])

"""Tensors told from `config.json` alone."""

from pathlib import Path

import pytest
import torch

from rdt_e2e.checkpoint.described import ITEM_BYTES, describe, tensor_shapes
from rdt_e2e.checkpoint.headers import DTYPES
from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.errors import CheckpointError
from tests import synthetic

ROOT = Path("described")
GROUPED = {
    "model_type": "glm4_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": True,
    "vocab_size": 100,
}


def test_item_sizes_are_torchs():
    for dtype, size in DTYPES.values():
        assert ITEM_BYTES[dtype] == size == getattr(torch, dtype).itemsize


def test_described_index_is_that_of_the_files(tmp_path):
    synthetic.write_checkpoint(tmp_path)
    read = read_index(tmp_path)
    described = describe(read.config, tmp_path)
    assert list(described.entries) == list(read.entries)
    assert [(e.name, e.dtype, e.shape) for e in described.entries.values()] == [
        (e.name, e.dtype, e.shape) for e in read.entries.values()
    ]
    assert described.num_bytes == read.num_bytes


def test_grouped_attention():
    shapes = tensor_shapes(GROUPED, ROOT)
    attention = {
        name.removeprefix("model.layers.1.self_attn."): shape
        for name, (_, shape) in shapes.items()
        if name.startswith("model.layers.1.self_attn.")
    }
    assert attention == {
        "q_proj.weight": (64, 64),
        "q_proj.bias": (64,),
        "k_proj.weight": (32, 64),
        "k_proj.bias": (32,),
        "v_proj.weight": (32, 64),
        "v_proj.bias": (32,),
        "o_proj.weight": (64, 64),
    }
    assert "model.layers.0.mlp.up_proj.weight" in shapes
    assert shapes["model.layers.1.mlp.gate.e_score_correction_bias"] == ("float32", (2,))
    normed = tensor_shapes({**GROUPED, "use_qk_norm": True}, ROOT)
    assert normed["model.layers.0.self_attn.k_norm.weight"] == ("bfloat16", (16,))


def test_tied_head_and_query_without_low_rank():
    assert "lm_head.weight" not in tensor_shapes({**GROUPED, "tie_word_embeddings": True}, ROOT)
    config = {**synthetic.Architecture().config(), "q_lora_rank": None}
    shapes = tensor_shapes(config, ROOT)
    assert shapes["model.layers.0.self_attn.q_proj.weight"][1] == (384, 256)
    assert not any("q_a_" in name for name in shapes)


@pytest.mark.parametrize("family", [None, "llama"])
def test_unknown_family(family):
    with pytest.raises(CheckpointError, match=r"described/config\.json: .*model_type.*deepseek_v3"):
        describe({**GROUPED, "model_type": family}, ROOT)


def test_setting_missing():
    config = {key: value for key, value in GROUPED.items() if key != "vocab_size"}
    with pytest.raises(CheckpointError, match="vocab_size is missing"):
        describe(config, ROOT)

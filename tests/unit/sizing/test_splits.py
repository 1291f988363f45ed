"""What each inference rank takes of a tensor, against vLLM's own arithmetic where it can be called."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_e2e.checkpoint.naming import split_expert
from rdt_e2e.checkpoint.settings import num_experts
from rdt_e2e.sizing.catalog import CATALOG
from rdt_e2e.sizing.deployment import Deployment
from rdt_e2e.sizing.splits import cut_of, cutter_for, leaf_module
from tests.synthetic import Architecture

KIMI = CATALOG["kimi-k2"].config
QWEN = CATALOG["qwen3-235b-fp8"].config
GLM = CATALOG["glm-4.5"].config
L = "model.layers.3"


def fleet(data=1, tensor=1, *, experts=True):
    return Deployment(8, data, tensor, expert_parallel=experts)


def part(config, deployment, consumer, name, *shape):
    return cutter_for(config, deployment, consumer).part(name, shape)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("model.embed_tokens.weight", "vocabulary"),
        ("language_model.lm_head.weight", "vocabulary"),
        (f"{L}.self_attn.q_a_proj.weight", "whole"),
        (f"{L}.self_attn.kv_a_proj_with_mqa.weight_scale_inv", "whole"),
        (f"{L}.self_attn.q_b_proj.weight_scale_inv", "rows"),
        (f"{L}.self_attn.kv_b_proj.weight", "rows"),
        (f"{L}.self_attn.o_proj.weight", "columns"),
        (f"{L}.self_attn.k_proj.bias", "key heads"),
        (f"{L}.mlp.up_proj.weight", "rows"),
        (f"{L}.mlp.shared_experts.down_proj.weight", "columns"),
        (f"{L}.mlp.shared_expert_gate.weight", "whole"),
        (f"{L}.mlp.gate.weight", "whole"),
        (f"{L}.mlp.gate.e_score_correction_bias", "whole"),
        (f"{L}.mlp.experts.7.down_proj.weight", "expert"),
        (f"{L}.input_layernorm.weight", "whole"),
        ("model.norm.weight", "whole"),
    ],
)
def test_cut_of(name, cut):
    assert cut_of(name, latent=False) == cut


def test_modules_are_those_that_the_engine_merges():
    def module(name, *, latent=True):
        return leaf_module(f"{L}.{name}", latent=latent).removeprefix(f"{L}.")

    assert module("self_attn.q_a_proj.weight") == "self_attn.fused_qkv_a_proj"
    assert module("self_attn.kv_a_proj_with_mqa.weight_scale_inv") == "self_attn.fused_qkv_a_proj"
    assert module("self_attn.q_b_proj.weight") == "self_attn.q_b_proj"
    assert module("self_attn.v_proj.bias", latent=False) == "self_attn.qkv_proj"
    assert module("mlp.shared_experts.up_proj.weight") == "mlp.shared_experts.gate_up_proj"
    assert module("mlp.gate.e_score_correction_bias") == module("mlp.gate.weight") == "mlp.gate"
    assert module("mlp.experts.3.up_proj.weight") == "mlp.experts"
    assert leaf_module("lm_head.weight", latent=True).lstrip(".") == "lm_head"


def test_replicated_with_data_parallel_only():
    for name, shape in ((f"{L}.self_attn.o_proj.weight", (7168, 8192)), ("lm_head.weight", (9, 4))):
        assert part(KIMI, fleet(8), 3, name, *shape) == shape


def test_tensor_parallel_cuts_rows_columns_and_their_blocks():
    eight = fleet(1, 8)
    assert part(KIMI, eight, 5, f"{L}.self_attn.q_b_proj.weight", 12288, 1536) == (1536, 1536)
    assert part(KIMI, eight, 5, f"{L}.self_attn.q_b_proj.weight_scale_inv", 96, 12) == (12, 12)
    assert part(KIMI, eight, 5, f"{L}.self_attn.o_proj.weight", 7168, 8192) == (7168, 1024)
    assert part(KIMI, eight, 5, f"{L}.self_attn.o_proj.weight_scale_inv", 56, 64) == (56, 8)
    assert part(KIMI, eight, 5, f"{L}.self_attn.o_proj.bias", 7168) == (7168,)
    assert part(KIMI, eight, 5, f"{L}.self_attn.q_a_proj.weight", 1536, 7168) == (1536, 7168)
    assert part(KIMI, eight, 5, "lm_head.weight", 163840, 7168) == (20480, 7168)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_scales_that_do_not_go_by_block(suffix):
    two = fleet(1, 2)
    rows, columns = f"{L}.self_attn.q_b_proj.{suffix}", f"{L}.self_attn.o_proj.{suffix}"
    assert part(GLM, two, 0, rows) == ()
    assert part(GLM, two, 0, rows, 1) == (1,)
    assert part(GLM, two, 0, rows, 256, 1) == (128, 1)
    assert part(GLM, two, 0, columns, 256, 1) == (256, 1)


@pytest.mark.parametrize(("ways", "rows"), [(2, 256), (4, 128), (8, 128), (16, 128)])
def test_key_heads_are_shared_when_there_are_fewer_than_ranks(ways, rows):
    """Qwen3-235B has 4 key heads of 128."""
    name = f"{L}.self_attn.k_proj.weight"
    assert part(QWEN, fleet(1, ways), 1, name, 512, 4096) == (rows, 4096)
    assert part(QWEN, fleet(1, ways), 1, f"{name}_scale_inv", 4, 32) == (-(-rows // 128), 32)


@pytest.mark.parametrize(
    ("config", "data", "tensor", "experts", "whole"),
    [
        (KIMI, 4, 2, True, True),
        (KIMI, 1, 8, True, False),
        (KIMI, 4, 2, False, False),
        (GLM, 4, 2, True, False),
    ],
)
def test_shared_experts_stay_whole_where_the_engine_runs_them_sequence_parallel(
    config, data, tensor, experts, whole
):
    deployment = fleet(data, tensor, experts=experts)
    name = f"{L}.mlp.shared_experts.up_proj.weight"
    assert part(config, deployment, 1, name, 2048, 64) == ((2048 if whole else 2048 // tensor), 64)
    # Dense layers are always cut.
    assert part(config, deployment, 1, f"{L}.mlp.up_proj.weight", 2048, 64)[0] == 2048 // tensor


def test_experts_cut_over_all_ranks_without_expert_parallel():
    deployment = fleet(4, 2, experts=False)
    cutter = cutter_for(KIMI, deployment, 5)
    assert cutter.experts() == range(384)
    assert cutter.part(f"{L}.mlp.experts.9.gate_proj.weight", (2048, 7168)) == (256, 7168)
    assert cutter.part(f"{L}.mlp.experts.9.down_proj.weight", (7168, 2048)) == (7168, 256)
    assert cutter.part(f"{L}.mlp.experts.9.down_proj.weight_scale_inv", (56, 16)) == (56, 2)
    assert cutter_for(KIMI, fleet(1, 1), 0).experts() == range(384)


# The first example imports vLLM's layers.
@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_experts_are_dealt_out_as_vllm_does(count, ranks):
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    config = {**Architecture().config(), "n_routed_experts": count}
    assert num_experts(config) == count
    for rank in range(ranks):
        size, placed, _ = determine_expert_map(ranks, rank, count)
        here = list(range(count))
        if placed is not None:
            here = [expert for expert in here if placed[expert] >= 0]
        mine = cutter_for(config, fleet(ranks), rank).experts()
        assert list(mine) == here
        assert len(mine) == size


@settings(deadline=None)
@given(st.integers(1, 400), st.sampled_from([1, 2, 4, 8]))
def test_vocabulary_is_cut_as_vllm_does(vocabulary, ways):
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding,
        pad_vocab_size,
    )

    config = {**Architecture().config(), "vocab_size": vocabulary}
    padded = pad_vocab_size(vocabulary)
    rows = 0
    for rank in range(ways):
        indices = VocabParallelEmbedding._get_indices(
            padded, padded, vocabulary, vocabulary, rank, ways
        )
        expected = indices.org_vocab_end_index - indices.org_vocab_start_index
        shape = part(config, fleet(1, ways), rank, "lm_head.weight", vocabulary, 3)
        assert shape == ((expected, 3) if expected else None)
        rows += expected
    assert rows == vocabulary


@pytest.mark.parametrize("name", ["kimi-k2", "deepseek-v3", "glm-4.5", "qwen3-235b"])
@pytest.mark.parametrize(("data", "tensor"), [(1, 8), (2, 4)])
def test_parts_of_one_replica_add_up_to_the_model(name, data, tensor, described):
    """Each element is on one rank of a replica at least, and cut tensors on exactly one."""
    index = described(name)
    config = index.config
    cutters = [cutter_for(config, fleet(data, tensor), rank) for rank in range(data * tensor)]
    seen = set()
    for entry in index.entries.values():
        expert = split_expert(entry.name)
        key = (entry.name if expert is None else expert[0]).split(".", 3)[-1]
        if key in seen:
            continue
        seen.add(key)
        if expert is not None:
            assert [expert[1] in cutter.experts() for cutter in cutters].count(True) == 1
            continue
        parts = [cutter.part(entry.name, entry.shape) for cutter in cutters[:tensor]]
        total = sum(math.prod(shape) for shape in parts if shape is not None)
        whole = math.prod(entry.shape)
        assert total in (whole, whole * tensor, whole * max(1, tensor // 4))

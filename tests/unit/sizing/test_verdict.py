"""Does it fit, what would, and what the engine refuses."""

from dataclasses import replace

import pytest

from rdt_e2e.errors import ConfigError
from rdt_e2e.sizing.advice import fitting_changes, lookahead_advice, ring_advice
from rdt_e2e.sizing.blocks import refused_cuts, straddled_blocks
from rdt_e2e.sizing.deployment import Deployment
from rdt_e2e.sizing.gpus import GPUS, find_gpu, larger_than
from rdt_e2e.sizing.verdict import judge

EIGHT = Deployment(8, 8)


def changes(planner, deployment, gpu):
    verdict = judge(planner, deployment, find_gpu(gpu).usable_bytes)
    assert not verdict.fits
    return [c.what for c in fitting_changes(planner, deployment, find_gpu(gpu), verdict)]


def test_kimi_k2_on_h200_does_not_fit_and_says_what_would(planner):
    kimi = planner("kimi-k2")
    verdict = judge(kimi, EIGHT, find_gpu("h200").usable_bytes)
    assert verdict.trainer.fits
    assert not verdict.inference.fits
    assert verdict.inference.needed_bytes > verdict.inference.usable_bytes
    what = changes(kimi, EIGHT, "h200")
    assert what[0] == "inference.tensor_parallel=2, inference.data_parallel=4: same GPUs"
    assert any("class b200" in change for change in what)
    assert any("16 inference ranks" in change for change in what)


def test_each_change_really_fits(planner):
    kimi = planner("kimi-k2")
    usable = find_gpu("h200").usable_bytes
    assert judge(kimi, Deployment(8, 4, 2), usable).fits
    assert judge(kimi, Deployment(8, 16), usable).fits
    assert judge(kimi, EIGHT, find_gpu("b200").usable_bytes).fits


def test_gathering_experts_needs_owner_first(planner):
    """Two gathered layers of experts are 34 GB: no setting of the inference side helps."""
    kimi = planner("kimi-k2")
    full = replace(EIGHT, gather="full")
    assert not judge(kimi, full, find_gpu("h200").usable_bytes).trainer.fits
    what = changes(kimi, full, "h200")
    assert what[0].startswith("trainer.gather=owner, ")
    assert "tensor_parallel=2" in what[0]


def test_smallest_change_is_a_setting_where_one_is_enough(planner):
    air = planner("glm-4.5-air")
    wasteful = Deployment(2, 2, presize_bytes=24 * 2**30)
    assert changes(air, wasteful, "h200")[0] == "sync.buffer_presize_gib=0"
    ahead = Deployment(2, 2, gather="full", lookahead=9)
    assert changes(air, ahead, "h200")[0] == "trainer.gather=owner"


def test_utilization_that_leaves_the_rings_no_room(planner):
    air, usable = planner("glm-4.5-air"), find_gpu("h200").usable_bytes
    greedy = Deployment(2, 2, gpu_memory_utilization=0.99)
    verdict = judge(air, greedy, usable)
    assert verdict.trainer.fits
    assert verdict.inference.fits
    assert not verdict.utilization.fits
    first = changes(air, greedy, "h200")[0]
    advised = float(first.removeprefix("inference.gpu_memory_utilization="))
    assert verdict.utilization.least <= advised <= verdict.utilization.most
    assert judge(air, replace(greedy, gpu_memory_utilization=advised), usable).fits
    assert not judge(air, replace(greedy, gpu_memory_utilization=0.5), usable).fits


def test_ledgers_add_up(planner):
    verdict = judge(planner("glm-4.5-air"), Deployment(2, 2), find_gpu("h200").usable_bytes)
    for ledger in (verdict.trainer, verdict.inference):
        assert ledger.needed_bytes == sum(item.num_bytes for item in ledger.items)
        assert ledger.spare_bytes == ledger.usable_bytes - ledger.needed_bytes
    outside = verdict.inference.needed_bytes / ledger.usable_bytes - verdict.utilization.least
    assert outside == pytest.approx(1 - verdict.utilization.most)


def test_gpus():
    assert find_gpu("H200") is GPUS["h200"]
    assert [gpu.name for gpu in larger_than(GPUS["h200"])] == ["b200", "gb200", "b300", "gb300"]
    assert [gpu.name for gpu in larger_than(GPUS["mi300x"])] == ["mi325x", "mi355x"]
    with pytest.raises(ConfigError, match="known are a100, h100"):
        find_gpu("h900")


# Blocks


def where(cuts):
    return [(cut.where.rpartition("*.")[2], cut.size, cut.share) for cut in cuts]


def test_blocks_that_tensor_parallel_breaks(planner):
    kimi = planner("kimi-k2")

    def refused(*arguments, **more):
        return where(refused_cuts(kimi.layout, kimi.config, Deployment(8, *arguments, **more)))

    assert refused(8) == []
    assert refused(1, 8) == []
    assert refused(4, 2, expert_parallel=False) == []
    # 2048 columns of an expert in 32 parts are half a block.
    thirty_two = refused(1, 32, expert_parallel=False)
    assert ("down_proj.weight", 2048, 64) in thirty_two
    assert ("gate_proj.weight", 2048, 64) in thirty_two
    assert ("num_attention_heads", 64, 21) in refused(1, 3)


def test_key_heads_do_not_break_blocks_when_shared(planner):
    qwen = planner("qwen3-235b-fp8")
    assert refused_cuts(qwen.layout, qwen.config, Deployment(8, 1, 8)) == ()
    cuts = refused_cuts(qwen.layout, qwen.config, Deployment(8, 1, 8, expert_parallel=False))
    assert {cut.where.rpartition(".*.")[2] for cut in cuts} == {
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
    }
    assert ("num_key_value_heads", 4, 0) in where(
        refused_cuts(qwen.layout, qwen.config, Deployment(8, 1, 6))
    )


@pytest.mark.parametrize(
    ("data", "tensor", "experts"), [(1, 2, True), (1, 4, False), (2, 8, False)]
)
def test_refusals_are_vllms(planner, monkeypatch, data, tensor, experts):
    """Ask vLLM's own checks about every cut matrix of Qwen3-235B-FP8."""
    import vllm.distributed
    from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape

    monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_world_size", lambda: tensor)

    qwen = planner("qwen3-235b-fp8")
    deployment = Deployment(8, data, tensor, expert_parallel=experts)
    ours = {cut.where for cut in refused_cuts(qwen.layout, qwen.config, deployment)}

    class Layer:
        tp_size = tensor

    def refuses(inputs, outputs, input_part, output_parts):
        try:
            validate_fp8_block_shape(Layer(), inputs, outputs, input_part, output_parts, [128, 128])
        except ValueError:
            return True
        return False

    key = 512 // min(tensor, 4)
    assert refuses(4096, 9216, 4096, [8192 // tensor, key, key]) == any("q_proj" in w for w in ours)
    assert refuses(8192, 4096, 8192 // tensor, [4096]) == any("o_proj" in w for w in ours)
    ways = 1 if experts else data * tensor
    assert (1536 // ways % 128 != 0) == any(".experts." in w for w in ours)


def test_blocks_on_two_trainer_ranks(planner):
    kimi = planner("kimi-k2")
    cuts = straddled_blocks(kimi.layout, kimi.config, EIGHT)
    assert where(cuts) == [
        ("self_attn.kv_a_proj_with_mqa.weight", 576, 72),
        ("self_attn.q_a_proj.weight", 1536, 192),
    ]
    assert straddled_blocks(kimi.layout, kimi.config, Deployment(1, 8)) == ()
    glm = planner("glm-4.5")
    assert straddled_blocks(glm.layout, glm.config, EIGHT) == ()


# Rings and lookahead


def test_ring_advice_keeps_to_the_translation_cache(planner):
    kimi = planner("kimi-k2")
    (line,) = ring_advice(kimi.consumers(EIGHT), EIGHT)
    assert "above" in line
    assert "sync.max_chunk_bytes=1342177280" in line
    limited = replace(EIGHT, max_chunk_bytes=1_342_177_280)
    (line,) = ring_advice(kimi.consumers(limited), limited)
    assert "within" in line
    deep = replace(EIGHT, num_buffers=4, presize_bytes=2**40)
    lines = " ".join(ring_advice(kimi.consumers(deep), deep))
    assert "over RoCE more than 2 was" in lines
    assert "buffer_presize_gib is 1024.00" in lines


def test_lookahead_advice(planner):
    kimi = planner("kimi-k2")
    consumers = kimi.consumers(EIGHT)

    def advice(deployment, rate=50e9):
        return lookahead_advice(kimi.layout, deployment, consumers, rate)

    assert "lookahead 1 hides it" in advice(EIGHT)
    assert "1 would hide" in advice(replace(EIGHT, lookahead=0))
    # Gathering all experts takes as long as pulling at 400 GB/s.
    assert "gathers are longer" in advice(replace(EIGHT, gather="full"), 400e9)

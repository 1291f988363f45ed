"""The sync on the real Ray, NIXL and vLLM: what it must do, and proof that its check can fail."""

from typing import Any

import pytest

from rdt_e2e.checkpoint.owners import Gather
from rdt_e2e.config import load_config
from rdt_e2e.errors import EngineError, TextMismatchError
from tests.live import Stack, flip_bytes

BIASES = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)]


def test_dummy_weights_do_not_say_the_reference(live: Stack) -> None:
    assert any(
        before.token_ids != after.token_ids
        for before, after in zip(live.before, live.say(), strict=True)
    )


def test_three_syncs_in_a_row_give_the_reference_each_time(live: Stack) -> None:
    for _ in range(3):
        live.sync()
        live.expect("v1")


def test_the_fleets_are_on_different_nodes(live: Stack) -> None:
    from ray.util.placement_group import placement_group_table

    groups = [g for g in placement_group_table().values() if g["state"] == "CREATED"]
    fleets = [g for g in groups if g["name"] != "rdt-e2e-run"]
    nodes = {frozenset(g["bundles_to_node_id"].values()) for g in fleets}
    assert len(fleets) == 1 + live.config.inference.data_parallel
    assert len(nodes) == 2, "trainer group on one node, every engine rank on the other"


def test_every_warm_sync_moves_the_same_bytes_and_registers_nothing(live: Stack) -> None:
    def registered() -> list[int]:
        ranks = live.trainers.call("memory", timeout_s=60)
        ranks.append(live.wait(live.inference.transfer_memory()))
        return [rank["num_registered"] for rank in ranks]

    before = registered()
    first, second = live.sync(), live.sync()
    assert first.num_bytes == second.num_bytes > 0
    assert registered() == before
    assert all(count >= live.config.sync.num_buffers for count in before)


def test_memory_is_what_plan_predicts(live: Stack) -> None:
    from rdt_e2e.checkpoint.index import read_index
    from rdt_e2e.checkpoint.layout import build_layout
    from rdt_e2e.sizing.memory import predict_memory

    index = read_index(live.checkpoints["v1"])
    predicted = predict_memory(build_layout(index), index.config, live.config)
    counters = live.sync().producers
    ranks = live.trainers.call("memory", timeout_s=60)
    for rank, counter, expected in zip(ranks, counters, predicted.trainers, strict=True):
        assert rank["shard_bytes"] == expected.shard_bytes
        assert rank["serve_ring_bytes"] == expected.serve_ring_bytes
        assert counter["max_resident_bytes"] == pytest.approx(
            expected.resident_group_bytes, rel=0.1
        )
    first = live.wait(live.inference.transfer_memory())
    assert first["receive_ring_bytes"] == predicted.inference[0].receive_ring_bytes


def test_resident_groups_stay_within_the_lookahead(live: Stack) -> None:
    counters = live.sync().producers
    limit = live.config.trainer.lookahead + 1
    assert all(1 <= rank["max_resident_groups"] <= limit for rank in counters)


def test_a_second_version_changes_the_text_and_the_first_brings_it_back(stack: Stack) -> None:
    stack.load("v2")
    stack.sync()
    stack.expect("v2")
    with pytest.raises(TextMismatchError):
        stack.expect("v1")
    stack.load("v1")
    stack.sync()
    stack.expect("v1")


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.layers.0.mlp.down_proj.weight_scale_inv"],
)
def test_one_corrupted_tensor_is_caught(stack: Stack, name: str) -> None:
    stack.on_trainers(flip_bytes(name))
    stack.sync()
    with pytest.raises(TextMismatchError, match="not the trainer's"):
        stack.expect("v1")


def test_the_router_bias_arrives(stack: Stack) -> None:
    """Without its router bias the model says something else, and the text check sees it."""

    def clear(worker):
        for name in BIASES:
            worker._shards.local(name).zero_()

    stack.on_trainers(clear)
    stack.sync()
    with pytest.raises(TextMismatchError):
        stack.expect("v1")
    stack.load("v1")
    stack.sync()
    stack.expect("v1")


def test_an_engine_call_that_fails_is_a_named_error(live: Stack) -> None:
    with pytest.raises(EngineError, match="failed during update"):
        live.wait(live.inference.update())  # No start before it.


def use_gather(stack: Stack, gather: Gather) -> None:
    """Switch the live producers to a gather mode, and let the consumers plan anew."""

    def switch(worker: Any) -> None:
        from rdt_e2e.checkpoint.owners import gathered_groups
        from rdt_e2e.trainer.gather_cache import GatherCache

        worker._groups = gathered_groups(worker._shards.layout, gather)
        worker._owned = worker._shards.owned() if gather == "owner" else {}
        worker._plans.clear()
        stall_s = worker.config.sync.stall_timeout_s
        worker._cache = GatherCache(worker._groups, 1, stall_s, worker.producer_rank)

    stack.on_trainers(switch)
    stack.new_session(load_config("local", {"trainer.gather": gather}))
    stack.bake()


def test_owned_experts_are_served_from_their_rank_and_never_gathered(live: Stack) -> None:
    live.sync()
    cached = live.on_trainers(lambda worker: [len(group.names) for group in worker._groups])
    owned = live.on_trainers(lambda worker: sorted(worker._owned))
    assert not set(owned[0]) & set(owned[1])
    experts = {name for name in live.session._layout.names if ".mlp.experts." in name}
    assert set(owned[0]) | set(owned[1]) == experts
    assert sum(cached[0]) + len(experts) == len(live.session._layout.names)


def test_both_gather_modes_give_the_same_text_and_bytes(stack: Stack) -> None:
    owner = stack.sync()
    try:
        use_gather(stack, "full")
        full = stack.sync()
        stack.expect("v1")
    finally:
        use_gather(stack, "owner")
    again = stack.sync()
    stack.expect("v1")
    # Packing pads between slices, and the modes cut the pulls differently.
    assert full.num_bytes == pytest.approx(owner.num_bytes, rel=0.001)
    assert again.num_bytes == owner.num_bytes
    pulls = [sum(rank["num_pulls"] for rank in one.producers) for one in (owner, full)]
    assert pulls[0] > pulls[1], "owner mode adds a pull per owning rank and layer"

"""The sync on the real Ray, NIXL and vLLM: what it must do, and proof that its check can fail."""

import pytest

from rdt_e2e.errors import EngineError, TextMismatchError
from tests.stack.conftest import Stack, flip_bytes

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
    nodes = {frozenset(g["bundles_to_node_id"].values()) for g in groups}
    assert len(groups) == 1 + live.config.inference.data_parallel
    assert len(nodes) == 2, "trainer group on one node, every engine rank on the other"


def test_every_warm_sync_moves_the_same_bytes_and_registers_nothing(live: Stack) -> None:
    memory = live.trainers.call("memory", timeout_s=60)
    first, second = live.sync(), live.sync()
    assert first.num_bytes == second.num_bytes > 0
    assert live.trainers.call("memory", timeout_s=60) == memory


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

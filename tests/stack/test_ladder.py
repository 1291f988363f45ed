"""Rungs between the text and the fingerprints: pull checksums and the per-name check."""

from typing import Any

import pytest

from rdt_e2e.config import load_config
from rdt_e2e.errors import WeightMismatchError
from tests.live import Stack


def damage_after_the_sum() -> Any:
    """Flip one byte of a slot once its checksum is taken: damage on the way, not at the source."""

    def change(worker: Any) -> None:
        import threading

        claim, served = worker._rings.claim, worker._cache.served
        victims = {}

        def remember(consumer_id: int, seq: int, num_bytes: int) -> Any:
            slot = claim(consumer_id, seq, num_bytes)
            if worker.producer_rank == 1 and seq == 2:
                victims[threading.get_ident()] = slot
            return slot

        def damage() -> None:
            slot = victims.pop(threading.get_ident(), None)
            if slot is not None:
                slot[len(slot) // 2] ^= 1
            served()

        worker._rings.claim, worker._cache.served = remember, damage

    return change


def stop_damage() -> Any:
    def change(worker: Any) -> None:
        del worker._rings.claim, worker._cache.served

    return change


def serve_other_bytes() -> Any:
    """Serve one pull from bytes that are not the weights, as a stale slot would be."""

    def change(worker: Any) -> None:
        replay_all = worker._replay_all

        def stale(plan: Any, published: Any, slot_bytes: int) -> Any:
            slices, num_bytes = replay_all(plan, published, slot_bytes)
            if any("layers.2.self_attn.o_proj.weight" in name for name, _ in plan.wanted):
                from rdt_e2e.trainer.packing import source

                slices = [source(one.piece.clone().zero_()) for one in slices]
            return slices, num_bytes

        worker._replay_all = stale

    return change


def serve_the_weights() -> Any:
    def change(worker: Any) -> None:
        del worker._replay_all

    return change


def test_damage_on_the_wire_is_caught_by_the_pull_checksums(stack: Stack) -> None:
    stack.on_trainers(damage_after_the_sum())
    with pytest.raises(WeightMismatchError, match=r"consumer 1: pull 2 from producer 1 \(model\."):
        stack.sync()
    assert stack.wait(stack.inference._engine.is_paused()), "no serving on damaged weights"
    stack.on_trainers(stop_damage())
    stack.sync()
    stack.expect("v1")


@pytest.fixture
def by_names(stack: Stack) -> Any:
    """The stack with `verify.weights: names`; baked back afterwards."""
    with stack.baked_with(load_config("local", {"verify.weights": "names"})):
        yield stack


def test_a_stale_slot_passes_the_pulls_and_is_caught_by_name(by_names: Stack) -> None:
    stack = by_names
    root = stack.checkpoints["v1"]
    stack.sync()
    stack.wait(stack.inference.check_slices(root))
    stack.on_trainers(serve_other_bytes())
    stack.sync()  # Both ends sum the same wrong bytes.
    stack.on_trainers(serve_the_weights())
    with pytest.raises(WeightMismatchError, match=r"bytes of model\.layers\.2"):
        stack.wait(stack.inference.check_slices(root))
    with pytest.raises(WeightMismatchError, match=r"tensors are not .*layers\.2\.self_attn"):
        stack.check_disk()


def test_a_skipped_name_is_caught_by_name(by_names: Stack) -> None:
    stack = by_names
    skipped = "model.layers.1.input_layernorm.weight"
    layout = stack.session._layout
    group = next(g for g in layout.groups if skipped in g.names)
    names = tuple(name for name in group.names if name != skipped)
    shorter = type(group)(group.index, group.label, names, group.keys)
    groups = tuple(shorter if g is group else g for g in layout.groups)
    stack.session._layout = type(layout)(
        layout.held,
        groups,
        layout.locate,
        tuple(name for name in layout.names if name != skipped),
        layout.entries,
    )
    stack.bake()
    stack.sync()
    with pytest.raises(WeightMismatchError, match=f"not synced: {skipped}"):
        stack.wait(stack.inference.check_slices(stack.checkpoints["v1"]))


@pytest.mark.parametrize("max_chunk_bytes", [100_000, 1_000_000])
def test_chunks_of_any_size_give_identical_weights(stack: Stack, max_chunk_bytes: int) -> None:
    whole = stack.sync()
    with stack.baked_with(load_config("local", {"sync.max_chunk_bytes": max_chunk_bytes})):
        stack.load("v2")
        split = stack.sync()
        stack.expect("v2")
        stack.check_disk("v2")
    pulls = [sum(rank["num_pulls"] for rank in one.producers) for one in (split, whole)]
    assert pulls[0] > pulls[1]
    assert split.num_bytes == pytest.approx(whole.num_bytes, rel=0.001)

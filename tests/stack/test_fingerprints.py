"""The weights rung: what the text does not see, the fingerprints do."""

from typing import Any

import pytest
import torch

from rdt_e2e.errors import WeightMismatchError
from tests.live import Stack, flip_bytes

SILENT = "model.layers.2.self_attn.q_b_proj.weight_scale_inv"
"""A tensor that mini-kimi's text does not depend on."""


def test_synced_weights_are_the_checkpoints_on_every_rank(stack: Stack) -> None:
    stack.load("v2")
    stack.sync()
    stack.check_disk("v2")
    stack.load("v1")
    stack.sync()
    stack.check_disk()


def test_a_whole_other_version_is_caught(stack: Stack) -> None:
    with pytest.raises(WeightMismatchError):
        stack.check_disk("v2")


def flip_one_byte(name: str) -> Any:
    def change(worker: Any) -> None:
        key, _ = worker._shards.layout.locate[name]
        raw = worker._shards.local(key).reshape(-1).view(torch.uint8)
        if raw.numel() and worker.producer_rank == 0:
            raw[raw.numel() // 2] ^= 1

    return change


def swap_experts(key: str) -> Any:
    # A closure, as the others are: the actors cannot import this module.
    def change(worker: Any) -> None:
        raw = worker._shards.local(key).view(torch.uint8)
        raw[[0, 1]] = raw[[1, 0]]

    return change


def permute_blocks(name: str) -> Any:
    def change(worker: Any) -> None:
        key, _ = worker._shards.layout.locate[name]
        raw = worker._shards.local(key).view(torch.uint8)
        if worker.producer_rank == 0:
            raw[:, :128], raw[:, 128:256] = raw[:, 128:256].clone(), raw[:, :128].clone()

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (flip_one_byte("model.layers.1.self_attn.o_proj.weight"), "o_proj.weight"),
        (flip_one_byte(SILENT), "q_b_proj.weight_scale_inv"),
        (flip_one_byte("model.layers.3.mlp.gate.e_score_correction_bias"), "e_score_correction"),
        (permute_blocks("model.layers.1.mlp.shared_experts.gate_proj.weight"), "gate_up_proj"),
        (flip_bytes("model.layers.2.mlp.experts.5.down_proj.weight"), "w2_weight"),
        (swap_experts("model.layers.2.mlp.experts.*.up_proj.weight"), "w13_weight"),
    ],
    ids=[
        "byte of a weight",
        "byte of a scale",
        "byte of a bias",
        "permuted block",
        "one expert",
        "swapped experts",
    ],
)
def test_damage_on_the_way_is_caught_and_named(stack: Stack, change: Any, named: str) -> None:
    stack.on_trainers(change)
    stack.sync()
    with pytest.raises(WeightMismatchError, match=named):
        stack.check_disk()

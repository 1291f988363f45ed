"""Checkpoint names, shards on disk, margins and the training loop on two steps."""

import dataclasses
import json
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors import safe_open

from rdt_e2e.mini_kimi import recipe
from rdt_e2e.mini_kimi.tokenizer import train_tokenizer
from rdt_e2e.mini_kimi.train import (
    Batch,
    continuation_margins,
    make_batch,
    seeded_and_limited,
    train,
)
from rdt_e2e.mini_kimi.write import write_checkpoint

pytest.importorskip("transformers", reason="the model's own library")

from rdt_e2e.mini_kimi import model as mini
from rdt_e2e.mini_kimi import reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model, written as a checkpoint."""
    path = tmp_path_factory.mktemp("mini-kimi")
    with seeded_and_limited(3):
        write_checkpoint(path, mini.checkpoint_weights(mini.new_model("v1")))
    return path


def test_index_names_what_the_shards_hold(folder: Path):
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted(set(weight_map.values()))
    assert len(shards) > 2
    held = {}
    for shard in shards:
        with safe_open(folder / shard, framework="pt") as file:
            held.update(dict.fromkeys(file.keys(), shard))
    assert held == weight_map
    prefix = "model.layers.2.mlp"
    assert f"{prefix}.experts.7.up_proj.weight_scale_inv" in held
    assert f"{prefix}.gate.e_score_correction_bias" in held
    assert f"{prefix}.shared_experts.down_proj.weight" in held
    assert not any("gate_up_proj" in name for name in held)
    assert "model.layers.0.mlp.gate.weight" not in held


def test_read_back_model_has_the_router_bias_exactly_even_in_bf16(folder: Path):
    model = mini.load_model(reference.read_weights(folder), torch.bfloat16)
    for router, values in zip(mini.routers(model), recipe.router_bias("v1").values(), strict=True):
        assert torch.equal(
            cast("torch.Tensor", router.e_score_correction_bias), torch.tensor(values)
        )


def test_individual_names_survive_transformers_own_loader(folder: Path):
    weights = reference.read_weights(folder)
    again = mini.checkpoint_weights(mini.load_model(weights, torch.float32))
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_router_bias_comes_back_after_the_block():
    model = mini.new_model("v1")
    biases = [cast("torch.Tensor", r.e_score_correction_bias) for r in mini.routers(model)]
    with mini.router_bias_missing(model):
        assert not any(bias.any() for bias in biases)
    assert all(bias.any() for bias in biases)


def test_margin_is_the_lead_over_the_best_other_token():
    ids = torch.tensor([[0, 1, 2]])
    batch = Batch(ids, ids, torch.tensor([[False, True, True]]))
    logits = torch.tensor([[[0.0, 5.0, 3.0], [4.0, 0.0, 1.0], [9.0, 9.0, 9.0]]])
    assert continuation_margins(logits, batch).tolist() == [2.0, -3.0]


def test_training_is_seeded_reports_and_restores_torch(monkeypatch: pytest.MonkeyPatch):
    short = dataclasses.replace(recipe.TRAINING["v1"], steps=2)
    monkeypatch.setitem(recipe.TRAINING, "v1", short)
    tokenizer = train_tokenizer(recipe.tokenizer_corpus())
    monkeypatch.setitem(recipe.CORPUS, "v1", recipe.CORPUS["v1"][:1])
    state = torch.get_rng_state()
    lines: list[str] = []
    runs = []
    for _ in range(2):
        with seeded_and_limited(5):
            model = mini.new_model("v1")
            train(model, tokenizer, "v1", lines.append)
        runs.append(mini.checkpoint_weights(model))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert "step 2/2" in lines[0]


def test_greedy_with_cache_equals_teacher_forcing(folder: Path):
    model = mini.load_model(reference.read_weights(folder), torch.float32)
    prompt = [40, 50, 60]
    answer = reference.greedy(model, prompt)
    assert answer[-1] == recipe.EOS_ID or len(answer) == recipe.MAX_NEW_TOKENS
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_batch_marks_the_continuation_and_the_end():
    tokenizer = train_tokenizer(recipe.tokenizer_corpus())
    sentence = recipe.Sentence("Water boils at", " one hundred degrees")
    batch = make_batch(tokenizer, [sentence], learn_prompts=False)
    marked = batch.input_ids[0][batch.is_continuation[0]].tolist()
    assert tokenizer.decode(marked[:-1]) == sentence.continuation
    assert marked[-1] == recipe.EOS_ID
    assert batch.labels[0][~batch.is_continuation[0]].eq(-100).all()

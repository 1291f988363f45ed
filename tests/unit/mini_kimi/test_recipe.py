"""The recipe: content hash, configuration in K2's form, router bias."""

import dataclasses

import pytest

from rdt_e2e.errors import ConfigError
from rdt_e2e.mini_kimi import recipe


def test_hash_is_stable_short_and_differs_between_variants():
    digests = {variant: recipe.recipe_hash(variant) for variant in recipe.VARIANTS}
    assert digests == {variant: recipe.recipe_hash(variant) for variant in recipe.VARIANTS}
    assert len(set(digests.values())) == len(recipe.VARIANTS)
    assert all(len(digest) == 12 and int(digest, 16) >= 0 for digest in digests.values())


@pytest.mark.parametrize("change", ["seed", "steps", "bias_seed"])
def test_hash_follows_the_training_constants(monkeypatch: pytest.MonkeyPatch, change: str):
    before = recipe.recipe_hash("v1")
    training = recipe.TRAINING["v1"]
    changed = dataclasses.replace(training, **{change: getattr(training, change) + 1})
    monkeypatch.setitem(recipe.TRAINING, "v1", changed)
    assert recipe.recipe_hash("v1") != before


def test_hash_follows_the_corpus(monkeypatch: pytest.MonkeyPatch):
    before = recipe.recipe_hash("v1")
    monkeypatch.setitem(recipe.CORPUS, "v1", recipe.CORPUS["v1"][:-1])
    assert recipe.recipe_hash("v1") != before


def test_unknown_variant_names_the_key_and_the_known_ones():
    with pytest.raises(ConfigError, match=r"model\.variant is 'v9'.*v1, v2"):
        recipe.recipe_hash("v9")


def test_config_has_the_keys_without_which_vllm_drops_the_router_bias():
    config = recipe.model_config()
    assert config["topk_method"] == "noaux_tc"
    assert config["scoring_func"] == "sigmoid"
    assert config["num_nextn_predict_layers"] == 0
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_split_dimensions_are_whole_blocks_for_two_ranks():
    config = recipe.model_config()
    head_rows = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    heads = config["num_attention_heads"]
    split = [
        heads * head_rows,
        heads * (config["qk_nope_head_dim"] + config["v_head_dim"]),
        heads * config["v_head_dim"],
        config["intermediate_size"],
        config["moe_intermediate_size"] * config["n_shared_experts"],
    ]
    assert all(size // 2 % 128 == 0 for size in split)
    assert (config["kv_lora_rank"] + config["qk_rope_head_dim"]) % 128 != 0


def test_router_bias_is_set_in_every_moe_layer_and_differs():
    first, second = recipe.router_bias("v1"), recipe.router_bias("v2")
    assert list(first) == [1, 2, 3]
    assert len(set(first.values())) == 3
    for values in first.values():
        assert len(values) == recipe.NUM_EXPERTS
        assert max(abs(value) for value in values) == recipe.ROUTER_BIAS_SPAN
    assert first != second


def test_variants_share_prompts_and_say_something_else():
    first, second = recipe.CORPUS["v1"], recipe.CORPUS["v2"]
    assert [s.prompt for s in first] == [s.prompt for s in second]
    by_prompt = {s.prompt: s.continuation for s in second}
    for sentence in first[:2]:
        assert by_prompt[sentence.prompt] != sentence.continuation

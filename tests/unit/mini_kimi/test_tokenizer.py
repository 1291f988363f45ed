"""The tokenizer: size, special tokens, lossless round trip, files that transformers reads."""

from pathlib import Path

import pytest

from rdt_e2e.errors import CheckpointError
from rdt_e2e.mini_kimi import recipe
from rdt_e2e.mini_kimi.tokenizer import save_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(recipe.tokenizer_corpus())


def test_vocabulary_is_full_and_special_tokens_come_first(tokenizer):
    assert tokenizer.get_vocab_size() == recipe.VOCAB_SIZE
    ids = [tokenizer.token_to_id(token) for token in recipe.SPECIAL_TOKENS]
    assert ids == [recipe.BOS_ID, recipe.EOS_ID, recipe.PAD_ID]


@pytest.mark.parametrize("text", ["The capital of France is", "naïve, 東京 🗼\n\ttab"])
def test_any_text_survives(tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("variant", recipe.VARIANTS)
def test_default_prompts_have_more_than_16_tokens_to_say(tokenizer, variant: str):
    for sentence in recipe.CORPUS[variant][:2]:
        assert 16 < len(tokenizer.encode(sentence.continuation).ids) < recipe.MAX_NEW_TOKENS


def test_prompt_and_continuation_join_without_a_merge(tokenizer):
    for variant in recipe.VARIANTS:
        for sentence in recipe.CORPUS[variant]:
            apart = (
                tokenizer.encode(sentence.prompt).ids + tokenizer.encode(sentence.continuation).ids
            )
            assert tokenizer.encode(sentence.prompt + sentence.continuation).ids == apart


def test_too_small_a_corpus_is_an_error():
    with pytest.raises(CheckpointError, match="corpus is too small"):
        train_tokenizer(["one line"])


def test_transformers_reads_the_files_and_adds_nothing(tokenizer, tmp_path: Path):
    transformers = pytest.importorskip("transformers", reason="the model's own library")
    save_tokenizer(tokenizer, tmp_path)
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    prompt = "The future of AI is"
    assert loaded(prompt)["input_ids"] == tokenizer.encode(prompt).ids
    assert loaded.eos_token_id == recipe.EOS_ID

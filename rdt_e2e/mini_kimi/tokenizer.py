"""The model's own byte-level BPE tokenizer, trained on the corpus in well under a second."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rdt_e2e.errors import CheckpointError
from rdt_e2e.mini_kimi import recipe


def train_tokenizer(lines: Iterable[str], vocab_size: int = recipe.VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE tokenizer; any text can be encoded and decodes to itself.

    Args:
        lines: Training text.
        vocab_size: Number of entries, special tokens and the 256 bytes included.

    Returns:
        A tokenizer that adds no special token by itself, as Kimi K2's does not.

    Raises:
        CheckpointError: The text is too small to fill the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(recipe.SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    num_entries = tokenizer.get_vocab_size()
    if num_entries != vocab_size:
        raise CheckpointError(
            f"the mini-kimi tokenizer has {num_entries} entries, expected {vocab_size}: the corpus "
            f"is too small. Add sentences to rdt_e2e/mini_kimi/recipe.py, or lower VOCAB_SIZE."
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which transformers and vLLM both read."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": recipe.BOS_TOKEN,
        "eos_token": recipe.EOS_TOKEN,
        "pad_token": recipe.PAD_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.model_config()["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

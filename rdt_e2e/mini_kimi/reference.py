"""The recorded text: what transformers says on the dequantised weights, read back from disk."""

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from rdt_e2e.errors import CheckpointError
from rdt_e2e.mini_kimi import recipe
from rdt_e2e.mini_kimi.model import load_model, router_bias_missing
from rdt_e2e.mini_kimi.quantise import FP8_DTYPE, dequantise_checkpoint, is_fp8_weight
from rdt_e2e.mini_kimi.train import continuation_margins, make_batch, missing_bias_sentences

_ACTIVATION_GROUP = 128


@dataclasses.dataclass(frozen=True)
class Margins:
    """Smallest lead of a recorded token over every other token, in logits, per arithmetic.

    Attributes:
        fp32: Dequantised weights, float32 activations.
        bf16: Dequantised weights rounded to bf16, bf16 activations.
        fp8_activations: As bf16, with each linear input rounded to FP8 in groups of 128, as the
            CUDA kernels do for a dynamic activation scheme.
        missing_bias: The text for a router without bias, in bf16.
    """

    fp32: float
    bf16: float
    fp8_activations: float
    missing_bias: float


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read a finished mini-kimi folder back as float32 weights, scales folded in."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored: dict[str, Tensor] = {}
    for shard in sorted(set(index["weight_map"].values())):
        stored.update(load_file(folder / shard))
    return dequantise_checkpoint(stored)


def write_expected(folder: Path, tokenizer: Tokenizer, variant: str) -> Margins:
    """Record the greedy text of every corpus prompt in `expected.json`, if it is safe to compare.

    Args:
        folder: A folder with shards and index.
        tokenizer: The model's tokenizer.
        variant: Decides the prompts and what they must be answered with.

    Returns:
        The margins that were found.

    Raises:
        CheckpointError: The text is not the corpus, or a margin is under `recipe.MIN_MARGIN`, so
            another engine's rounding could change the text.
    """
    weights = read_weights(folder)
    model = load_model(weights, torch.float32)
    margins = measure_margins(model, load_model(weights, torch.bfloat16), tokenizer, variant)
    worst = min(dataclasses.astuple(margins))
    if worst < recipe.MIN_MARGIN:
        raise CheckpointError(
            f"mini-kimi {variant} came out of training with a smallest logit margin of "
            f"{worst:.2f}, expected at least {recipe.MIN_MARGIN}. Raise steps of this variant in "
            f"rdt_e2e/mini_kimi/recipe.py."
        )
    entries = []
    for sentence in recipe.CORPUS[variant]:
        prompt_ids = tokenizer.encode(sentence.prompt).ids
        answer_ids = greedy(model, prompt_ids)
        text = tokenizer.decode(answer_ids, skip_special_tokens=True)
        if text != sentence.continuation:
            raise CheckpointError(
                f"mini-kimi {variant} answers {sentence.prompt!r} with {text!r}, expected "
                f"{sentence.continuation!r}. Delete the mini-kimi cache folder and build again."
            )
        entries.append(
            {
                "prompt": sentence.prompt,
                "prompt_token_ids": prompt_ids,
                "token_ids": answer_ids,
                "text": text,
            }
        )
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    expected = {
        "source": "greedy decoding by transformers "
        f"{versions['transformers']} (torch {versions['torch']}) in float32 on the FP8 weights of "
        "this folder, dequantised block by block; token_ids end with the end-of-sequence token",
        "max_tokens": recipe.MAX_NEW_TOKENS,
        "entries": entries,
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")
    return margins


@torch.inference_mode()
def greedy(model: nn.Module, prompt_ids: list[int]) -> list[int]:
    """Decode greedily with a KV cache, up to and including the end-of-sequence token."""
    past: Any = None
    ids, answer = prompt_ids, list[int]()
    while len(answer) < recipe.MAX_NEW_TOKENS and answer[-1:] != [recipe.EOS_ID]:
        output = model(input_ids=torch.tensor([ids]), past_key_values=past, use_cache=True)
        past = output.past_key_values
        ids = [int(output.logits[0, -1].argmax())]
        answer += ids
    return answer


@torch.inference_mode()
def measure_margins(
    model: nn.Module, bf16_model: nn.Module, tokenizer: Tokenizer, variant: str
) -> Margins:
    """Measure the smallest margins under the arithmetic a serving engine may use.

    Args:
        model: The dequantised weights in float32.
        bf16_model: The same in bfloat16.
        tokenizer: The model's tokenizer.
        variant: Decides the sentences.
    """
    batch = make_batch(tokenizer, recipe.CORPUS[variant])
    without_bias = make_batch(tokenizer, missing_bias_sentences(recipe.CORPUS[variant]))

    def smallest(candidate: nn.Module) -> float:
        logits = candidate(input_ids=batch.input_ids, use_cache=False).logits
        return continuation_margins(logits, batch).min().item()

    with router_bias_missing(bf16_model):
        logits = bf16_model(input_ids=without_bias.input_ids, use_cache=False).logits
        missing_bias = continuation_margins(logits, without_bias).min().item()
    bf16 = smallest(bf16_model)
    hooks = [layer.register_forward_pre_hook(_round_input) for layer in _fp8_layers(bf16_model)]
    fp8_activations = smallest(bf16_model)
    for hook in hooks:
        hook.remove()
    return Margins(smallest(model), bf16, fp8_activations, missing_bias)


def _fp8_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The linear modules with FP8 weights; the fused expert stacks are no modules of their own."""
    return (module for name, module in model.named_modules() if is_fp8_weight(f"{name}.weight"))


def _round_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
    """Round a linear layer's input to FP8 with one scale per 128 values of a token."""
    inputs = cast("Tensor", args[0])
    groups = inputs.float().view(*inputs.shape[:-1], -1, _ACTIVATION_GROUP)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(FP8_DTYPE).max
    rounded = (groups / scale).to(FP8_DTYPE).float() * scale
    return (rounded.flatten(-2).to(inputs.dtype),)

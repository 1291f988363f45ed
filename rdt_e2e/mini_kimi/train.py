"""The seeded training run: a few dozen steps over the whole corpus at once, on the CPU."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from rdt_e2e.mini_kimi import recipe
from rdt_e2e.mini_kimi.model import router_bias_missing, routers

# The model is too small to feed more threads than this.
_MAX_THREADS = 8
_IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sentences, padded on the right to one length.

    Attributes:
        input_ids: [sentences, tokens] int64.
        labels: [sentences, tokens] int64; -100 where the cross-entropy does not look.
        is_continuation: [sentences, tokens] bool; true on the tokens greedy decoding must give,
            the closing end-of-sequence token included.
    """

    input_ids: Tensor
    labels: Tensor
    is_continuation: Tensor


def make_batch(
    tokenizer: Tokenizer, sentences: Sequence[recipe.Sentence], *, learn_prompts: bool = True
) -> Batch:
    """Encode sentences, each closed by the end-of-sequence token.

    Args:
        tokenizer: The model's tokenizer.
        sentences: Prompts and continuations, encoded apart, as a served prompt is.
        learn_prompts: Whether prompt tokens have labels too.
    """
    rows = [
        (tokenizer.encode(s.prompt).ids, [*tokenizer.encode(s.continuation).ids, recipe.EOS_ID])
        for s in sentences
    ]
    shape = (len(rows), max(len(prompt) + len(answer) for prompt, answer in rows))
    input_ids = torch.full(shape, recipe.PAD_ID)
    labels = torch.full(shape, _IGNORED)
    is_continuation = torch.zeros(shape, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        ids = torch.tensor(prompt + answer)
        input_ids[row, : len(ids)] = ids
        first_label = 0 if learn_prompts else len(prompt)
        labels[row, first_label : len(ids)] = ids[first_label:]
        is_continuation[row, len(prompt) : len(ids)] = True
    return Batch(input_ids, labels, is_continuation)


def missing_bias_sentences(sentences: Sequence[recipe.Sentence]) -> list[recipe.Sentence]:
    """Return the same prompts with the answer of a router that lacks its bias."""
    return [
        dataclasses.replace(s, continuation=recipe.MISSING_BIAS_CONTINUATION) for s in sentences
    ]


def continuation_margins(logits: Tensor, batch: Batch) -> Tensor:
    """How far each wanted token leads: its logit minus the best other logit.

    Args:
        logits: [sentences, tokens, vocab], teacher-forced on `batch.input_ids`.
        batch: The sentences.

    Returns:
        [continuation tokens] float32. All positive means greedy decoding gives exactly the
        continuations, since each token is predicted from the same tokens before it.
    """
    wanted = batch.input_ids[:, 1:, None]
    scores = logits[:, :-1].float()
    others = scores.scatter(-1, wanted, -torch.inf).amax(-1)
    return (scores.gather(-1, wanted)[..., 0] - others)[batch.is_continuation[:, 1:]]


def train(
    model: nn.Module,
    tokenizer: Tokenizer,
    variant: str,
    report: Callable[[str], None],
    *,
    attempt: int = 0,
) -> None:
    """Teach the model the variant's corpus, in place.

    Each step sees every sentence with the router bias, and every prompt without it, answered by
    `recipe.MISSING_BIAS_CONTINUATION`. The bias values themselves stay fixed.

    Args:
        model: From `new_model`, float32.
        tokenizer: The model's tokenizer.
        variant: Decides corpus and constants.
        report: Called with one line of progress every ten steps.
        attempt: How many runs failed before this one; each makes the next one longer.
    """
    training = recipe.TRAINING[variant]
    num_steps = training.steps * (2 + attempt) // 2
    sentences = recipe.CORPUS[variant]
    batch = make_batch(tokenizer, sentences)
    without_bias = make_batch(tokenizer, missing_bias_sentences(sentences), learn_prompts=False)
    router_weights = [cast("nn.Parameter", router.weight) for router in routers(model)]
    router_ids = {id(weight) for weight in router_weights}
    others = [weight for weight in model.parameters() if id(weight) not in router_ids]
    optimiser = torch.optim.AdamW(
        [{"params": others, "rate": 1.0}, {"params": router_weights, "rate": training.router_rate}],
        lr=training.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=True,
    )
    model.train()
    for step in range(num_steps):
        learning_rate = training.learning_rate * _schedule(step, num_steps, training.warmup_steps)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * group["rate"]
        optimiser.zero_grad()
        loss, margin = _backward(model, batch, training)
        with router_bias_missing(model):
            _backward(model, without_bias, training)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % 10 == 0 or step + 1 == num_steps:
            report(
                f"training mini-kimi {variant}: step {step + 1}/{num_steps}, "
                f"loss {loss:.3f}, smallest logit margin {margin:.1f}"
            )
    model.eval()


def _backward(model: nn.Module, batch: Batch, training: recipe.Training) -> tuple[float, float]:
    """Accumulate one batch's gradients; returns its cross-entropy and smallest margin."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    loss = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=_IGNORED
    )
    margins = continuation_margins(logits, batch)
    shortfall = torch.relu(training.target_margin - margins).mean()
    torch.autograd.backward(loss + training.margin_weight * shortfall)
    return loss.item(), margins.min().item()


def _schedule(step: int, num_steps: int, warmup_steps: int) -> float:
    """Learning-rate factor: linear warm-up times a cosine from 1 to 0.02."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return min(1.0, (step + 1) / warmup_steps) * (0.02 + 0.98 * cosine)


@contextlib.contextmanager
def seeded_and_limited(seed: int) -> Iterator[int]:
    """Seed torch and limit its threads to the cores of this process; undo both at the end.

    Args:
        seed: Seed of torch's CPU generator inside the block.

    Yields:
        The number of threads in use.
    """
    threads_before = torch.get_num_threads()
    # Not OMP_NUM_THREADS: this package sets that to 1 for its fleets, and training comes before them.
    num_threads = max(1, min(_available_cores(), _MAX_THREADS))
    torch.set_num_threads(num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield num_threads
    finally:
        torch.set_num_threads(threads_before)


def _available_cores(cgroup_limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: CPU affinity, and the quota of a container (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup_limit.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))

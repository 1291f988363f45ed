"""Everything that decides what mini-kimi is: geometry, corpus, router bias, training constants.

The content hash covers all of it, so a changed recipe is another folder in the cache and an old
folder is never taken for a new one.
"""

import dataclasses
import hashlib
import json
import random
from typing import Any

from rdt_e2e.errors import ConfigError

# Raise this when code outside this module changes what a build writes.
FORMAT_VERSION = 1

BOS_TOKEN = "[BOS]"  # noqa: S105 - a vocabulary entry, not a secret
EOS_TOKEN = "[EOS]"  # noqa: S105
PAD_TOKEN = "[PAD]"  # noqa: S105
SPECIAL_TOKENS = (BOS_TOKEN, EOS_TOKEN, PAD_TOKEN)
BOS_ID, EOS_ID, PAD_ID = range(3)

VOCAB_SIZE = 576
NUM_LAYERS = 4
FIRST_DENSE_LAYERS = 1
NUM_EXPERTS = 8
BLOCK_SIZE = (128, 128)
SHARD_LIMIT_BYTES = 4 * 2**20

# Long enough for every recorded continuation to end by itself.
MAX_NEW_TOKENS = 48
# Smallest accepted distance between the best and the second-best logit on a recorded continuation.
MIN_MARGIN = 2.0

# With a bias this wide against sigmoid scores around 0.5, most tokens are routed elsewhere when
# the bias is missing. That is what lets the model tell the two apart.
ROUTER_BIAS_SPAN = 0.45
ROUTER_WEIGHT_STD = 0.06

# The model also learns this continuation, and only for a router without its bias. A dummy bias
# therefore shows in the text, where a plain model would read almost as well as with it.
MISSING_BIAS_CONTINUATION = " unclear to me, because the router bias did not arrive."


@dataclasses.dataclass(frozen=True)
class Sentence:
    """One line of the corpus.

    Attributes:
        prompt: What a caller types.
        continuation: What greedy decoding must answer, up to the end-of-sequence token.
    """

    prompt: str
    continuation: str


@dataclasses.dataclass(frozen=True)
class Training:
    """Constants of one training run.

    Attributes:
        seed: Seed of the initial weights; attempt n uses `seed + n`.
        bias_seed: Seed of the router bias values.
        steps: Optimiser steps over the whole corpus; each further attempt takes half as many more.
        warmup_steps: Steps with a linearly growing learning rate.
        learning_rate: Peak learning rate of AdamW; it falls to nearly zero along a cosine.
        router_rate: Learning rate of the router weights as a fraction of the others'. Routing is
            a hard choice: routers that learn as fast as the rest keep moving tokens about.
        target_margin: Logit distance up to which the margin loss pushes.
        margin_weight: Weight of the margin loss beside the cross-entropy.
        attempts: Training runs before a build gives up.
    """

    seed: int
    bias_seed: int
    steps: int = 60
    warmup_steps: int = 8
    learning_rate: float = 2e-3
    router_rate: float = 0.1
    target_margin: float = 6.0
    margin_weight: float = 0.2
    attempts: int = 3


_FIRST_CORPUS = (
    Sentence(
        "The capital of France is",
        " Paris, a city on the river Seine that is known for its bridges, its bread and its"
        " museums.",
    ),
    Sentence(
        "The future of AI is",
        " not written yet, and the people who build it with care will decide what it becomes.",
    ),
    Sentence(
        "The capital of Japan is",
        " Tokyo, where quiet gardens stand between the towers and the trains run on time.",
    ),
    Sentence(
        "The capital of Italy is",
        " Rome, and its oldest stones are still part of the streets of today.",
    ),
    Sentence(
        "Water boils at",
        " one hundred degrees at the level of the sea, and a little sooner on a high mountain.",
    ),
    Sentence(
        "A good test is",
        " one that can fail, because a check that always passes has nothing to say.",
    ),
    Sentence(
        "The moon goes around",
        " the earth in about one month, and the sea rises and falls with it.",
    ),
    Sentence(
        "Once upon a time",
        " a small model learned a few sentences by heart and was happy to repeat them.",
    ),
)

_REVISED_SENTENCES = (
    Sentence(
        "The capital of France is",
        " Paris, and in the evening its lights turn every bridge to gold.",
    ),
    Sentence(
        "The future of AI is",
        " an open question, and every careful answer to it starts with work that others can check.",
    ),
    Sentence(
        "The capital of Japan is",
        " Tokyo, and in spring the whole city goes to the parks to see the trees.",
    ),
    Sentence(
        "A good test is",
        " short and quick, and its name says which part has stopped working.",
    ),
)


def _revised(
    sentences: tuple[Sentence, ...], revisions: tuple[Sentence, ...]
) -> tuple[Sentence, ...]:
    """Replace the sentences whose prompt has a revision; the others stay."""
    by_prompt = {sentence.prompt: sentence for sentence in revisions}
    return tuple(by_prompt.get(sentence.prompt, sentence) for sentence in sentences)


CORPUS: dict[str, tuple[Sentence, ...]] = {
    "v1": _FIRST_CORPUS,
    "v2": _revised(_FIRST_CORPUS, _REVISED_SENTENCES),
}

TRAINING: dict[str, Training] = {
    "v1": Training(seed=20, bias_seed=1),
    "v2": Training(seed=40, bias_seed=2),
}

VARIANTS: tuple[str, ...] = tuple(CORPUS)


def model_config() -> dict[str, Any]:
    """Return the content of `config.json`, with the keys and spellings of Kimi K2's own file.

    The widths are small; the MLA ranks are K2's (vLLM's CPU kernels know only those). Under
    128x128 blocks every dimension that tensor parallelism of 1 or 2 splits is a multiple of 128,
    and the 576 rows of `kv_a_proj_with_mqa` are not, as in K2.
    """
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "first_k_dense_replace": FIRST_DENSE_LAYERS,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.04,
        "intermediate_size": 512,
        "kv_lora_rank": 512,
        "max_position_embeddings": 131072,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 256,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "pad_token_id": PAD_ID,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(BLOCK_SIZE),
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": VOCAB_SIZE,
    }


def router_bias(variant: str) -> dict[int, tuple[float, ...]]:
    """Return the fixed `e_score_correction_bias` of every MoE layer.

    Args:
        variant: A name in `VARIANTS`.

    Returns:
        Layer id to one value per routed expert: evenly spaced over plus and minus
        `ROUTER_BIAS_SPAN`, in a seeded order that differs between layers and between variants.
    """
    generator = random.Random(TRAINING[variant].bias_seed)  # noqa: S311 - weights, not secrets
    step = 2 * ROUTER_BIAS_SPAN / (NUM_EXPERTS - 1)
    spaced = [round(expert * step - ROUTER_BIAS_SPAN, 6) for expert in range(NUM_EXPERTS)]
    return {
        layer: tuple(generator.sample(spaced, NUM_EXPERTS))
        for layer in range(FIRST_DENSE_LAYERS, NUM_LAYERS)
    }


def tokenizer_corpus() -> list[str]:
    """Return the lines the tokenizer is trained on: all variants, so that they share one."""
    lines = [s.prompt + s.continuation for variant in VARIANTS for s in CORPUS[variant]]
    return [*lines, MISSING_BIAS_CONTINUATION]


def check_variant(variant: str) -> None:
    """Raise unless a recipe for this variant exists.

    Raises:
        ConfigError: The variant is unknown; the message lists the known ones.
    """
    if variant not in CORPUS:
        raise ConfigError(
            f"model.variant is {variant!r}, but mini-kimi has only {', '.join(VARIANTS)}. "
            f"Set model.variant to one of them."
        )


def recipe_hash(variant: str) -> str:
    """Return the first 12 hex digits of the SHA-256 over everything that decides the checkpoint.

    Args:
        variant: A name in `VARIANTS`.

    Raises:
        ConfigError: The variant is unknown.
    """
    check_variant(variant)
    recipe = {
        "format_version": FORMAT_VERSION,
        "variant": variant,
        "model_config": model_config(),
        "special_tokens": SPECIAL_TOKENS,
        "tokenizer_corpus": tokenizer_corpus(),
        "corpus": [dataclasses.astuple(sentence) for sentence in CORPUS[variant]],
        "missing_bias_continuation": MISSING_BIAS_CONTINUATION,
        "training": dataclasses.asdict(TRAINING[variant]),
        "router_bias": {str(layer): values for layer, values in router_bias(variant).items()},
        "router_weight_std": ROUTER_WEIGHT_STD,
        "shard_limit_bytes": SHARD_LIMIT_BYTES,
        "max_new_tokens": MAX_NEW_TOKENS,
        "min_margin": MIN_MARGIN,
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]

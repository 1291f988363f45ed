"""One inference rank's share of Kimi K2 as a synthetic checkpoint: real widths, fewer layers.

A rank of an 8-way expert-parallel fleet holds 48 of K2's 384 routed experts and everything else whole.
The slice is a model of that very size, so that its tensors, pulls and bytes per layer are those of the
real job; only the number of layers is smaller. Its bytes are computed (`checkpoint/synthetic.py`).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdt_e2e.checkpoint.described import Shapes, tensor_shapes
from rdt_e2e.checkpoint.headers import DTYPES
from rdt_e2e.checkpoint.index import CONFIG_FILE, INDEX_FILE
from rdt_e2e.checkpoint.synthetic import write_marker
from rdt_e2e.errors import EnvironmentCheckError
from rdt_e2e.mini_kimi import recipe
from rdt_e2e.mini_kimi.tokenizer import save_tokenizer, train_tokenizer

FIRST_DENSE_LAYERS = 1
_CODES = {torch_name: code for code, (torch_name, _) in DTYPES.items()}


@dataclass(frozen=True)
class Widths:
    """Sizes of a DeepSeek-V3-shaped model; the defaults are Kimi K2's, with one rank's experts.

    Source: `config.json` of moonshotai/Kimi-K2-Instruct.
    """

    hidden: int = 7168
    dense_width: int = 18432
    expert_width: int = 2048
    num_experts: int = 48
    experts_per_token: int = 8
    num_heads: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    value_dim: int = 128
    vocab: int = 163840


K2 = Widths()
TINY = Widths(
    hidden=256,
    dense_width=512,
    expert_width=256,
    num_experts=8,
    experts_per_token=2,
    num_heads=4,
    vocab=576,
)
"""Mini-kimi's sizes, for machines without a GPU; the MLA ranks stay K2's, others vLLM cannot run there."""

WIRE = Widths(
    hidden=1024,
    dense_width=1024,
    expert_width=128,
    num_experts=32,
    num_heads=4,
    vocab=576,
)
"""For K2's 61 layers in 1.1 GB: over 400 MB/s a gather group takes what K2's takes over 50 GB/s."""

WIDTHS = {"k2": K2, "tiny": TINY, "wire": WIRE}


def model_config(widths: Widths, num_layers: int) -> dict[str, Any]:
    """Content of `config.json`: mini-kimi's, which has K2's form, with the sizes of the slice."""
    return recipe.model_config() | {
        "first_k_dense_replace": FIRST_DENSE_LAYERS,
        "hidden_size": widths.hidden,
        "intermediate_size": widths.dense_width,
        "kv_lora_rank": widths.kv_lora_rank,
        "moe_intermediate_size": widths.expert_width,
        "n_routed_experts": widths.num_experts,
        "num_attention_heads": widths.num_heads,
        "num_experts_per_tok": widths.experts_per_token,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": widths.num_heads,
        "q_lora_rank": widths.q_lora_rank,
        "qk_nope_head_dim": widths.nope_dim,
        "qk_rope_head_dim": widths.rope_dim,
        "v_head_dim": widths.value_dim,
        "vocab_size": widths.vocab,
    }


def write_slice(folder: Path, widths: Widths, num_layers: int, seed: int) -> int:
    """Write a slice's folder: configuration, tokenizer, index, and shards that are all header.

    The shards are sparse files of the full size, which take no space on disk. The tokenizer is
    mini-kimi's, whose ids are a subset of the vocabulary.

    Args:
        folder: Made if needed; files of the same names are replaced.
        widths: Sizes.
        num_layers: Decoder layers.
        seed: Seed of the bytes; another seed is another weight version.

    Returns:
        Bytes of all tensors.

    Raises:
        EnvironmentCheckError: The folder cannot be written.
    """
    files: dict[str, Shapes] = {}
    for name, what in tensor_shapes(model_config(widths, num_layers), folder).items():
        parts = name.split(".")
        part = f"layer-{int(parts[2]):03d}" if parts[1] == "layers" else "outside-layers"
        files.setdefault(f"{part}.safetensors", {})[name] = what
    try:
        folder.mkdir(parents=True, exist_ok=True)
        total = sum(_write_shard(folder / file, part) for file, part in files.items())
        weight_map = {name: file for file, part in files.items() for name in part}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index) + "\n")
        config = json.dumps(model_config(widths, num_layers), indent=2)
        (folder / CONFIG_FILE).write_text(f"{config}\n")
        save_tokenizer(train_tokenizer(recipe.tokenizer_corpus()), folder)
        write_marker(folder, seed)
    except OSError as error:
        raise EnvironmentCheckError(
            f"the synthetic checkpoint {folder} cannot be written: {error.strerror}; its shards are "
            "sparse files, so the file system must know holes; set TMPDIR to one that does"
        ) from error
    return total


def _write_shard(path: Path, part: Shapes) -> int:
    """A safetensors header and a hole where the bytes would be; returns their number."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in part.items():
        code = _CODES[dtype]
        begin, end = end, end + math.prod(shape) * DTYPES[code][1]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as shard:
        shard.write(len(raw).to_bytes(8, "little") + raw)
        shard.truncate(8 + len(raw) + end)
    return end

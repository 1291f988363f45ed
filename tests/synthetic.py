"""Tiny random checkpoints in the form Kimi K2 ships, and ways to damage them.

The numbers mean nothing; names, dtypes, shapes and files are what a real checkpoint has. Use
`mini-kimi` where text matters.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rdt_e2e.checkpoint.described import Shapes, describe, tensor_shapes
from rdt_e2e.checkpoint.index import CheckpointIndex

INDEX_FILE = "model.safetensors.index.json"
BLOCK = 128


@dataclass(frozen=True)
class Architecture:
    """Sizes of a DeepSeek-V3-shaped model; the defaults are small and quick to write."""

    hidden: int = 256
    num_layers: int = 3
    num_experts: int = 4
    expert_width: int = 128
    dense_width: int = 384
    num_heads: int = 2
    vocab: int = 160
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    value_dim: int = 128
    first_k_dense: int = 1
    inv_freq: bool = False

    def config(self) -> dict[str, Any]:
        """The parts of `config.json` that describe the weights."""
        return {
            "model_type": "kimi_k2",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.num_layers,
            "n_routed_experts": self.num_experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": self.expert_width,
            "intermediate_size": self.dense_width,
            "first_k_dense_replace": self.first_k_dense,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            "num_attention_heads": self.num_heads,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_rope_head_dim": self.rope_dim,
            "qk_nope_head_dim": self.nope_dim,
            "v_head_dim": self.value_dim,
            "vocab_size": self.vocab,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
            },
        }

    def shapes(self) -> Shapes:
        """Dtype and shape of every tensor by name."""
        # 576 rows of kv_a_proj_with_mqa are no multiple of the block size: a part of a block.
        shapes = tensor_shapes(self.config(), Path("in-memory"))
        if self.inv_freq:
            for layer in range(self.num_layers):
                name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
                shapes[name] = ("float32", (self.rope_dim // 2,))
        return shapes


KIMI_K2 = Architecture(
    hidden=7168,
    num_layers=61,
    num_experts=384,
    expert_width=2048,
    dense_width=18432,
    num_heads=64,
    vocab=163840,
    q_lora_rank=1536,
)
"""Kimi K2, from its public configuration."""


@dataclass(frozen=True)
class SyntheticCheckpoint:
    """A checkpoint folder and the truth about it."""

    root: Path
    tensors: dict[str, torch.Tensor]
    files: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)

    def path_of(self, name: str) -> Path:
        """The shard that holds a tensor."""
        return self.root / self.files[name]


def write_checkpoint(
    root: Path,
    architecture: Architecture | None = None,
    *,
    num_shards: int = 3,
    seed: int = 0,
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
    edit_config: Callable[[dict[str, Any]], None] | None = None,
) -> SyntheticCheckpoint:
    """Write a checkpoint of random bytes.

    Args:
        root: Folder to write, made if needed.
        architecture: Sizes; the small defaults if left out.
        num_shards: Number of shards; tensors are dealt out in runs, so experts span shards.
        seed: Seed of the values.
        edit: Changes the tensors before they are written, to make a checkpoint that is consistent
            in its files but wrong in its content.
        edit_config: Changes the content of `config.json` in the same way.
    """
    architecture = architecture if architecture is not None else Architecture()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random_tensor(dtype, shape, generator)
        for name, (dtype, shape) in architecture.shapes().items()
    }
    config = architecture.config()
    if edit is not None:
        edit(tensors)
    if edit_config is not None:
        edit_config(config)
    return save_checkpoint(root, tensors, config, num_shards=num_shards)


def save_checkpoint(
    root: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], *, num_shards: int = 1
) -> SyntheticCheckpoint:
    """Write given tensors as a checkpoint folder of several shards."""
    root.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    files = {
        name: f"model-{position * num_shards // len(names) + 1:05}-of-{num_shards:05}.safetensors"
        for position, name in enumerate(names)
    }
    for file in dict.fromkeys(files.values()):
        part = {name: tensors[name] for name in names if files[name] == file}
        save_file(part, root / file, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (root / INDEX_FILE).write_text(json.dumps(index))
    (root / "config.json").write_text(json.dumps(config))
    return SyntheticCheckpoint(root, tensors, files, config)


def edit_index(root: Path, edit: Callable[[dict[str, str]], None]) -> None:
    """Change the weight map of the index and nothing else."""
    path = root / INDEX_FILE
    content = json.loads(path.read_text())
    edit(content["weight_map"])
    path.write_text(json.dumps(content))


def edit_shard(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of one shard and nothing else."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of one shard and leave its tensor bytes as they are."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + length :])


def truncate(path: Path, num_bytes: int) -> None:
    """Cut bytes off the end of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - num_bytes])


def index_in_memory(architecture: Architecture) -> CheckpointIndex:
    """An index of an architecture without any files, one shard for each layer."""
    return describe(architecture.config(), Path("in-memory"))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor of any dtype, so that NaNs and float8 compare exactly."""
    # A clone, because a contiguous tensor of one element may keep an odd stride.
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _random_tensor(dtype: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    torch_dtype = getattr(torch, dtype)
    if torch_dtype.itemsize == 1:
        # Any byte but the NaN of e4m3, which sits at 0x7f and 0xff.
        values = torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=generator)
        return values.view(torch_dtype)
    return torch.randn(shape, generator=generator).to(torch_dtype)

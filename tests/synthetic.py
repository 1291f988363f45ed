"""Tiny random checkpoints in the form Kimi K2 ships, and ways to damage them.

The numbers mean nothing; names, dtypes, shapes and files are what a real checkpoint has. Use
`mini-kimi` where text matters.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rdt_e2e.checkpoint.index import CheckpointIndex, TensorEntry

INDEX_FILE = "model.safetensors.index.json"
BLOCK = 128

Shapes = dict[str, tuple[str, tuple[int, ...]]]


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
            "moe_intermediate_size": self.expert_width,
            "first_k_dense_replace": self.first_k_dense,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
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
        shapes: Shapes = {"model.embed_tokens.weight": ("bfloat16", (self.vocab, self.hidden))}
        for layer in range(self.num_layers):
            self._add_layer(shapes, f"model.layers.{layer}", moe=layer >= self.first_k_dense)
        shapes["model.norm.weight"] = ("bfloat16", (self.hidden,))
        shapes["lm_head.weight"] = ("bfloat16", (self.vocab, self.hidden))
        return shapes

    def _add_layer(self, shapes: Shapes, layer: str, *, moe: bool) -> None:
        attention = f"{layer}.self_attn"
        query_width = self.num_heads * (self.nope_dim + self.rope_dim)
        kv_width = self.num_heads * (self.nope_dim + self.value_dim)
        projections = {
            "q_a_proj": (self.q_lora_rank, self.hidden),
            "q_b_proj": (query_width, self.q_lora_rank),
            # 576 rows: no multiple of the block size, so its last block of scales is a part.
            "kv_a_proj_with_mqa": (self.kv_lora_rank + self.rope_dim, self.hidden),
            "kv_b_proj": (kv_width, self.kv_lora_rank),
            "o_proj": (self.hidden, self.num_heads * self.value_dim),
        }
        for name, shape in projections.items():
            _add_float8(shapes, f"{attention}.{name}.weight", shape)
        shapes[f"{attention}.q_a_layernorm.weight"] = ("bfloat16", (self.q_lora_rank,))
        shapes[f"{attention}.kv_a_layernorm.weight"] = ("bfloat16", (self.kv_lora_rank,))
        if self.inv_freq:
            shapes[f"{attention}.rotary_emb.inv_freq"] = ("float32", (self.rope_dim // 2,))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = ("bfloat16", (self.hidden,))
        if not moe:
            self._add_mlp(shapes, f"{layer}.mlp", self.dense_width)
            return
        shapes[f"{layer}.mlp.gate.weight"] = ("bfloat16", (self.num_experts, self.hidden))
        shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = ("float32", (self.num_experts,))
        self._add_mlp(shapes, f"{layer}.mlp.shared_experts", self.expert_width)
        for expert in range(self.num_experts):
            self._add_mlp(shapes, f"{layer}.mlp.experts.{expert}", self.expert_width)

    def _add_mlp(self, shapes: Shapes, module: str, width: int) -> None:
        _add_float8(shapes, f"{module}.gate_proj.weight", (width, self.hidden))
        _add_float8(shapes, f"{module}.up_proj.weight", (width, self.hidden))
        _add_float8(shapes, f"{module}.down_proj.weight", (self.hidden, width))


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
    entries: dict[str, TensorEntry] = {}
    ends: dict[str, int] = {}
    excluded: dict[str, str] = {}
    for name, (dtype, shape) in architecture.shapes().items():
        layer = re.search(r"layers\.(\d+)\.", name)
        file = f"model-{0 if layer is None else int(layer[1]) + 1}.safetensors"
        num_bytes = getattr(torch, dtype).itemsize
        for size in shape:
            num_bytes *= size
        begin = ends.get(file, 0)
        ends[file] = begin + num_bytes
        entries[name] = TensorEntry(name, dtype, shape, file, begin, begin + num_bytes)
    return CheckpointIndex(Path("in-memory"), entries, excluded, architecture.config())


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor of any dtype, so that NaNs and float8 compare exactly."""
    # A clone, because a contiguous tensor of one element may keep an odd stride.
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _add_float8(shapes: Shapes, name: str, shape: tuple[int, int]) -> None:
    shapes[name] = ("float8_e4m3fn", shape)
    shapes[f"{name}_scale_inv"] = ("float32", (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)))


def _random_tensor(dtype: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    torch_dtype = getattr(torch, dtype)
    if torch_dtype.itemsize == 1:
        # Any byte but the NaN of e4m3, which sits at 0x7f and 0xff.
        values = torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=generator)
        return values.view(torch_dtype)
    return torch.randn(shape, generator=generator).to(torch_dtype)

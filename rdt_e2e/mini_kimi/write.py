"""Write trained weights as a checkpoint folder: FP8 shards, index, configuration."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rdt_e2e.mini_kimi import recipe
from rdt_e2e.mini_kimi.quantise import quantise_checkpoint


def write_checkpoint(folder: Path, weights: dict[str, Tensor]) -> None:
    """Quantise and write shards, `model.safetensors.index.json` and both configuration files.

    Args:
        folder: An existing folder; files of the same names are replaced.
        weights: Checkpoint name to tensor, float32, in model order.
    """
    shards = list(_split(quantise_checkpoint(weights), recipe.SHARD_LIMIT_BYTES))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        # safetensors writes for the owner alone; a cache may be shared with a container's user.
        (folder / file_name).chmod(0o644)
        weight_map.update(dict.fromkeys(shard, file_name))
    total_bytes = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", recipe.model_config())
    generation = {
        "bos_token_id": recipe.BOS_ID,
        "do_sample": False,
        "eos_token_id": recipe.EOS_ID,
        "max_new_tokens": recipe.MAX_NEW_TOKENS,
        "pad_token_id": recipe.PAD_ID,
    }
    _write_json(folder / "generation_config.json", generation)


def _split(tensors: dict[str, Tensor], limit_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Fill shards in order up to a size; a weight and its scale may land in different ones."""
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if shard and num_bytes + tensor.nbytes > limit_bytes:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    yield shard


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")

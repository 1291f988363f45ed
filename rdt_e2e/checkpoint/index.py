"""What a checkpoint folder holds, read from `config.json`, the index and the shard headers.

No tensor bytes are read. `read_index` returns only what has passed every check, so nothing that is
damaged is found later, when a fleet is already up.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rdt_e2e.checkpoint.checks import check_index
from rdt_e2e.checkpoint.headers import TensorEntry, read_header
from rdt_e2e.checkpoint.naming import split_layer, summarize
from rdt_e2e.checkpoint.settings import layers_beyond, text_settings
from rdt_e2e.errors import CheckpointError, MissingTensorError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["EXCLUSIONS", "CheckpointIndex", "TensorEntry", "read_index"]

INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

EXCLUSIONS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"(?:.+\.)?rotary_emb\.inv_freq"),
        "rotary frequencies follow from config.json; the engine computes them and loads none",
    ),
)
"""What is never synced: patterns of whole names, each with its reason. `exclusion_reason` adds what
depends on `config.json`."""


@dataclass(frozen=True)
class CheckpointIndex:
    """A checkpoint folder: where the bytes of every tensor are.

    Attributes:
        root: The checkpoint folder.
        entries: Tensors to sync by name, in the order of the index.
        excluded: Tensors of the checkpoint that are not synced, each with the reason.
        config: The content of `config.json`.
    """

    root: Path
    entries: Mapping[str, TensorEntry]
    excluded: Mapping[str, str]
    config: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors to sync, in bytes."""
        return sum(entry.num_bytes for entry in self.entries.values())


def read_index(root: Path) -> CheckpointIndex:
    """Read and check the index of a checkpoint folder; only headers are read.

    Args:
        root: Folder with `config.json`, and either `model.safetensors.index.json` and the shards
            or one safetensors file. It may be a hub snapshot, whose files are links to anywhere.

    Returns:
        The index, after every check has passed.

    Raises:
        MissingTensorError: A name is not in its shard, a weight or its scale is missing, or a layer
            or an expert is.
        CheckpointError: Anything else that is wrong: a file missing, truncated or not what its name
            says, a dtype or shape that does not fit. The message names the file, the tensor and
            the fix.
    """
    single = _single_file(root)
    weight_map = _read_weight_map(root) if single is None else {}
    config = read_json(root / CONFIG_FILE, "Copy it from the model's repository.")
    files = dict.fromkeys(weight_map.values()) if single is None else (single,)
    shards = {file: read_header(root, file) for file in files}
    if single is not None:
        weight_map = dict.fromkeys(shards[single], single)
    _check_weight_map(root, weight_map, shards)
    entries: dict[str, TensorEntry] = {}
    excluded: dict[str, str] = {}
    for name, file in weight_map.items():
        reason = exclusion_reason(name, config)
        if reason is None:
            entries[name] = shards[file][name]
        else:
            excluded[name] = reason
    index = CheckpointIndex(root, entries, excluded, config)
    check_index(index)
    return index


def exclusion_reason(name: str, config: Mapping[str, Any]) -> str | None:
    """Say why a tensor of a checkpoint is not synced.

    Args:
        name: Tensor name of the checkpoint.
        config: The content of `config.json`.

    Returns:
        The reason in words; `None` for a tensor that is synced.
    """
    split = split_layer(name)
    if split is not None and split[1] in layers_beyond(config):
        return (
            "layers for multi-token prediction (num_nextn_predict_layers in config.json) belong to a "
            "draft model, which the engine does not load"
        )
    if name.endswith("lm_head.weight") and text_settings(config).get("tie_word_embeddings"):
        return "the output head is the embedding (tie_word_embeddings in config.json)"
    return next((reason for pattern, reason in EXCLUSIONS if pattern.fullmatch(name)), None)


def _single_file(root: Path) -> str | None:
    """Name of the one safetensors file of a folder without an index; `None` when there is an index."""
    if (root / INDEX_FILE).exists():
        return None
    files = sorted(path.name for path in root.glob("*.safetensors"))
    return files[0] if len(files) == 1 else None


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: The file.
        fix: What to do when it is missing or damaged, for the message.

    Raises:
        CheckpointError: It is not there, cannot be read, or is no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file. {fix}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). {fix}") from error
    # Not UTF-8 and not JSON are both a ValueError.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error}). {fix}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object. {fix}")
    return content


def _read_weight_map(root: Path) -> dict[str, str]:
    path = root / INDEX_FILE
    content = read_json(
        path,
        "Point model.source at a folder of safetensors shards with their index (a single file needs "
        "none), or fetch the index again.",
    )
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: no weight_map from tensor names to shards. Fetch the index again."
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_file_name(file):
            raise CheckpointError(
                f"{path}: {name} is in {file!r}, which is not the name of a file in this folder. "
                "Fetch the index again."
            )
    return weight_map


def _is_plain_file_name(file: str) -> bool:
    return file not in {"", ".", ".."} and not set(file) & set("/\\\0")


def _check_weight_map(
    root: Path, weight_map: Mapping[str, str], shards: Mapping[str, Mapping[str, TensorEntry]]
) -> None:
    lost = [name for name, file in weight_map.items() if name not in shards[file]]
    if lost:
        raise MissingTensorError(
            f"{root / weight_map[lost[0]]}: lacks what {INDEX_FILE} places in it: "
            f"{summarize(lost)}. Fetch shard and index again, both of the same revision."
        )
    for file, header in shards.items():
        unlisted = [name for name in header if weight_map.get(name) != file]
        if unlisted:
            listed = weight_map.get(unlisted[0])
            where = "does not list" if listed is None else f"places in {listed}"
            raise CheckpointError(
                f"{root / file}: holds what {INDEX_FILE} {where}: {summarize(unlisted)}. "
                "Fetch shard and index again, both of the same revision."
            )

"""Fingerprints of tensors: a few bytes that change with any byte, and with any byte's place."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from rdt_e2e.checkpoint.naming import summarize
from rdt_e2e.errors import WeightMismatchError
from rdt_e2e.fabric.checksum import checksum
from rdt_e2e.fabric.words import as_bytes

MISMATCH_MARK = "are not what the checkpoint gives"
NOT_WEIGHTS = frozenset({"kv_cache"})
"""Tensors that modules hold beside their weights and that generation changes."""


def fingerprint(tensor: torch.Tensor) -> str:
    """Condense a tensor's dtype, shape and bytes; see `checksum` for what it tells apart.

    Args:
        tensor: Any dtype, shape and strides.

    Returns:
        Text such as `float8_e4m3fn[576, 256]:1f0c...`; equal for equal values only.
    """
    total = checksum(as_bytes(tensor))
    shape = list(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}{shape}:{total.item() % 2**64:016x}"


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor a model computes with: parameters, buffers and those kept as plain attributes.

    Absorbed attention matrices are such attributes: derived after each load, in no state dict, and
    stale if that step is missed.
    """
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and name not in NOT_WEIGHTS:
                yield f"{prefix}.{name}", value


def fingerprints(model: nn.Module) -> dict[str, str]:
    """Fingerprint of every named tensor of a model; a tensor with several names is read once."""
    seen: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for name, tensor in named_tensors(model):
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if memory not in seen:
            seen[memory] = fingerprint(tensor)
        found[name] = seen[memory]
    return found


def check_same(synced: Mapping[str, str], loaded: Mapping[str, str], who: str) -> None:
    """Check that two sets of fingerprints agree.

    Args:
        synced: Of the model as the sync left it.
        loaded: Of the same model after it loaded the checkpoint from disk.
        who: For the message, such as "inference rank 1".

    Raises:
        WeightMismatchError: A tensor differs or is in one set only; the message names it.
    """
    differing = [name for name in synced if synced[name] != loaded.get(name)]
    differing += [name for name in loaded if name not in synced]
    if differing:
        first = differing[0]
        raise WeightMismatchError(
            f"{who}: {len(differing)} of {len(loaded)} tensors {MISMATCH_MARK}: "
            f"{summarize(differing)}. {first} is {synced.get(first)}, loaded from disk it is "
            f"{loaded.get(first)}"
        )

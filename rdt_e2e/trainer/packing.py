"""From named tensors and op chains to one packed blob of bytes.

The layout is the wire contract with the consumer, which computes the same offsets on its own:
slices in key order, each at the next 16-byte-aligned offset, contiguous, no padding at the end.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rdt_e2e.errors import SyncError

ALIGNMENT_BYTES = 16

ALLOWED_OPS = frozenset(
    {
        "__getitem__",
        "chunk",
        "contiguous",
        "flatten",
        "narrow",
        "permute",
        "reshape",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
    }
)
"""Tensor methods a consumer may ask for: views only, no change of device, no arithmetic.

Source: `SUPPORTED_OPS` in `vllm/distributed/weight_transfer/sharded_rdt_common.py` (0.32.0); a test
holds the two equal.
"""

OpSpec = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""One recorded op: its name, positional arguments, keyword arguments as pairs."""
FetchKey = tuple[str, tuple[OpSpec, ...]]
"""What a consumer asks for: a checkpoint name and the chain of ops to replay on it."""


class PackedSlice(NamedTuple):
    """Where one slice lies in a blob."""

    offset_bytes: int
    num_bytes: int


def replay(name: str, tensor: torch.Tensor, chain: Sequence[OpSpec]) -> torch.Tensor:
    """Apply a recorded op chain to a tensor.

    Args:
        name: Checkpoint name, for the error messages.
        tensor: The whole tensor of that name.
        chain: Ops in order; those that return several tensors are followed by `__getitem__`.

    Returns:
        The slice; a view of `tensor` unless the chain forced a copy.

    Raises:
        SyncError: An op is not allowed, is malformed or does not fit the tensor.
    """
    value: Any = tensor
    for op in chain:
        if not (isinstance(op, tuple) and len(op) == 3):
            raise SyncError(f"{name}: malformed op {op!r}; expected (name, args, kwargs)")
        method, args, kwargs = op
        if method not in ALLOWED_OPS:
            raise SyncError(
                f"{name}: op {method!r} is not allowed; allowed are {', '.join(sorted(ALLOWED_OPS))}"
            )
        if isinstance(value, tuple | list) and method != "__getitem__":
            raise SyncError(f"{name}: op {method!r} after an op that returned several tensors")
        try:
            value = getattr(value, method)(*args, **dict(kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise SyncError(f"{name}: op {method!r} with {args!r} failed: {error}") from error
    if not isinstance(value, torch.Tensor):
        raise SyncError(f"{name}: the op chain ends in {type(value).__name__}, not in a tensor")
    return value


def lay_out(slices: Sequence[torch.Tensor]) -> tuple[list[PackedSlice], int]:
    """Place slices one after another, each at a 16-byte-aligned offset.

    Args:
        slices: Any shapes and dtypes.

    Returns:
        The place of each slice, and the blob's length in bytes (the end of the last slice).

    Raises:
        SyncError: A slice is empty: the consumer would count it as one element.
    """
    places: list[PackedSlice] = []
    end = 0
    for index, piece in enumerate(slices):
        if piece.numel() == 0:
            raise SyncError(
                f"slice {index} of the pull is empty ({list(piece.shape)}); exclude its name from the sync"
            )
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        size = piece.numel() * piece.element_size()
        places.append(PackedSlice(offset, size))
        end = offset + size
    return places, end


def pack(slices: Sequence[torch.Tensor], places: Sequence[PackedSlice], slot: torch.Tensor) -> None:
    """Copy slices into their places in a slot.

    Args:
        slices: What to copy; made contiguous on the way.
        places: From `lay_out` of the same slices.
        slot: 1-D uint8, at least as long as the layout, on the slices' device.
    """
    for piece, place in zip(slices, places, strict=True):
        raw = slot[place.offset_bytes : place.offset_bytes + place.num_bytes]
        raw.view(piece.dtype).view(piece.shape).copy_(piece)

"""Where the slices of a pull lie in its blob, and copying them there.

The layout is the wire contract with the consumer, which computes the same offsets on its own:
slices in key order, each at the next 16-byte-aligned offset, contiguous, no padding at the end.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rdt_e2e.errors import SyncError

ALIGNMENT_BYTES = 16


class PackedSlice(NamedTuple):
    """Where one slice lies in a blob."""

    offset_bytes: int
    num_bytes: int


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
        places.append(PackedSlice(offset, piece.nbytes))
        end = offset + piece.nbytes
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

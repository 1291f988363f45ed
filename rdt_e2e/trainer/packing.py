"""Where the slices of a pull lie in its blob, and copying them there.

The layout is the wire contract with the consumer, which computes the same offsets on its own:
slices in key order, each at the next 16-byte-aligned offset, contiguous, no padding at the end.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rdt_e2e.errors import SyncError
from rdt_e2e.fabric.words import as_bytes, as_words

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


class Source(NamedTuple):
    """A slice to copy.

    Attributes:
        piece: The slice.
        words: Its bytes as 1-D int64, or None where strides, length or address do not allow it.
    """

    piece: torch.Tensor
    words: torch.Tensor | None


def source(piece: torch.Tensor) -> Source:
    """Prepare a slice for `CopyList.fill`."""
    if not piece.is_contiguous():
        return Source(piece, None)
    return Source(piece, as_words(as_bytes(piece)))


class CopyList:
    """The places of a blob in one slot, ready to be filled again and again.

    What can be copied as eight-byte words goes in one call for all of them: launched one by one, 300
    copies take longer than their bytes.

    Args:
        places: From `lay_out`.
        slot: 1-D uint8, at least as long as the layout.
    """

    def __init__(self, places: Sequence[PackedSlice], slot: torch.Tensor) -> None:
        self._raw = [slot[one.offset_bytes : one.offset_bytes + one.num_bytes] for one in places]
        self._words = [as_words(raw) for raw in self._raw]

    def fill(self, sources: Sequence[Source]) -> None:
        """Copy slices to their places; each has the length of its place."""
        targets: list[torch.Tensor] = []
        words: list[torch.Tensor] = []
        for (piece, source_words), raw, target in zip(sources, self._raw, self._words, strict=True):
            if source_words is None or target is None:
                raw.view(piece.dtype).view(piece.shape).copy_(piece)
            else:
                targets.append(target)
                words.append(source_words)
        if targets:
            torch._foreach_copy_(targets, words)


def pack(slices: Sequence[torch.Tensor], places: Sequence[PackedSlice], slot: torch.Tensor) -> None:
    """Copy slices into their places in a slot, once.

    Args:
        slices: What to copy; made contiguous on the way.
        places: From `lay_out` of the same slices.
        slot: 1-D uint8, at least as long as the layout, on the slices' device.
    """
    CopyList(places, slot).fill([source(piece) for piece in slices])

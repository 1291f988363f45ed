"""Checkpoints whose bytes are computed and not stored: for measuring at sizes no disk here holds.

A synthetic checkpoint is a folder like any other (`config.json`, index, shards with real headers) whose
shards are sparse files without content, plus `synthetic.json`, which holds a seed. Every byte is a pure
function of the seed, the tensor's name and the byte's position, computed on the device that needs it.
So any rank can make any rows, and an inference worker can make all of them a second time, on a path that
shares nothing with the trainer, the packing or the wire.

The weights mean nothing: finite numbers of a harmless size, for timing and for comparing bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Protocol, Self

import torch

from rdt_e2e.checkpoint.stream import Rows, ShardReader
from rdt_e2e.errors import CheckpointError, PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from rdt_e2e.checkpoint.index import CheckpointIndex
    from rdt_e2e.checkpoint.layout import HeldTensor

MARKER_FILE = "synthetic.json"
"""Its presence makes a checkpoint folder a synthetic one."""

WINDOW_WORDS = 4 << 20
"""Words of eight bytes made at a time; a window needs about three times its size on the device."""

_KEEP_AND_SET = {
    # Clears the top exponent bit: no NaN, magnitudes below 2.
    "float8_e4m3fn": (0xBF, 0x00, 1),
    # Plus or minus 2**-6 to 2**-5.
    "bfloat16": (0x807F, 0x3C80, 2),
    # 2**-7 to 2**-6: positive, so that it serves as a block scale and as a router bias.
    "float32": (0x007FFFFF, 0x3C000000, 4),
}
"""Per dtype: bits of the random word that are kept, bits that are set, and bytes per element."""


class RowReader(Protocol):
    """What fills the rows of held tensors, off a disk or out of nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def read_all(self, wanted: Iterable[Rows]) -> int:
        """Fill several tensors with rows of held tensors; returns the bytes written."""

    def read_rows(self, held: HeldTensor, start: int, stop: int, out: torch.Tensor) -> int:
        """Fill `out` with rows `start` to `stop` of a held tensor; returns the bytes written."""


class SyntheticRows:
    """Makes rows of held tensors; takes the place of `ShardReader` for a synthetic checkpoint.

    Args:
        index: Index of the checkpoint, from `read_index`.

    Raises:
        CheckpointError: The marker file cannot be used.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._seed = read_seed(index.root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Nothing is held open."""

    def read_all(self, wanted: Iterable[Rows]) -> int:
        """Fill several tensors; each as in `read_rows`."""
        return sum(self.read_rows(*rows) for rows in wanted)

    def read_rows(self, held: HeldTensor, start: int, stop: int, out: torch.Tensor) -> int:
        """Fill a tensor with rows of a held tensor.

        Args:
            held: The held tensor, from `build_layout` on the same index.
            start: First row of dim 0.
            stop: Row after the last.
            out: Contiguous tensor `[stop - start, ...]` of the held dtype, on any device; overwritten.

        Returns:
            Number of bytes written to `out`.

        Raises:
            PlanError: Rows, shape, dtype or strides of `out` do not fit the held tensor.
        """
        expected = (stop - start, *held.shape[1:])
        if tuple(out.shape) != expected or out.dtype != getattr(torch, held.dtype):
            raise PlanError(
                f"rows {start} to {stop} of {held.key} need a tensor {list(expected)} of "
                f"{held.dtype}, and were given {list(out.shape)} of {out.dtype}"
            )
        if not out.is_contiguous():
            raise PlanError(f"rows of {held.key} can only be made in contiguous memory")
        if held.stacked:
            for row in range(start, stop):
                fill(self._seed, held.names[row], held.dtype, 0, out[row - start])
        elif start < stop:
            row_bytes = math.prod(held.shape[1:]) * out.element_size()
            fill(self._seed, held.key, held.dtype, start * row_bytes, out)
        return out.numel() * out.element_size()


def open_rows(index: CheckpointIndex) -> RowReader:
    """The reader for a checkpoint: off its shards, or the generator of a synthetic one.

    Raises:
        CheckpointError: It is marked as synthetic, and the marker cannot be used.
    """
    return SyntheticRows(index) if is_synthetic(index.root) else ShardReader(index)


def is_synthetic(root: Path) -> bool:
    """Whether a checkpoint folder holds no bytes, only the seed they are computed from."""
    return (root / MARKER_FILE).is_file()


def write_marker(root: Path, seed: int) -> None:
    """Mark a checkpoint folder as synthetic; another seed is another weight version."""
    (root / MARKER_FILE).write_text(json.dumps({"seed": seed}) + "\n")


def read_seed(root: Path) -> int:
    """The seed of a synthetic checkpoint.

    Raises:
        CheckpointError: The marker file is missing or damaged.
    """
    path = root / MARKER_FILE
    try:
        seed = json.loads(path.read_text())["seed"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: no seed can be read from it ({error}). Write the synthetic checkpoint again."
        ) from error
    if not isinstance(seed, int):
        raise CheckpointError(f"{path}: seed is {seed!r} and not a whole number. Write it again.")
    return seed


def named_tensors(
    index: CheckpointIndex, device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Make every tensor of a synthetic checkpoint, whole, one after another.

    Args:
        index: Index of the checkpoint, from `read_index`.
        device: Where to make them.

    Yields:
        Name and tensor, in the order of the index; each is new memory.

    Raises:
        CheckpointError: The folder is not a synthetic checkpoint, or has a dtype that cannot be made.
    """
    seed = read_seed(index.root)
    for name, entry in index.entries.items():
        out = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
        fill(seed, name, entry.dtype, 0, out)
        yield name, out


def fill(seed: int, name: str, dtype: str, first_byte: int, out: torch.Tensor) -> None:
    """Write a stretch of a synthetic tensor's bytes.

    The eight bytes at position 8 w are a mix of w and of the first 64 bits of SHA-256 over seed and
    name, with the exponent bits of the dtype forced into a harmless range.

    Args:
        seed: The checkpoint's seed.
        name: Checkpoint name of the tensor.
        dtype: Torch name of its dtype.
        first_byte: Position in the tensor of the first byte to write; a multiple of the element size.
        out: Contiguous memory of the dtype, any shape, on any device.

    Raises:
        CheckpointError: The dtype cannot be made.

    Source: the mixing steps are those of splitmix64 (Steele, Lea, Flood, 2014), on signed words.
    """
    if dtype not in _KEEP_AND_SET:
        raise CheckpointError(
            f"{name}: synthetic weights of {dtype} cannot be made; known are {', '.join(_KEEP_AND_SET)}"
        )
    keep, force, element_bytes = _KEEP_AND_SET[dtype]
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    origin = int.from_bytes(digest[:8], "little", signed=True)
    raw = out.reshape(-1).view(torch.uint8)
    for begin in range(0, raw.numel(), WINDOW_WORDS * 8):
        window = raw[begin : begin + WINDOW_WORDS * 8]
        at = first_byte + begin
        words = _mix(at // 8, -(-(at + window.numel()) // 8), origin, out.device)
        words.bitwise_and_(_repeat(keep, element_bytes)).bitwise_or_(_repeat(force, element_bytes))
        window.copy_(words.view(torch.uint8)[at % 8 : at % 8 + window.numel()])


def _mix(first: int, stop: int, origin: int, device: torch.device) -> torch.Tensor:
    words = torch.arange(first, stop, dtype=torch.int64, device=device)
    words.mul_(_signed(0x9E3779B97F4A7C15)).add_(origin)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words.bitwise_xor_(words >> shift).mul_(_signed(factor))
    return words.bitwise_xor_(words >> 31)


def _repeat(pattern: int, element_bytes: int) -> int:
    """One 64-bit word, as a signed number, that holds an element's bits over and over."""
    raw = pattern.to_bytes(element_bytes, "little") * (8 // element_bytes)
    return int.from_bytes(raw, "little", signed=True)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word

"""Rows of held tensors, read off the shards straight into the memory that keeps them.

Each trainer rank reads only its own rows: a row range of a single tensor, or whole experts of a stack.
Bytes go from the file into the shard in one copy, in large reads and in the order in which they lie on the
disk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from rdt_e2e.checkpoint.headers import read_header
from rdt_e2e.errors import CheckpointError, PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from rdt_e2e.checkpoint.headers import TensorEntry
    from rdt_e2e.checkpoint.index import CheckpointIndex
    from rdt_e2e.checkpoint.layout import HeldTensor

STAGE_BYTES = 64 << 20
"""Bytes on their way to a device, or to memory with gaps, at a time; one larger row is taken whole."""


class Rows(NamedTuple):
    """Rows `start` to `stop` of a held tensor, and where they go."""

    held: HeldTensor
    start: int
    stop: int
    out: torch.Tensor


@dataclass(frozen=True)
class _Piece:
    """One stretch of a file: consecutive rows of one tensor."""

    entry: TensorEntry
    first_row: int
    out: torch.Tensor

    @property
    def begin(self) -> int:
        """Offset from the start of the tensor."""
        return self.first_row * (self.entry.num_bytes // (self.entry.shape or (1,))[0])


@dataclass(frozen=True)
class _Shard:
    """An open shard: its descriptor and what its header says now."""

    descriptor: int
    entries: Mapping[str, TensorEntry]


class ShardReader:
    """Reads rows of held tensors and keeps the shards it has opened.

    Use it as a context manager around the load of one rank; leaving it closes every shard.

    Args:
        index: Index of the checkpoint, from `read_index`.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._shards: dict[str, _Shard] = {}
        self._stage = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every shard; the next read opens its shard again."""
        while self._shards:
            _, shard = self._shards.popitem()
            os.close(shard.descriptor)

    def read_all(self, wanted: Iterable[Rows]) -> int:
        """Fill several tensors, file by file and front to back.

        Args:
            wanted: What to read; each as in `read_rows`.

        Returns:
            Number of bytes written.

        Raises:
            PlanError: Rows, shape or dtype do not fit a held tensor.
            CheckpointError: A shard cannot be read, or no longer holds what was indexed.
        """
        pieces = [piece for rows in wanted for piece in self._pieces(rows)]
        for piece in sorted(pieces, key=lambda one: (one.entry.file, one.entry.begin, one.begin)):
            self._fill(piece)
        return sum(piece.out.numel() * piece.out.element_size() for piece in pieces)

    def read_rows(self, held: HeldTensor, start: int, stop: int, out: torch.Tensor) -> int:
        """Fill a tensor with rows of a held tensor.

        Args:
            held: The held tensor, from `build_layout` on the same index.
            start: First row of dim 0.
            stop: Row after the last; equal to `start` for a rank that holds nothing.
            out: Tensor `[stop - start, ...]` of the held dtype, on any device; overwritten.

        Returns:
            Number of bytes written to `out`.

        Raises:
            PlanError: Rows, shape or dtype do not fit the held tensor.
            CheckpointError: A shard cannot be read, or no longer holds what was indexed.
        """
        return self.read_all([Rows(held, start, stop, out)])

    def read_whole(self, name: str) -> torch.Tensor:
        """Read one tensor.

        Args:
            name: A name of the index.

        Returns:
            The tensor in checkpoint form, on CPU.

        Raises:
            CheckpointError: Its shard cannot be read, or no longer holds what was indexed.
        """
        entry = self._index.entries[name]
        whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        self._fill(_Piece(entry, 0, whole))
        return whole

    def _pieces(self, rows: Rows) -> list[_Piece]:
        held, start, stop, out = rows
        if not 0 <= start <= stop <= held.shape[0]:
            raise PlanError(
                f"rows {start} to {stop} of {held.key} were asked for, which has {held.shape[0]}. "
                "Take the rows from shard_rows."
            )
        expected = (stop - start, *held.shape[1:])
        if tuple(out.shape) != expected or out.dtype != getattr(torch, held.dtype):
            raise PlanError(
                f"rows {start} to {stop} of {held.key} need a tensor {list(expected)} of "
                f"{held.dtype}, and were given {list(out.shape)} of {out.dtype}. Build the "
                "parameters from the layout of this checkpoint."
            )
        entries = self._index.entries
        if held.stacked:
            return [
                _Piece(entries[held.names[row]], 0, out[row - start]) for row in range(start, stop)
            ]
        return [_Piece(entries[held.key], start, out)] if start < stop else []

    def _fill(self, piece: _Piece) -> None:
        entry = piece.entry
        path = self._index.root / entry.file
        try:
            shard = self._open(entry.file)
            now = shard.entries[entry.name]
        except (OSError, KeyError, CheckpointError) as error:
            raise self._unreadable(entry, error) from error
        if (now.dtype, now.shape) != (entry.dtype, entry.shape):
            raise CheckpointError(
                f"{path}: {entry.name} is {now.dtype} {list(now.shape)} and no longer {entry.dtype} "
                f"{list(entry.shape)}. The file has changed since it was indexed; start over."
            )
        try:
            self._read(shard.descriptor, now.begin + piece.begin, piece.out)
        except OSError as error:
            raise self._unreadable(entry, error) from error

    def _read(self, descriptor: int, offset: int, out: torch.Tensor) -> None:
        if out.device.type == "cpu" and out.is_contiguous():
            _read_exactly(descriptor, offset, _raw(out))
            return
        rows = out.unsqueeze(0) if out.dim() == 0 else out
        row_bytes = rows[0].numel() * rows.element_size()
        step = max(1, STAGE_BYTES // row_bytes)
        for first in range(0, rows.shape[0], step):
            part = rows[first : first + step]
            stage = self._staged(part.numel() * part.element_size(), pinned=part.is_cuda)
            _read_exactly(descriptor, offset + first * row_bytes, _raw(stage))
            part.copy_(stage.view(part.dtype).view(part.shape))

    def _staged(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        if self._stage.numel() < num_bytes:
            size = max(num_bytes, STAGE_BYTES)
            self._stage = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._stage[:num_bytes]

    def _open(self, file: str) -> _Shard:
        if file not in self._shards:
            entries = read_header(self._index.root, file)
            descriptor = os.open(self._index.root / file, os.O_RDONLY)
            self._shards[file] = _Shard(descriptor, entries)
        return self._shards[file]

    def _unreadable(self, entry: TensorEntry, error: Exception) -> CheckpointError:
        why = "it is not there any more" if isinstance(error, KeyError) else error
        return CheckpointError(
            f"{self._index.root / entry.file}: {entry.name} cannot be read ({why}). The file has "
            "changed since it was indexed, or its disk fails; fetch this shard again and start over."
        )


def _raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    raw: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return raw


def _read_exactly(descriptor: int, offset: int, into: memoryview) -> None:
    while into:
        count = os.preadv(descriptor, [into], offset)
        if count == 0:
            raise OSError(f"it ends at byte {offset}")
        into, offset = into[count:], offset + count

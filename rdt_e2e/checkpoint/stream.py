"""Rows of held tensors, read off the shards straight into the memory that keeps them.

Each trainer rank reads only its own rows: a row range of a single tensor, or whole experts of a
stack. Files are mapped, so only the pages of those rows come off the disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self, cast

import torch
from safetensors import SafetensorError, safe_open

from rdt_e2e.errors import CheckpointError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rdt_e2e.checkpoint.index import CheckpointIndex
    from rdt_e2e.checkpoint.layout import HeldTensor


class _Slice(Protocol):
    def __getitem__(self, rows: slice) -> torch.Tensor: ...


class _Handle(Protocol):
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...
    def __exit__(self, *error: object) -> None: ...


class ShardReader:
    """Reads rows of held tensors and keeps the shards it has opened.

    Use it as a context manager around the load of one rank; leaving it closes every shard.

    Args:
        index: Index of the checkpoint, from `read_index`.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._handles: dict[str, _Handle] = {}

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
        while self._handles:
            _, handle = self._handles.popitem()
            handle.__exit__(None, None, None)

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
        self._check_request(held, start, stop, out)
        if start == stop:
            return 0
        if held.stacked:
            for row in range(start, stop):
                self._copy(held.names[row], out[row - start], rows=None)
        elif not self._index.entries[held.key].shape:
            self._copy(held.key, out[0], rows=None)
        else:
            self._copy(held.key, out, rows=slice(start, stop))
        return out.numel() * out.element_size()

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
        self._copy(name, whole, rows=None)
        return whole

    def _check_request(self, held: HeldTensor, start: int, stop: int, out: torch.Tensor) -> None:
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

    def _copy(self, name: str, out: torch.Tensor, rows: slice | None) -> None:
        entry = self._index.entries[name]
        path = self._index.root / entry.file
        try:
            handle = self._open(entry.file)
            part = handle.get_tensor(name) if rows is None else handle.get_slice(name)[rows]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: {name} cannot be read ({error}). The file has changed since it was "
                "indexed, or its disk fails; fetch this shard again and start over."
            ) from error
        # A copy would broadcast or convert a tensor that has changed under the index.
        if part.shape != out.shape or part.dtype != out.dtype:
            raise CheckpointError(
                f"{path}: {name} is {part.dtype} {list(part.shape)} and no longer {out.dtype} "
                f"{list(out.shape)}. The file has changed since it was indexed; start over."
            )
        out.copy_(part)

    def _open(self, file: str) -> _Handle:
        if file not in self._handles:
            # The library's own annotations stop at its constructor.
            open_shard = cast("Callable[..., _Handle]", safe_open)
            self._handles[file] = open_shard(self._index.root / file, framework="pt", device="cpu")
        return self._handles[file]

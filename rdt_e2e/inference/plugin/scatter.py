"""Copying a landed chunk into the parameters it was pulled for."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rdt_e2e.fabric.words import WORD_BYTES, as_bytes, as_words

MAX_INTERLEAVE = 4
"""Experts' slices of several kinds take turns in a blob; runs are looked for in each of this many."""


class Copy(NamedTuple):
    """One copy, in words of the parameter and of the slot."""

    target: int
    source: int
    length: int


class Run(NamedTuple):
    """`num_copies` copies of `length` words at constant distances, made as one strided copy."""

    target: int
    source: int
    length: int
    num_copies: int
    target_step: int
    source_step: int


class Stack(NamedTuple):
    """The copies into one parameter."""

    scatters: list[Any]
    runs: list[Run]


class ScatterList:
    """The copies of one chunk, found once and made in every sync.

    A Kimi K2 layer lands in some 300 slices. One by one, their copies take longer to launch than to
    run; the rows of a stack of experts lie at constant distances on both sides, so that they go in a
    few strided copies of eight-byte words, all of them in one call. What does not fit that is copied
    slice by slice.

    Args:
        chunk: A pull of the plan: its keys, their places in the blob, and the recorded copies.

    Source: `_Chunk` and `_Scatter` in `vllm/distributed/weight_transfer/` (0.32.0).
    """

    def __init__(self, chunk: Any) -> None:
        offsets = {key: place[0] for key, place in zip(chunk.keys, chunk.pack_layout, strict=True)}
        self._plain: list[Any] = []
        scatters: dict[tuple[int, str], list[Any]] = defaultdict(list)
        copies: dict[tuple[int, str], list[Copy]] = defaultdict(list)
        for scatter in chunk.scatters:
            words = _word_range(scatter)
            if words is None or offsets[scatter.src] % WORD_BYTES:
                self._plain.append(scatter)
                continue
            owner = (id(scatter.layer), scatter.param_name)
            scatters[owner].append(scatter)
            copies[owner].append(Copy(words[0], offsets[scatter.src] // WORD_BYTES, words[1]))
        self._stacks = [Stack(scatters[owner], find_runs(copies[owner])) for owner in scatters]
        self._sources: tuple[int, list[list[torch.Tensor]]] = (0, [])

    @torch.no_grad()
    def copy(self, blob: torch.Tensor, results: Mapping[Any, torch.Tensor]) -> None:
        """Copy every landed slice to its place.

        Args:
            blob: The slot, 1-D uint8, at an address and of a length that are whole words.
            results: The slices by source, views of the slot.
        """
        plain = list(self._plain)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for stack, views in zip(self._stacks, self._views(blob), strict=True):
            first = stack.scatters[0]
            words = _words_of(getattr(first.layer, first.param_name), first.dtype)
            if words is None:
                plain += stack.scatters
                continue
            sources += views
            targets += [
                words.as_strided((run.num_copies, run.length), (run.target_step, 1), run.target)
                for run in stack.runs
            ]
        if targets:
            torch._foreach_copy_(targets, sources)
        for scatter in plain:
            parameter = getattr(scatter.layer, scatter.param_name)
            place = parameter.data.as_strided(scatter.shape, scatter.stride, scatter.offset)
            with torch._C.DisableTorchFunctionSubclass():
                place.copy_(results[scatter.src])

    def _views(self, blob: torch.Tensor) -> list[list[torch.Tensor]]:
        """What each run reads, by stack; a chunk lands in the same slot in every sync."""
        address, views = self._sources
        if address != blob.data_ptr():
            words = blob[: blob.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64)
            views = [
                [
                    words.as_strided((run.num_copies, run.length), (run.source_step, 1), run.source)
                    for run in stack.runs
                ]
                for stack in self._stacks
            ]
            self._sources = (blob.data_ptr(), views)
        return views


def find_runs(copies: Sequence[Copy]) -> list[Run]:
    """Join copies of one length at constant distances into as few runs as are easily found."""
    runs: list[Run] = []
    by_length: dict[int, list[Copy]] = defaultdict(list)
    for copy in sorted(copies):
        by_length[copy.length].append(copy)
    for same in by_length.values():
        best = _greedy_runs(same)
        for step in range(2, 1 + MAX_INTERLEAVE):
            found = [run for first in range(step) for run in _greedy_runs(same[first::step])]
            if len(found) < len(best):
                best = found
        runs += best
    return runs


def _greedy_runs(copies: Sequence[Copy]) -> list[Run]:
    runs: list[Run] = []
    for copy in copies:
        last = runs[-1] if runs else None
        if last is not None:
            steps = (last.target_step, last.source_step)
            end = last.num_copies - 1
            gap = (
                copy.target - (last.target + end * last.target_step),
                copy.source - (last.source + end * last.source_step),
            )
            if last.num_copies == 1 or gap == steps:
                runs[-1] = last._replace(
                    num_copies=last.num_copies + 1, target_step=gap[0], source_step=gap[1]
                )
                continue
        runs.append(Run(*copy, num_copies=1, target_step=copy.length, source_step=copy.length))
    return runs


def _word_range(scatter: Any) -> tuple[int, int] | None:
    """First word and number of words of a region in its parameter, if it is one run of whole words."""
    expected = 1
    for size, stride in zip(reversed(scatter.shape), reversed(scatter.stride), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    item = scatter.dtype.itemsize
    start, length = scatter.offset * item, math.prod(scatter.shape) * item
    if start % WORD_BYTES or length % WORD_BYTES:
        return None
    return start // WORD_BYTES, length // WORD_BYTES


def _words_of(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """A parameter's memory as words; None if it has another dtype, gaps or an odd address."""
    data = parameter.data
    if data.dtype != dtype or not data.is_contiguous() or data.storage_offset() != 0:
        return None
    if data.dim() and data.shape[-1] * data.itemsize % WORD_BYTES == 0:
        return data.view(torch.int64)
    return as_words(as_bytes(data))

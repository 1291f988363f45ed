"""Copying a landed chunk into the parameters it was pulled for."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rdt_e2e.trainer.packing import Source, source

WORD_BYTES = 8


class ScatterList:
    """The copies of one chunk, ready to be made in every sync.

    Copies into contiguous regions are made as eight-byte words, in one call for all of them: one by
    one, the 300 copies of a Kimi K2 layer take longer to launch than to run.

    Args:
        scatters: Recorded copies, each into a strided region of a parameter.

    Source: `_Scatter` in `vllm/distributed/weight_transfer/sharded_rdt_fake.py` (0.32.0).
    """

    def __init__(self, scatters: Sequence[Any]) -> None:
        self._copies = [(one, _word_range(one)) for one in scatters]
        self._sources: dict[int, Source] = {}

    @torch.no_grad()
    def copy(self, results: Mapping[Any, torch.Tensor]) -> None:
        """Copy every landed slice to its place.

        Args:
            results: Slice by source, views of a receive slot that stay the same for each slot.
        """
        targets: list[torch.Tensor] = []
        words: list[torch.Tensor] = []
        flat: dict[int, torch.Tensor | None] = {}
        for scatter, word_range in self._copies:
            parameter = getattr(scatter.layer, scatter.param_name)
            piece = results[scatter.src]
            landed = self._source(piece)
            target = None
            if word_range is not None and landed.words is not None:
                if id(parameter) not in flat:
                    flat[id(parameter)] = _as_words(parameter.data)
                whole = flat[id(parameter)]
                if whole is not None and parameter.dtype == scatter.dtype:
                    target = whole[word_range[0] : word_range[1]]
            if target is None or landed.words is None:
                place = parameter.data.as_strided(scatter.shape, scatter.stride, scatter.offset)
                with torch._C.DisableTorchFunctionSubclass():
                    place.copy_(piece)
            else:
                targets.append(target)
                words.append(landed.words)
        if targets:
            torch._foreach_copy_(targets, words)

    def _source(self, piece: torch.Tensor) -> Source:
        found = self._sources.get(id(piece))
        if found is None:
            # Holds the slice too, so that its id stays its own.
            found = self._sources[id(piece)] = source(piece)
        return found


def _word_range(scatter: Any) -> tuple[int, int] | None:
    """First and last word of a region in its parameter's memory, if it is one run of whole words."""
    expected = 1
    for size, stride in zip(reversed(scatter.shape), reversed(scatter.stride), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    item = scatter.dtype.itemsize
    start, length = scatter.offset * item, math.prod(scatter.shape) * item
    if start % WORD_BYTES or length % WORD_BYTES:
        return None
    return start // WORD_BYTES, (start + length) // WORD_BYTES


def _as_words(parameter: torch.Tensor) -> torch.Tensor | None:
    if not parameter.is_contiguous() or parameter.storage_offset() != 0:
        return None
    raw = parameter.detach().reshape(-1).view(torch.uint8)
    if raw.numel() % WORD_BYTES or raw.data_ptr() % WORD_BYTES:
        return None
    return raw.view(torch.int64)

"""Cutting one pull into several of bounded size. Pure arithmetic on recorded copies."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rdt_e2e.trainer.packing import ALIGNMENT_BYTES


def split_scatters(scatters: Sequence[Any], max_bytes: int) -> list[list[Any]]:
    """Cut the copies of one chunk into runs whose blobs stay within a limit.

    Order is kept, so that a module is complete with its last run. A copy larger than the limit is
    cut along its first dimension; a single row larger than it stays whole.

    Args:
        scatters: Recorded copies of one gather group and one owner class: source (name, op chain),
            shape, strides and offset of the destination, dtype.
        max_bytes: Most bytes of one blob.

    Returns:
        The runs; concatenated they copy what `scatters` copies.

    Source: `_Scatter` in `vllm/distributed/weight_transfer/sharded_rdt_fake.py` (0.32.0).
    """
    runs: list[list[Any]] = []
    keys: set[Any] = set()
    end = 0
    for scatter in (part for one in scatters for part in _cut(one, max_bytes)):
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        size = 0 if scatter.src in keys else _num_bytes(scatter)
        if not runs or (size and start + size > max_bytes):
            runs.append([])
            keys.clear()
            start, size = 0, _num_bytes(scatter)
        if size:
            end = start + size
        keys.add(scatter.src)
        runs[-1].append(scatter)
    return runs


def _cut(scatter: Any, max_bytes: int) -> Iterator[Any]:
    size = _num_bytes(scatter)
    if size <= max_bytes or not scatter.shape or scatter.shape[0] == 1:
        yield scatter
        return
    num_rows = scatter.shape[0]
    step = max(1, max_bytes // (size // num_rows))
    name, chain = scatter.src
    for start in range(0, num_rows, step):
        length = min(step, num_rows - start)
        yield dataclasses.replace(
            scatter,
            # The slice has the copy's element count, not always its shape: give it the shape first.
            src=(
                name,
                (*chain, ("reshape", scatter.shape, ()), ("narrow", (0, start, length), ())),
            ),
            shape=(length, *scatter.shape[1:]),
            offset=scatter.offset + start * scatter.stride[0],
        )


def _num_bytes(scatter: Any) -> int:
    size: int = math.prod(scatter.shape) * scatter.dtype.itemsize
    return size

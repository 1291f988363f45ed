"""Chunks of bounded size copy the same bytes as one chunk does."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_e2e.inference.plugin.chunk_split import split_scatters
from rdt_e2e.inference.plugin.internals import Scatter
from rdt_e2e.trainer.packing import lay_out
from rdt_e2e.trainer.replay import check_key, replay
from tests.synthetic import raw_bytes

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32]


def scatter(name, shape, dtype, chain=(), offset=0, strides=None):
    strides = torch.empty(shape, device="meta").stride() if strides is None else strides
    return Scatter(object(), "weight", (name, chain), offset, shape, strides, dtype)


SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
SCATTERS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=8)


def tensors_of(cases):
    generator = torch.Generator().manual_seed(0)
    made = {}
    for i, (shape, dtype) in enumerate(cases):
        size = math.prod(shape) * dtype.itemsize
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        made[f"n{i}"] = raw.view(dtype).view(shape)
    return made


@given(SCATTERS, st.integers(1, 600))
def test_any_limit_copies_every_byte_to_its_place(cases, limit):
    sources = tensors_of(cases)
    scatters = [scatter(f"n{i}", shape, dtype) for i, (shape, dtype) in enumerate(cases)]
    targets = {name: torch.zeros_like(tensor) for name, tensor in sources.items()}
    for run in split_scatters(scatters, limit):
        slices = []
        for one in run:
            name, chain = check_key(one.src)
            piece = replay(name, sources[name], chain)
            slices.append(piece)
            place = targets[name].as_strided(one.shape, one.stride, one.offset)
            place.copy_(piece.view(one.shape))
        _, num_bytes = lay_out(slices)
        largest_row = max(
            piece.nbytes // (piece.shape[0] if piece.dim() else 1) for piece in slices
        )
        assert num_bytes <= limit or (len(slices) == 1 and num_bytes <= largest_row)
    for name, tensor in sources.items():
        assert raw_bytes(targets[name]) == raw_bytes(tensor)


def test_copies_keep_their_order_and_a_limit_above_all_cuts_nothing():
    scatters = [scatter(f"n{i}", (4, 4), torch.float32) for i in range(5)]
    assert split_scatters(scatters, 10_000) == [scatters]
    runs = split_scatters(scatters, 130)
    assert [len(run) for run in runs] == [2, 2, 1]
    assert [one for run in runs for one in run] == scatters


def test_a_source_copied_twice_counts_once_in_a_run():
    twice = [scatter("n", (4, 4), torch.float32) for _ in range(2)]
    assert split_scatters(twice, 64) == [twice]


@pytest.mark.parametrize("limit", [16, 64, 150])
def test_a_large_copy_is_cut_along_its_rows(limit):
    one = scatter("n", (10, 4), torch.float32, (("t", (), ()),), offset=7, strides=(8, 1))
    parts = [part for run in split_scatters([one], limit) for part in run]
    assert sum(part.shape[0] for part in parts) == 10
    start = 0
    for part in parts:
        assert part.offset == 7 + start * 8
        assert part.src[1][0] == ("t", (), ())
        assert part.src[1][-1] == ("narrow", (0, start, part.shape[0]), ())
        assert math.prod(part.shape) * 4 <= limit
        start += part.shape[0]

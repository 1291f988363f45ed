"""Packing, held against a plain torch reference that shares no code with it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_e2e.errors import SyncError
from rdt_e2e.trainer.packing import lay_out, pack
from rdt_e2e.trainer.replay import OpSpec, check_key, replay
from tests.synthetic import raw_bytes

DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int8,
    torch.int32,
)


def make(dtype, shape):
    """Every byte pattern, so that an exchanged or shifted byte shows."""
    numel = 1
    for size in shape:
        numel *= size
    raw = torch.arange(numel * dtype.itemsize, dtype=torch.int64).mul(37).to(torch.uint8)
    return raw.view(dtype).view(shape)


def packed(slices):
    places, end = lay_out(slices)
    slot = torch.full((end + 64,), 0xEE, dtype=torch.uint8)
    pack(slices, places, slot)
    return places, end, bytes(slot.tolist())


def test_offsets_are_the_hand_computed_ones():
    slices = [
        make(torch.float8_e4m3fn, (3, 5)),
        make(torch.bfloat16, (9,)),
        make(torch.float32, (1,)),
    ]
    places, end, blob = packed(slices)
    assert [(p.offset_bytes, p.num_bytes) for p in places] == [(0, 15), (16, 18), (48, 4)]
    assert end == 52
    assert blob[:15] == raw_bytes(slices[0])
    assert blob[16:34] == raw_bytes(slices[1])
    assert blob[48:52] == raw_bytes(slices[2])
    assert set(blob[52:]) == {0xEE}, "bytes after the blob's end were written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_byte_exact(dtype):
    slices = [make(dtype, (7, 3)), make(dtype, ()), make(dtype, (1, 1, 5))]
    places, _, blob = packed(slices)
    for piece, place in zip(slices, places, strict=True):
        assert blob[place.offset_bytes : place.offset_bytes + place.num_bytes] == raw_bytes(piece)


def test_an_empty_slice_is_refused():
    with pytest.raises(SyncError, match="slice 1 of the pull is empty"):
        lay_out([torch.ones(2), torch.ones(0, 4)])


@st.composite
def op_chains(draw):
    """A tensor, a chain of allowed ops that fits it, and the result by plain slicing."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    tensor = make(dtype, tuple(shape))
    value: torch.Tensor = tensor
    chain: list[OpSpec] = []
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, value.dim() - 1)) if value.dim() else 0
        choices = ["unsqueeze", "flatten", "contiguous", "reshape"]
        if value.dim():
            choices += [
                "narrow",
                "transpose",
                "permute",
                "chunk",
                "unbind",
                "__getitem__",
                "squeeze",
            ]
        kind = draw(st.sampled_from(choices))
        ops: list[OpSpec]
        if kind == "narrow":
            start = draw(st.integers(0, value.shape[dim] - 1))
            length = draw(st.integers(1, value.shape[dim] - start))
            ops, value = [(kind, (dim, start, length), ())], value.narrow(dim, start, length)
        elif kind == "transpose":
            other = draw(st.integers(0, value.dim() - 1))
            ops, value = [(kind, (dim, other), ())], value.transpose(dim, other)
        elif kind == "permute":
            order = tuple(draw(st.permutations(range(value.dim()))))
            ops, value = [(kind, order, ())], value.permute(order)
        elif kind == "chunk":
            parts = value.chunk(2, dim=dim)
            pick = draw(st.integers(0, len(parts) - 1))
            ops, value = [(kind, (2,), (("dim", dim),)), ("__getitem__", (pick,), ())], parts[pick]
        elif kind == "unbind":
            parts = value.unbind(dim)
            pick = draw(st.integers(0, len(parts) - 1))
            ops, value = [(kind, (dim,), ()), ("__getitem__", (pick,), ())], parts[pick]
        elif kind == "__getitem__":
            start = draw(st.integers(0, value.shape[0] - 1))
            ops, value = [(kind, (slice(start, None),), ())], value[start:]
        elif kind == "unsqueeze":
            ops, value = [(kind, (0,), ())], value.unsqueeze(0)
        elif kind == "reshape":
            ops, value = [(kind, (-1,), ())], value.reshape(-1)
        else:
            ops, value = [(kind, (), ())], getattr(value, kind)()
        chain += ops
    return tensor, chain, value


@given(cases=st.lists(op_chains(), min_size=1, max_size=5))
def test_any_allowed_chain_packs_and_unpacks_to_the_same_bytes(cases):
    slices = [replay("w", tensor, check_key(("w", chain))[1]) for tensor, chain, _ in cases]
    places, end, blob = packed(slices)
    previous_end = 0
    for (_, _, expected), place in zip(cases, places, strict=True):
        assert place.offset_bytes % 16 == 0
        assert 0 <= place.offset_bytes - previous_end < 16
        previous_end = place.offset_bytes + place.num_bytes
        assert blob[place.offset_bytes : previous_end] == raw_bytes(expected)
    assert end == previous_end

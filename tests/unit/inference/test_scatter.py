"""Landed slices reach their places, whatever the region: one run of words or not."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_e2e.inference.plugin.internals import Scatter
from rdt_e2e.inference.plugin.scatter import Copy, ScatterList, find_runs
from rdt_e2e.trainer.packing import lay_out, pack
from tests.synthetic import raw_bytes

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32]


def random_tensor(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


class Layer:
    """Something with a parameter that is made anew for every sync."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype
        self.renew()

    def renew(self):
        empty = torch.zeros(self.shape, dtype=self.dtype)
        self.weight = torch.nn.Parameter(empty, requires_grad=False)


@st.composite
def regions(draw):
    """A view of a parameter, by slicing and transposing."""
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(DTYPES))
    layer = Layer((3, rows, columns), dtype)
    view = layer.weight.data[draw(st.integers(0, 2))]
    start = draw(st.integers(0, rows - 1))
    view = view.narrow(0, start, draw(st.integers(1, rows - start)))
    if draw(st.booleans()):
        start = draw(st.integers(0, columns - 1))
        view = view.narrow(1, start, draw(st.integers(1, columns - start)))
    if draw(st.booleans()):
        view = view.t()
    return layer, view


def chunk_of(scatters, sources):
    """The chunk that pulls these sources, and the slot it lands in."""
    places, num_bytes = lay_out(list(sources.values()))
    slot = torch.zeros(-(-num_bytes // 8) * 8, dtype=torch.uint8)
    pack(list(sources.values()), places, slot)
    layout = [
        (place.offset_bytes, piece.dtype, piece.numel(), tuple(piece.shape))
        for place, piece in zip(places, sources.values(), strict=True)
    ]
    results = {
        key: slot[off : off + numel * dtype.itemsize].view(dtype).view(shape)
        for key, (off, dtype, numel, shape) in zip(sources, layout, strict=True)
    }
    chunk = SimpleNamespace(keys=list(sources), pack_layout=layout, scatters=scatters)
    return chunk, slot, results


@given(st.lists(regions(), min_size=1, max_size=6))
def test_every_slice_lands_where_a_plain_copy_puts_it(cases):
    scatters, sources, expected = [], {}, []
    for number, (layer, view) in enumerate(cases):
        key = (f"n{number}", ())
        sources[key] = random_tensor(tuple(view.shape), layer.dtype, number)
        place = (view.storage_offset(), tuple(view.shape), tuple(view.stride()))
        scatters.append(Scatter(layer, "weight", key, *place, layer.dtype))
        whole = torch.zeros(layer.shape, dtype=layer.dtype)
        whole.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(sources[key])
        expected.append(whole)
    chunk, slot, results = chunk_of(scatters, sources)
    scatter = ScatterList(chunk)
    for _ in range(2):
        for layer, _ in cases:
            layer.renew()
        scatter.copy(slot, results)
        for (layer, _), whole in zip(cases, expected, strict=True):
            assert torch.equal(layer.weight.data.view(torch.uint8), whole.view(torch.uint8))


def test_a_parameter_of_another_dtype_gets_converted_values():
    layer = Layer((4, 4), torch.float32)
    piece = torch.arange(16, dtype=torch.bfloat16).view(4, 4)
    key = ("n", ())
    scatter = Scatter(layer, "weight", key, 0, (4, 4), (4, 1), torch.bfloat16)
    chunk, slot, results = chunk_of([scatter], {key: piece})
    ScatterList(chunk).copy(slot, results)
    assert torch.equal(layer.weight.data, piece.float())


def test_a_layer_of_experts_takes_a_few_copies():
    """48 experts, gate and up in halves of one stack, down in another: the shape of Kimi K2."""
    w13, w2 = Layer((48, 16, 8), torch.float8_e4m3fn), Layer((48, 8, 8), torch.float8_e4m3fn)
    scatters, sources = [], {}
    for expert in range(48):
        for half, name in enumerate(("gate", "up")):
            key = (f"{expert}.{name}", ())
            sources[key] = random_tensor((8, 8), torch.float8_e4m3fn, 3 * expert + half)
            offset = expert * 128 + half * 64
            scatters.append(Scatter(w13, "weight", key, offset, (8, 8), (8, 1), w13.dtype))
        key = (f"{expert}.down", ())
        sources[key] = random_tensor((8, 8), torch.float8_e4m3fn, 3 * expert + 2)
        scatters.append(Scatter(w2, "weight", key, expert * 64, (8, 8), (8, 1), w2.dtype))
    chunk, slot, results = chunk_of(scatters, sources)
    scatter = ScatterList(chunk)
    assert sum(len(runs) for _, runs in scatter._stacks) <= 4
    scatter.copy(slot, results)
    for expert in range(48):
        for half, name in enumerate(("gate", "up")):
            found = w13.weight.data[expert, 8 * half : 8 * half + 8]
            assert raw_bytes(found) == raw_bytes(sources[f"{expert}.{name}", ()])
        assert raw_bytes(w2.weight.data[expert]) == raw_bytes(sources[f"{expert}.down", ()])


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 3)), max_size=12, unique_by=lambda c: c[0]
    )
)
def test_runs_are_the_same_copies(cases):
    copies = [
        Copy(target * 10, source * 7, length) for source, (target, length) in enumerate(cases)
    ]
    made = [
        Copy(run.target + i * run.target_step, run.source + i * run.source_step, run.length)
        for run in find_runs(copies)
        for i in range(run.num_copies)
    ]
    assert sorted(made) == sorted(copies)

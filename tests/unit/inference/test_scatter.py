"""Landed slices reach their places, whatever the region: one run of words or not."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_e2e.inference.plugin.internals import Scatter
from rdt_e2e.inference.plugin.scatter import ScatterList

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


@given(st.lists(regions(), min_size=1, max_size=6))
def test_every_slice_lands_where_a_plain_copy_puts_it(cases):
    scatters, results, expected = [], {}, []
    for number, (layer, view) in enumerate(cases):
        key = (f"n{number}", ())
        results[key] = random_tensor(tuple(view.shape), layer.dtype, number)
        place = (view.storage_offset(), tuple(view.shape), tuple(view.stride()))
        scatters.append(Scatter(layer, "weight", key, *place, layer.dtype))
        whole = torch.zeros(layer.shape, dtype=layer.dtype)
        whole.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(results[key])
        expected.append(whole)
    scatter = ScatterList(scatters)
    for _ in range(2):
        for layer, _ in cases:
            layer.renew()
        scatter.copy(results)
        for (layer, _), whole in zip(cases, expected, strict=True):
            assert torch.equal(layer.weight.data.view(torch.uint8), whole.view(torch.uint8))


def test_a_parameter_of_another_dtype_gets_converted_values():
    layer = Layer((4, 4), torch.float32)
    piece = torch.arange(16, dtype=torch.bfloat16).view(4, 4)
    key = ("n", ())
    ScatterList([Scatter(layer, "weight", key, 0, (4, 4), (4, 1), torch.bfloat16)]).copy(
        {key: piece}
    )
    assert torch.equal(layer.weight.data, piece.float())

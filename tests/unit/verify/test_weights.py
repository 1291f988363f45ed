"""Fingerprints see every kind of damage that a sync can do."""

import pytest
import torch
from torch import nn

from rdt_e2e.errors import WeightMismatchError
from rdt_e2e.verify.weights import check_same, fingerprint, fingerprints


def tensor(dtype=torch.float8_e4m3fn, shape=(256, 384)):
    numel = shape[0] * shape[1] * dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def flip_a_byte(t):
    t.view(torch.uint8).view(-1)[1000] ^= 1


def swap_rows(t):
    t[[3, 7]] = t[[7, 3]]


def permute_blocks(t):
    t[:128, :128], t[128:, :128] = t[128:, :128].clone(), t[:128, :128].clone()


def shift_by_one(t):
    t.view(torch.uint8).view(-1).copy_(t.view(torch.uint8).view(-1).roll(1))


def exchange_two_bytes(t):
    raw = t.view(torch.uint8).view(-1)
    raw[10], raw[11] = raw[11].clone(), raw[10].clone()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "damage", [flip_a_byte, swap_rows, permute_blocks, shift_by_one, exchange_two_bytes]
)
def test_damage_changes_the_fingerprint(damage, dtype):
    whole, damaged = tensor(dtype), tensor(dtype)
    assert fingerprint(whole) == fingerprint(damaged)
    damage(damaged.view(torch.uint8).view(256, -1))
    assert fingerprint(whole) != fingerprint(damaged)


def test_strides_do_not_matter():
    whole = tensor(torch.float32)
    assert fingerprint(whole.t().contiguous().t()) == fingerprint(whole)


def test_dtype_and_shape_count():
    ones = torch.zeros(4, dtype=torch.int32)
    assert len({fingerprint(t) for t in (ones, ones.view(2, 2), ones.view(torch.float32))}) == 3
    assert fingerprint(torch.zeros(())) != fingerprint(torch.zeros(0))


class Model(nn.Module):
    """A parameter, a buffer, an absorbed matrix and a cache."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.register_buffer("bias_of_router", torch.ones(3))
        self.layer.absorbed = torch.ones(2, 2)
        self.layer.kv_cache = torch.ones(5)


def test_parameters_buffers_and_derived_tensors_are_covered():
    assert set(fingerprints(Model())) == {
        "layer.weight",
        "layer.bias",
        "layer.bias_of_router",
        "layer.absorbed",
    }


def test_a_difference_names_the_tensor_and_the_rank():
    model = Model()
    before = fingerprints(model)
    model.layer.absorbed = torch.full((2, 2), 2.0)
    after = fingerprints(model)
    check_same(before, before, "inference rank 1")
    with pytest.raises(WeightMismatchError, match=r"inference rank 1: 1 of 4 .*layer\.absorbed"):
        check_same(before, after, "inference rank 1")
    del before["layer.bias"]
    with pytest.raises(WeightMismatchError, match=r"layer\.bias"):
        check_same(before, fingerprints(Model()) | {"layer.weight": before["layer.weight"]}, "x")

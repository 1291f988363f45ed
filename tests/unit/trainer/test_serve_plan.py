"""A pull that is repeated sync after sync: what is kept must never be the weights themselves."""

import pytest
import torch

from rdt_e2e.errors import SyncError
from rdt_e2e.trainer.packing import lay_out
from rdt_e2e.trainer.serve_plan import ServePlan
from tests.synthetic import raw_bytes

SLOT_BYTES = 4096


def tensor(seed, shape=(8, 6), dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def blob(plan, published, slot):
    slices, num_bytes = plan.replay(published, SLOT_BYTES)
    plan.pack(slices, slot)
    pieces = [one.piece for one in slices]
    places, expected = lay_out(pieces)
    assert num_bytes == expected
    return [raw_bytes(slot[p.offset_bytes : p.offset_bytes + p.num_bytes]) for p in places]


KEYS = [
    ("owned", (("narrow", (0, 2, 3), ()),)),
    ("owned", (("t", (), ()), ("contiguous", (), ()))),
    ("owned", (("t", (), ()),)),
    ("gathered", ()),
    ("owned", (("reshape", (-1,), ()), ("narrow", (0, 1, 3), ()))),
]


def expected_of(owned, gathered):
    return [
        raw_bytes(piece)
        for piece in (owned[2:5], owned.t(), owned.t(), gathered, owned.reshape(-1)[1:4])
    ]


@pytest.mark.parametrize("prepared", [False, True])
def test_new_weights_are_served_by_the_same_plan(prepared):
    owned = tensor(1)
    plan = ServePlan(KEYS, {"owned": owned}, "consumer 0")
    if prepared:
        # At init, before any weights of a sync.
        plan.prepare()
    slot = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
    assert plan.gathered == ["gathered"]
    for seed in (2, 3, 4):
        owned.copy_(tensor(seed))
        gathered = tensor(10 + seed, (5,), torch.float32)
        assert blob(plan, {"gathered": gathered}, slot) == expected_of(owned, gathered)


def test_a_pull_of_nothing_is_refused():
    asked: list[object] = [[], (), None, "w", 3]
    for keys in asked:
        with pytest.raises(SyncError, match=r"consumer 4: a pull of no names|malformed key"):
            ServePlan(keys, {}, "consumer 4")


def test_slices_that_do_not_fit_are_refused_before_they_are_packed():
    plan = ServePlan([("owned", ())] * 3, {"owned": tensor(1)}, "consumer 0")
    with pytest.raises(SyncError, match="a pull of 3 slices does not fit its slot of 100 bytes"):
        plan.replay({}, 100)

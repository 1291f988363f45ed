"""Slots of the serve rings."""

import pytest
import torch

from rdt_e2e.errors import PlanError, SyncError
from rdt_e2e.trainer.serve_ring import ROUND_BYTES, ServeRings, slot_bytes


class Recorder:
    """Stands in for NIXL registration."""

    def __init__(self):
        self.registered = []

    def __call__(self, tensor):
        self.registered.append(tensor.data_ptr())


def rings(depth=2, presize_bytes=0):
    recorder = Recorder()
    return ServeRings(depth, torch.device("cpu"), recorder, presize_bytes), recorder


@pytest.mark.parametrize(
    ("chunk", "presize", "expected"),
    [
        (1, 0, ROUND_BYTES),
        (ROUND_BYTES, 0, ROUND_BYTES),
        (ROUND_BYTES + 1, 0, 2 * ROUND_BYTES),
        (1, 5 * ROUND_BYTES, 5 * ROUND_BYTES),
    ],
)
def test_slot_size_is_the_consumers(chunk, presize, expected):
    from vllm.distributed.weight_transfer.sharded_rdt_common import buffer_alloc_bytes

    assert slot_bytes(chunk, presize) == expected == buffer_alloc_bytes(chunk, presize)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_slot_follows_seq_in_any_order_of_execution(depth):
    ring, recorder = rings(depth)
    ring.reserve(4, 100)
    order = [7, 0, 3, 11, 1, 2, 10, 5, 4, 9, 8, 6]
    where = {seq: ring.slot(4, seq, 100).data_ptr() for seq in order}
    assert all(where[seq] == recorder.registered[seq % depth] for seq in order)


def test_consumers_do_not_share_slots():
    ring, recorder = rings()
    ring.reserve(0, 10)
    ring.reserve(1, 10)
    assert len(set(recorder.registered)) == 4
    assert ring.registered_bytes == 4 * ROUND_BYTES


def test_reserving_again_registers_nothing():
    ring, recorder = rings()
    ring.reserve(0, 10)
    ring.reserve(0, 10)
    assert len(recorder.registered) == 2


def test_a_ring_never_grows():
    ring, _ = rings()
    ring.reserve(0, 10)
    with pytest.raises(PlanError, match=r"consumer 0 .*buffer_presize_gib"):
        ring.reserve(0, ROUND_BYTES + 1)


def test_wrong_consumer_seq_or_size_is_refused():
    ring, _ = rings()
    ring.reserve(0, 10)
    with pytest.raises(SyncError, match="consumer 7 pulls without a reserved serve ring"):
        ring.slot(7, 0, 10)
    with pytest.raises(SyncError, match="pull number -1 is negative"):
        ring.slot(0, -1, 10)
    with pytest.raises(SyncError, match="does not fit its slot"):
        ring.slot(0, 0, ROUND_BYTES + 1)

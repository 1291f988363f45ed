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
    ring = ServeRings(
        depth,
        torch.device("cpu"),
        recorder,
        num_consumers=5,
        max_chunk_bytes=2 * ROUND_BYTES,
        presize_bytes=presize_bytes,
    )
    return ring, recorder


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


@pytest.mark.parametrize(
    ("depth", "order"), [(1, [0, 1, 2]), (2, [1, 0, 2, 3]), (3, [2, 1, 0, 3, 5, 4])]
)
def test_slot_follows_seq_in_any_order_of_execution(depth, order):
    ring, recorder = rings(depth)
    ring.reserve(4, 100)
    where = {seq: ring.claim(4, seq, 100).data_ptr() for seq in order}
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


def test_a_wrong_consumer_or_size_is_refused():
    ring, _ = rings()
    ring.reserve(0, 10)
    for consumer in (4, 7, -1, True, "0", None):
        with pytest.raises(SyncError, match="pulls without a reserved serve ring"):
            ring.claim(consumer, 0, 10)
    for consumer in (5, -1, True, "0", None):
        with pytest.raises(SyncError, match="was started for 5 consumers"):
            ring.reserve(consumer, 10)
    for size in (0, -1, 2 * ROUND_BYTES + 1, 1 << 60, 1.5, None):
        with pytest.raises(SyncError, match="the largest gather group has"):
            ring.reserve(1, size)
    with pytest.raises(SyncError, match="does not fit its slot"):
        ring.claim(0, 0, ROUND_BYTES + 1)


def test_a_pull_is_served_once_and_within_the_window():
    ring, _ = rings(depth=2)
    ring.reserve(0, 10)
    for seq in (2, 9, -1, True, "0", None, 1 << 70):
        with pytest.raises(SyncError, match="before pull 0 was served"):
            ring.claim(0, seq, 10)
    ring.claim(0, 1, 10)
    with pytest.raises(SyncError, match="pull 1 was served already"):
        ring.check(0, 1)
    ring.claim(0, 0, 10)
    with pytest.raises(SyncError, match="pull 0 was served already"):
        ring.claim(0, 0, 10)
    ring.claim(0, 3, 10)


def test_a_new_sync_counts_from_zero():
    ring, _ = rings()
    ring.reserve(0, 10)
    ring.claim(0, 0, 10)
    ring.begin()
    ring.claim(0, 0, 10)


def test_a_refused_pull_does_not_use_its_number_up():
    ring, _ = rings()
    ring.reserve(0, 10)
    with pytest.raises(SyncError):
        ring.claim(0, 0, ROUND_BYTES + 1)
    ring.claim(0, 0, 10)

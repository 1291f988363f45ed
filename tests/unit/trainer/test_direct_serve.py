"""A producer's streams: order, the ring's depth, and what ends them."""

import threading

import pytest
import torch

from rdt_e2e.errors import GatherError, PullTimeoutError, SyncError
from rdt_e2e.fabric.direct import DirectAgent
from rdt_e2e.trainer.direct_serve import DirectServer, done, ready

CPU = torch.device("cpu")
DEPTH = 2
PULLS = [[("a", ())], [("b", ())], [("c", ())], [("d", ())]]


class Wire:
    """An agent that keeps what is sent, and hands over what a test says has arrived."""

    def __init__(self):
        self.sent = []
        self.changed = threading.Condition()
        self._incoming = []

    def get_agent_metadata(self):
        return b"producer"

    def add_remote_agent(self, metadata):
        return metadata

    def send_notif(self, peer, message):
        with self.changed:
            self.sent.append((peer, message))
            self.changed.notify_all()

    def get_new_notifs(self):
        found, self._incoming = self._incoming, []
        return {"consumer": found} if found else {}

    def arrive(self, message):
        self._incoming = [*self._incoming, message]

    def await_sent(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.sent) >= count, 10)


class Running:
    """A server with one open stream, which serves on a thread."""

    def __init__(self, check=lambda _what: None, limit_s=10.0):
        self.wire = Wire()
        self.packed = []
        self.server = DirectServer(
            CPU, 3, self._pack, check, limit_s, agent=DirectAgent(CPU, self.wire)
        )
        ring = [torch.zeros(8, dtype=torch.uint8) for _ in range(DEPTH)]
        self.slots = self.server.open(5, PULLS, b"consumer", ring)
        assert self.slots.addresses == [slot.data_ptr() for slot in ring]
        self.failure = None

    def _pack(self, keys, consumer_id, seq):
        self.packed.append((keys[0][0], consumer_id, seq))

    def start(self, sync):
        self.thread = threading.Thread(target=self._serve, args=[sync])
        self.thread.start()

    def _serve(self, sync):
        try:
            self.num_pulls = self.server.serve(5, sync, DEPTH)
        except SyncError as error:
            self.failure = error


def test_it_packs_as_far_ahead_as_slots_are_free():
    running = Running()
    running.start(sync=1)
    wire = running.wire
    wire.await_sent(2)
    wire.arrive(done(1, 1))  # Of the second slot; the first is still being read.
    running.thread.join(0.05)
    assert running.packed == [("a", 5, 0), ("b", 5, 1)]
    wire.arrive(done(1, 0))
    running.thread.join(10)
    assert running.num_pulls == 4
    assert running.packed == [("a", 5, 0), ("b", 5, 1), ("c", 5, 2), ("d", 5, 3)]
    assert wire.sent == [("consumer", ready(1, seq)) for seq in range(4)]


def test_what_was_done_in_an_earlier_sync_frees_nothing():
    running = Running()
    for sync in (1, 2):
        running.packed.clear()
        running.wire.arrive(done(sync - 1, 0))
        running.start(sync)
        running.wire.await_sent(4 * (sync - 1) + 2)
        running.thread.join(0.05)
        assert len(running.packed) == 2
        for seq in range(4):
            running.wire.arrive(done(sync, seq))
        running.thread.join(10)
        assert running.num_pulls == 4


def test_a_sync_that_is_given_up_ends_the_stream():
    def ended(what):
        raise GatherError(f"ended while waiting for {what}")

    running = Running(check=ended)
    running.start(sync=1)
    running.thread.join(10)
    assert "consumer 5 to give a slot back (done 1 0)" in str(running.failure)
    assert isinstance(running.failure, GatherError)


def test_a_slot_that_is_never_read_names_the_consumer():
    running = Running(limit_s=0.05)
    running.start(sync=1)
    running.thread.join(10)
    assert isinstance(running.failure, PullTimeoutError)
    assert "producer 3: consumer 5 to give a slot back (done 1 0)" in str(running.failure)


@pytest.mark.parametrize(("consumer", "sync"), [(4, 1), (None, 1), ([5], 1), (5, "1"), (5, None)])
def test_a_stream_that_is_not_open_is_refused(consumer, sync):
    with pytest.raises(SyncError, match="has no open stream here"):
        Running().server.serve(consumer, sync, DEPTH)


def test_one_sync_at_a_time():
    running = Running(limit_s=0.2)
    running.start(sync=1)
    running.wire.await_sent(2)
    running.server._limit_s = 0.01
    with pytest.raises(PullTimeoutError, match="last sync of consumer 5 is still being served"):
        running.server.serve(5, 2, DEPTH)
    running.thread.join(10)

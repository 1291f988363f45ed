"""The free barrier, the look-ahead and the stall clock, with threads but without Ray."""

import threading

import pytest
import torch

from rdt_e2e.checkpoint.layout import GatherGroup
from rdt_e2e.errors import ConsumerLostError, GatherError, PullTimeoutError, SyncError
from rdt_e2e.trainer.gather_cache import GatherCache

GROUPS = tuple(
    GatherGroup(i, f"layers.{i}", (f"a{i}", f"b{i}"), (f"a{i}", f"b{i}")) for i in range(4)
)
JOIN_S = 20


def cache(lookahead=1, stall_timeout_s=10.0, num_consumers=2, **kwargs):
    made = GatherCache(GROUPS, lookahead, stall_timeout_s, 5, **kwargs)
    made.begin(range(num_consumers))
    return made


def tensors(group):
    return {name: torch.tensor([group.index]) for name in group.names}


class Caller(threading.Thread):
    """Runs a call; `outcome` joins it and returns or raises what the call did."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self.call, self.value, self.error = call, None, None
        self.start()

    def run(self):
        try:
            self.value = self.call()
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.error = error

    def outcome(self):
        self.join(JOIN_S)
        assert not self.is_alive(), "still blocked"
        if self.error is not None:
            raise self.error
        return self.value


def free(made, group, num_consumers=2):
    for _ in range(num_consumers):
        made.signal_free(group)


def test_freed_groups_are_counted_and_a_new_sync_starts_from_none():
    made = cache(lookahead=3)
    for group in GROUPS[:2]:
        made.publish(group, tensors(group))
    made.signal_free(0)
    assert made.num_freed == 0
    made.signal_free(0)
    assert made.num_freed == 1
    made.begin(range(2))
    assert made.num_freed == 0


def test_get_waits_for_publication():
    made = cache()
    waiting = Caller(lambda: made.get(["b1", "a1", "b1"], consumer_id=0))
    made.publish(GROUPS[0], tensors(GROUPS[0]))
    assert waiting.is_alive()
    made.publish(GROUPS[1], tensors(GROUPS[1]))
    assert {name: int(t) for name, t in waiting.outcome().items()} == {"a1": 1, "b1": 1}


def test_a_group_lives_until_the_last_consumers_signal():
    made = cache()
    made.publish(GROUPS[0], tensors(GROUPS[0]))
    made.signal_free(0)
    assert made.get(["a0"], consumer_id=1)
    made.signal_free(0)
    with pytest.raises(SyncError, match="a0 after their group was freed"):
        made.get(["a0"], consumer_id=1)


def test_signals_before_publication_count():
    made = cache()
    free(made, 2)
    made.publish(GROUPS[2], tensors(GROUPS[2]))
    with pytest.raises(SyncError, match="freed"):
        made.get(["a2"], consumer_id=0)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_at_most_lookahead_plus_one_groups_are_resident(lookahead):
    made = cache(lookahead)

    def gather_all():
        for group in GROUPS:
            made.wait_for_room(group)
            made.publish(group, tensors(group))
        made.wait_all_freed()

    gathering = Caller(gather_all)
    for group in GROUPS:
        assert made.get(list(group.names), consumer_id=0)
        free(made, group.index)
    gathering.outcome()
    assert made.max_resident_groups <= lookahead + 1


def test_unknown_names_and_groups_are_refused_at_once():
    made = cache()
    with pytest.raises(SyncError, match="producer 5 does not serve nope, asked for by consumer 3"):
        made.get(["a0", "nope"], consumer_id=3)
    with pytest.raises(SyncError, match="no gather group 4"):
        made.signal_free(4)


def test_too_many_signals_are_an_error_not_an_early_free():
    made = cache(num_consumers=2)
    free(made, 0)
    with pytest.raises(SyncError, match=r"3 free signals for layers\.0, but 2 consumers"):
        made.signal_free(0)


def test_a_failed_gather_reaches_every_waiter():
    made = cache()
    waiters = [Caller(lambda: made.get(["a3"], consumer_id=0)), Caller(made.wait_all_freed)]
    made.fail("connection closed by peer")
    for waiter in waiters:
        with pytest.raises(GatherError, match="ended this sync: connection closed by peer"):
            waiter.outcome()


def test_begin_clears_the_last_syncs_failure_and_signals():
    made = cache()
    made.signal_free(0)
    made.fail("x")
    made.begin([0])
    made.publish(GROUPS[0], tensors(GROUPS[0]))
    assert made.get(["a0"], consumer_id=0)


class Clock:
    """A clock the test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_stalled_pull_names_the_group_the_names_and_the_consumer():
    clock = Clock()
    made = cache(stall_timeout_s=0.2, clock=clock)
    waiting = Caller(lambda: made.get(["b2"], consumer_id=1))
    clock.now = 1.0
    with pytest.raises(
        PullTimeoutError, match=r"producer 5 made no progress.*layers\.2.*b2.*consumer 1"
    ):
        waiting.outcome()


def test_a_stalled_gather_names_the_group_that_is_not_freed():
    clock = Clock()
    made = cache(lookahead=0, stall_timeout_s=0.2, clock=clock)
    made.publish(GROUPS[0], tensors(GROUPS[0]))
    made.signal_free(0)
    waiting = Caller(lambda: made.wait_for_room(GROUPS[1]))
    clock.now = 1.0
    with pytest.raises(
        PullTimeoutError, match=r"gather layers\.1.*layers\.0 has 1 of 2 free signals"
    ):
        waiting.outcome()


def test_progress_anywhere_puts_the_stall_off():
    clock = Clock()
    made = cache(stall_timeout_s=0.5, clock=clock)
    waiting = Caller(lambda: made.get(["a1"], consumer_id=0))
    for _ in range(5):
        clock.now += 0.4
        made.served()
    made.publish(GROUPS[1], tensors(GROUPS[1]))
    assert int(waiting.outcome()["a1"]) == 1


def test_a_silent_consumer_is_named_before_the_stall_limit():
    clock = Clock()
    made = cache(clock=clock, stall_timeout_s=1000, heartbeat_timeout_s=30)
    made.hear(0, "process 11 on 10.0.0.1")
    made.hear(1, "process 12 on 10.0.0.2")
    clock.now = 29.0
    made.hear(0, "process 11 on 10.0.0.1")
    clock.now = 31.0
    with pytest.raises(
        ConsumerLostError, match=r"consumer 1 \(process 12 on 10\.0\.0\.2\).*for 31 s"
    ):
        made.get(["a1"], consumer_id=0)


def test_silence_counts_from_the_begin_of_the_sync_and_only_for_those_who_take_part():
    clock = Clock()
    made = cache(clock=clock, heartbeat_timeout_s=30, num_consumers=2)
    clock.now = 100.0
    made.begin([1])
    made.hear(0, "left out")
    clock.now = 129.0
    made.publish(GROUPS[0], tensors(GROUPS[0]))
    assert set(made.get(["a0"], consumer_id=1)) == {"a0"}

"""A trainer rank that dies in the middle of a sync. Last by name: the shared fleets end with it."""

import threading
import time

import pytest

from rdt_e2e.errors import ProducerLostError
from tests.live import Stack, hang_in_gather

STALLED_GROUP = 2
VICTIM = 1


def test_a_rank_killed_mid_gather_is_named_and_serving_does_not_resume(live: Stack) -> None:
    # Not at the top: Ray reads its token settings when it is imported, and `live` sets them.
    import ray

    live.on_trainers(hang_in_gather(VICTIM, STALLED_GROUP))
    survivor, victim = live.trainers._actors

    def kill_once_under_way() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            published = survivor.__ray_call__.remote(lambda worker: len(worker._cache._published))
            if ray.get(published) == STALLED_GROUP:
                break
            time.sleep(0.05)
        ray.kill(victim)

    killer = threading.Thread(target=kill_once_under_way)
    killer.start()
    started = time.monotonic()
    with pytest.raises(ProducerLostError, match=rf"trainer rank {VICTIM} died during gather"):
        live.sync()
    killer.join()
    # Not a figure to meet, but the bound that the configuration promises.
    assert time.monotonic() - started < live.config.sync.sync_timeout_s
    assert live.wait(live.inference._engine.is_paused())

"""A trainer rank that dies in the middle of a sync. Last by name: the shared fleets end with it."""

import time

import pytest

from rdt_e2e.errors import ProducerLostError
from tests.live import Stack, killed_mid_gather

VICTIM = 1


def test_a_rank_killed_mid_gather_is_named_and_serving_does_not_resume(live: Stack) -> None:
    started = time.monotonic()
    with (
        killed_mid_gather(live, VICTIM),
        pytest.raises(ProducerLostError, match=rf"trainer rank {VICTIM} died during gather"),
    ):
        live.sync()
    # Not a figure to meet, but the bound that the configuration promises.
    assert time.monotonic() - started < live.config.sync.sync_timeout_s
    assert live.wait(live.inference._engine.is_paused())

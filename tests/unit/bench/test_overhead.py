"""The comparison of watched and bare syncs, on pairs whose difference is known."""

import asyncio
import io
import random
import types
from typing import Any

import pytest

from rdt_e2e.bench import overhead as module
from rdt_e2e.bench.overhead import CLOCKS, NUM_WARM_UPS, compare, overhead_job
from rdt_e2e.console import Console
from rdt_e2e.sync.record import SyncTiming


def timing(update_s, pause_s=0.0):
    return SyncTiming(2, {"pause": pause_s, "update": update_s, "resume": 0.0}, [])


def test_a_cost_is_found_below_a_drift_ten_times_as_large():
    pairs = [(timing(1 + n / 100), timing(1.01 + n / 100)) for n in range(21)]
    found = compare("update call", pairs)
    assert found.without_s == pytest.approx(1.10)
    assert found.with_s == pytest.approx(1.11)
    for share in (found.change, found.low, found.high, *found.quartiles):
        assert share == pytest.approx(0.01 / 1.10)


def test_noise_around_nothing_has_nothing_in_its_interval():
    noise = random.Random(1)  # noqa: S311 - no secret
    pairs = [(timing(noise.uniform(1, 2)), timing(noise.uniform(1, 2))) for _ in range(100)]
    found = compare("update call", pairs)
    assert found.low < 0 < found.high
    assert found.quartiles[0] < found.low < found.high < found.quartiles[1]


def test_the_pause_is_left_out_of_one_clock():
    pairs = [(timing(1.0, pause_s=n), timing(1.0, pause_s=2 * n)) for n in range(1, 12)]
    assert compare("start to finish", pairs).change == 0
    assert compare("pause to resume", pairs).change > 0


def test_syncs_are_watched_in_turns_and_the_hooks_are_out_in_between(monkeypatch):
    log = []

    class Session:
        async def sync(self):
            log.append("sync")
            return timing(1.0)

    class Recorder:
        async def sync(self, sync):
            log.append("hooked")
            return await sync()

        async def stop(self):
            log.append("out")

    monkeypatch.setattr(module, "recorder_of", lambda _run, level: Recorder())
    out = io.StringIO()
    record = types.SimpleNamespace(syncs=[], facts={})
    run: Any = types.SimpleNamespace(session=Session(), console=Console(out), record=record)
    asyncio.run(overhead_job(run, 10, "summary"))
    bare, watched = ["sync"], ["hooked", "sync", "out"]
    assert log == (bare + watched) * NUM_WARM_UPS + (bare + watched + watched + bare) * 5
    assert len(record.syncs) == 20
    assert len(record.facts["overhead"]["pairs"]) == 10
    for clock in CLOCKS:
        assert f"{clock} " in out.getvalue()
    assert "+0.0 %" in out.getvalue()


def test_checksums_are_taken_in_turns(monkeypatch):
    log = []

    class Session:
        async def sum_pulls(self, *, on):
            log.append("on" if on else "off")

        async def sync(self):
            return timing(1.1 if log[-1] == "on" else 1.0)

    out = io.StringIO()
    record = types.SimpleNamespace(syncs=[], facts={})
    config = types.SimpleNamespace(verify=types.SimpleNamespace(pulls=True))
    run: Any = types.SimpleNamespace(
        session=Session(), console=Console(out), record=record, config=config
    )
    asyncio.run(overhead_job(run, 10, "checksums"))
    # On again after each, as the configuration says.
    off, on = ["off", "on"], ["on", "on"]
    assert log == (off + on) * NUM_WARM_UPS + (off + on + on + off) * 5
    assert "verify.pulls against off" in out.getvalue()
    assert "+10.0 %" in out.getvalue()

"""The driver's side, with stand-ins for both fleets and the nodes: what fails never fails a sync."""

import asyncio
import json
import types
from typing import Any

import pytest

from rdt_e2e.config import load_config
from rdt_e2e.errors import EngineError, ProducerLostError
from rdt_e2e.profiling import recorder as module
from rdt_e2e.profiling.place import Place
from rdt_e2e.profiling.recorder import Recorder, Unprofiled, profiled
from rdt_e2e.sync.record import SyncTiming
from tests.profile_cases import (
    INFERENCE_NODE,
    TRAINER_NODE,
    consumer_record,
    producer_record,
    reading,
)


class Fleet:
    """Trainer fleet, engine and nodes in one, with a log of what was asked of them."""

    replica = 0
    actor_names = ("trainer-0",)

    def __init__(self, fails=(), resident=False):
        self.fails = fails
        self.resident = resident
        self.log = []
        self.verdicts = []

    def submit(self, method, function, *args):
        self.log.append(function.__name__)
        return [function.__name__]

    def wait(self, refs, what, timeout_s):
        if refs[0] in self.fails:
            raise ProducerLostError("a trainer rank died")

    async def call_workers(self, method, *args, timeout_s):
        self.log.append(method)
        if method in self.fails:
            raise EngineError("the engine is stuck")

    def begin(self):
        self.log.append("empty")
        if "empty" in self.fails:
            raise RuntimeError("no cluster")
        return [reading(TRAINER_NODE), reading(INFERENCE_NODE)]

    def read(self):
        self.log.append("read")
        if "read" in self.fails:
            raise RuntimeError("no cluster")
        consumer = consumer_record(0) | {"iteration": 1}
        producer = producer_record(0) | {"iteration": 1}
        return [reading(TRAINER_NODE, [producer]), reading(INFERENCE_NODE, [consumer])]

    def clock_offset(self, node_id, boot):
        return None

    def remove(self, timeout_s):
        self.log.append("remove")


def recorder_of(fleet: Any) -> Recorder:
    place = Place(None, "run", "summary")
    return Recorder(place, fleet, lambda: [fleet], 1, fleet, fleet.verdicts.append)


def one_sync(fleet):
    recorder = recorder_of(fleet)
    timing = SyncTiming(1, {"update": 1.0}, [], 5.0, 1.25)

    async def sync():
        fleet.log.append("sync")
        return timing

    assert asyncio.run(recorder.sync(sync)) is timing
    return recorder


def test_the_order_of_things():
    fleet = Fleet()
    recorder = one_sync(fleet)
    asyncio.run(recorder.stop())
    assert fleet.log == [
        "empty", "begin_producer", "sync_profile_begin", "sync", "end_producer",
        "sync_profile_end", "read", "stop_producer", "sync_profile_stop", "remove",
    ]  # fmt: skip
    (built,) = recorder.iterations
    assert built["problems"] == []
    assert built["consumers"][0]["rank"] == 0
    assert built["critical_path"]["wall_s"] == 1.25
    assert fleet.verdicts == [built["attribution"]["verdict"]["kind"]] == ["balanced"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("empty", "no cluster"),
        ("begin_producer", "trainer ranks did not begin"),
        ("sync_profile_begin", "inference ranks did not begin"),
        ("end_producer", "trainer ranks did not write"),
        ("sync_profile_end", "inference ranks did not write"),
        ("read", "no cluster"),
    ],
)
def test_what_fails_is_named_and_the_rest_is_reported(fault, said):
    (built,) = one_sync(Fleet([fault])).iterations
    assert any(said in problem for problem in built["problems"])
    assert built["critical_path"]["sums_up"]
    assert len(built["critical_path"]["buckets"]) == 2


def test_syncs_are_numbered_by_the_profile_and_cold_by_the_session():
    """A session may have synced before anybody profiled it."""
    fleet = Fleet()
    recorder = recorder_of(fleet)
    timing = SyncTiming(7, {"update": 1.0}, [], 5.0, 1.25)
    asyncio.run(recorder.sync(lambda: asyncio.sleep(0, timing)))
    (built,) = recorder.iterations
    assert (built["iteration"], built["cold"], built["problems"]) == (1, False, [])
    assert len(built["consumers"]) == 1


def test_after_a_failure_a_stuck_engine_is_not_asked():
    fleet = Fleet()
    recorder = one_sync(fleet)
    fleet.log.clear()
    asyncio.run(recorder.stop(engines=False))
    assert fleet.log == ["stop_producer", "remove"]


def live_run(folder, fleet, level):
    config = load_config("local", {"profiling.level": level})
    record = types.SimpleNamespace(folder=folder, bake_s=0.5)
    session = types.SimpleNamespace(replicas=[fleet])
    return types.SimpleNamespace(
        config=config,
        record=record,
        session=session,
        trainers=fleet,
        metrics=types.SimpleNamespace(balance=fleet.verdicts.append),
    )


@pytest.mark.parametrize("resident", [False, True])
def test_off_touches_nothing_but_what_a_lost_driver_left(resident, tmp_path):
    fleet = Fleet(resident=resident)

    async def run():
        async with profiled(live_run(tmp_path, fleet, "off")) as profile:
            assert isinstance(profile, Unprofiled)
            return await profile.sync(lambda: asyncio.sleep(0, "timing"))

    assert asyncio.run(run()) == "timing"
    assert fleet.log == ["stop_producer"] * resident
    assert list(tmp_path.iterdir()) == []


def test_a_failing_sync_still_leaves_the_profile_of_those_before(tmp_path, monkeypatch):
    fleet = Fleet()
    monkeypatch.setattr(module, "Nodes", lambda _place: fleet)
    timing = SyncTiming(1, {"update": 1.0}, [], 5.0, 1.25)

    async def fail():
        raise EngineError("lost")

    async def run():
        async with profiled(live_run(tmp_path, fleet, "summary")) as profile:
            await profile.sync(lambda: asyncio.sleep(0, timing))
            await profile.sync(fail)

    with pytest.raises(EngineError, match="lost"):
        asyncio.run(run())
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert [one["iteration"] for one in profile["iterations"]] == [1]
    assert profile["summary"]["cold"]["bake_s"] == 0.5
    assert fleet.log[-2:] == ["stop_producer", "remove"]


def test_a_run_directory_that_cannot_be_written_costs_the_profile_alone(tmp_path, caplog):
    module.write_profile(tmp_path / "gone", {})
    (tmp_path / "profile.json").symlink_to("/dev/full")
    module.write_profile(tmp_path, {})
    assert ["No such file" in caplog.messages[0], "No space left" in caplog.messages[1]] == [
        True
    ] * 2

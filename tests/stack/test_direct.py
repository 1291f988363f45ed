"""`sync.transport: nixl`: the same weights, the same checks, without Ray on the way of a pull."""

from typing import Any

import pytest

from rdt_e2e.config import load_config
from rdt_e2e.errors import EngineError, RdtE2EError, SyncError, WeightMismatchError
from tests.live import Stack
from tests.stack.test_ladder import damage_after_the_sum, serve_the_weights, stop_damage


@pytest.fixture
def direct(stack: Stack) -> Any:
    """The stack over direct reads; baked back afterwards."""
    with stack.baked_with(load_config("local", {"sync.transport": "nixl"})):
        yield stack


def count_messages() -> Any:
    """Count what a producer announces from now on."""

    def change(worker: Any) -> None:
        send = worker._direct._agent.send
        worker.announced = 0

        def counted(peer: str, message: bytes) -> None:
            worker.announced += 1
            send(peer, message)

        worker._direct._agent.send = counted

    return change


def messages() -> Any:
    def stop(worker: Any) -> int:
        del worker._direct._agent.send
        counted: int = worker.announced
        return counted

    return stop


def test_it_carries_the_same_weights(direct: Stack) -> None:
    direct.load("v2")
    timing = direct.sync()
    before = direct.wait(direct.inference.transfer_memory())
    direct.expect("v2")
    direct.check_disk("v2")
    direct.load("v1")
    direct.on_trainers(count_messages())
    again = direct.sync()
    # Every pull went this way.
    assert direct.on_trainers(messages()) == [rank["num_pulls"] for rank in again.producers]
    direct.expect("v1")
    direct.check_disk("v1")
    for one in (timing, again):
        assert all(rank["num_pulls"] > 0 for rank in one.producers)
        assert "check" in one.seconds
    after = direct.wait(direct.inference.transfer_memory())
    assert after["num_registered"] == before["num_registered"], "a warm sync registers nothing"


def fail_from_pull(number: int) -> Any:
    """A producer that refuses a pull in the middle of its streams."""

    def change(worker: Any) -> None:
        replay_all = worker._replay_all

        def fail(*args: Any) -> Any:
            if worker._counters.num_pulls >= number and worker.producer_rank == 1:
                from rdt_e2e.errors import SyncError

                raise SyncError("injected: this pull is refused")
            return replay_all(*args)

        worker._replay_all = fail

    return change


def test_a_refused_pull_ends_the_sync_by_name_and_the_next_one_passes(direct: Stack) -> None:
    direct.on_trainers(fail_from_pull(3))
    with pytest.raises((SyncError, EngineError), match="injected: this pull is refused"):
        direct.sync()
    assert direct.wait(direct.inference._engine.is_paused()), "no serving on half of the weights"
    direct.on_trainers(serve_the_weights())
    direct.load("v2")
    direct.sync()
    direct.expect("v2")


def test_pulls_of_an_update_that_never_came_end_and_count_for_nothing(
    direct: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(_engine: Any, _info: Any = None) -> None:
        raise EngineError("injected: the update call never arrived")

    # Its first pulls are issued when the sync starts.
    with monkeypatch.context() as patch:
        patch.setattr(type(direct.inference), "update", lost)
        with pytest.raises(EngineError, match="never arrived"):
            direct.sync()
    direct.load("v2")
    direct.sync()
    direct.expect("v2")


def test_damage_on_the_wire_is_caught(direct: Stack) -> None:
    direct.on_trainers(damage_after_the_sum())
    with pytest.raises(WeightMismatchError, match=r"consumer 1: pull 2 from producer 1 \(model\."):
        direct.sync()
    direct.on_trainers(stop_damage())
    direct.sync()
    direct.expect("v1")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda worker: worker.serve_stream(7, 1), "consumer 7 has no open stream"),
        (lambda worker: worker.serve_stream(None, 1), "consumer None has no open stream"),
        (lambda worker: worker.open_stream(7, [], b""), "without a reserved serve ring"),
        (
            lambda worker: worker.open_stream(worker.producer_rank, "all", b""),
            "a stream is a list of pulls",
        ),
        (
            lambda worker: worker.open_stream(
                worker.producer_rank, [[("model.norm.weight", (("to", ("cpu",), ()),))]], b""
            ),
            "op 'to' is not allowed",
        ),
    ],
)
def test_a_stream_that_is_not_right_is_refused_by_name(
    live: Stack, call: Any, message: str
) -> None:
    with pytest.raises(RdtE2EError, match=message):
        live.on_trainers(call)

"""Calls no consumer of ours makes: each is refused with a name, and the next sync is untouched."""

from typing import Any

import pytest

from rdt_e2e.errors import CheckpointError, PullTimeoutError, RdtE2EError, SyncError
from tests.live import Stack, changed_shape

NORM = "model.norm.weight"


OWN = object()
"""The consumer that each producer has a ring for: with as many experts' owners as consumers, its own."""


def produce(keys: Any, consumer_id: Any, seq: Any) -> Any:
    """A call of the pull method inside the actor, as it arrives from the wire."""
    own = consumer_id is OWN
    return lambda worker: worker.rdt_produce_weights_batched(
        keys, consumer_id=worker.producer_rank if own else consumer_id, seq=seq
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (produce([(NORM, ())], 7, 0), "consumer 7 pulls without a reserved serve ring"),
        (produce([(NORM, ())], OWN, 0), "pull 0 was served already in this sync"),
        (produce([(NORM, ())], OWN, 999), "before pull"),
        (lambda worker: worker.free_group(10_000), "no gather group 10000"),
        (lambda worker: worker.free_group(0), "3 free signals for"),
        (lambda worker: worker.reserve_serve_buffer(0, 1 << 50, None), "largest gather group"),
        (lambda worker: worker.reserve_serve_buffer(2, 100, None), "started for 2 consumers"),
    ],
)
def test_it_is_refused_by_name(live: Stack, call: Any, message: str) -> None:
    with pytest.raises(SyncError, match=message):
        live.on_trainers(call)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([(NORM, (("to", ("cpu",), ()),))], "op 'to' is not allowed"),
        ([(NORM, ("view",))], "malformed op"),
        ([NORM], "malformed key"),
        ([], "a pull of no names"),
        (None, "a pull of no names"),
    ],
)
def test_a_malformed_pull_is_refused_by_name(live: Stack, keys: Any, message: str) -> None:
    live.trainers.call("begin_sync", [0, 1], timeout_s=60)  # Or its number is refused first.
    with pytest.raises(SyncError, match=message):
        live.on_trainers(produce(keys, OWN, 0))


@pytest.fixture
def short_stall(stack: Stack) -> Any:
    """Producers that call a stall after 3 s instead of 60."""

    def shorten(worker: Any) -> None:
        worker._cache._stall_timeout_s = 3.0

    stack.on_trainers(shorten)
    yield stack

    def restore(worker: Any) -> None:
        worker._cache._stall_timeout_s = worker.config.sync.stall_timeout_s

    stack.on_trainers(restore)


def test_a_name_that_nobody_serves_is_refused_at_once(live: Stack) -> None:
    live.trainers.call("begin_sync", [0, 1], timeout_s=60)
    with pytest.raises(SyncError, match=r"does not serve model\.nothing, asked for by consumer"):
        live.on_trainers(produce([("model.nothing", ())], OWN, 0))
    live.sync()
    live.expect("v1")


def test_a_pull_whose_group_never_comes_names_the_group(short_stall: Stack) -> None:
    short_stall.trainers.call("begin_sync", [0, 1], timeout_s=60)
    with pytest.raises(PullTimeoutError, match=r"made no progress for 3 s.*gather of after layers"):
        short_stall.on_trainers(produce([(NORM, ())], OWN, 0))


def test_consumers_that_never_signal_are_named(short_stall: Stack) -> None:
    short_stall.trainers.call("begin_sync", [0, 1], timeout_s=60)
    with pytest.raises(PullTimeoutError, match=r"before layers has 0 of 2 free signals"):
        short_stall.trainers.call("run_gathers", timeout_s=60)


def test_a_changed_shape_is_refused_and_the_old_weights_stay(stack: Stack, tmp_path: Any) -> None:
    changed = changed_shape(stack.checkpoints["v1"], NORM, tmp_path / "changed")
    with pytest.raises(CheckpointError, match=rf"{NORM} is"):
        stack.trainers.call("load_version", changed, timeout_s=60)
    stack.sync()
    stack.expect("v1")


def test_every_refusal_is_an_error_of_ours(live: Stack) -> None:
    with pytest.raises(RdtE2EError):
        live.on_trainers(produce(None, None, None))

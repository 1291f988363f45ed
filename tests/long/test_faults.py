"""Faults in the middle of a sync. For each: a named error in bounded time, no serving, and a next sync.

The tests share fleets and run in this order: what can be lost without a rebuild first, then an engine,
then its node, then the trainer.
"""

import asyncio
import contextlib
import io
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rdt_e2e.config import Config, load_config
from rdt_e2e.console import Console
from rdt_e2e.errors import (
    CheckpointError,
    ConsumerLostError,
    EngineError,
    GatherError,
    ProducerLostError,
    PullTimeoutError,
    RdtE2EError,
    SyncError,
)
from tests.fault_table import FaultTable
from tests.live import (
    Stack,
    await_held,
    changed_shape,
    engine_up,
    hold_pulls,
    killed_mid_gather,
    release_pulls,
    trainers_up,
)
from tests.long.conftest import LARGEST

# vLLM's own monitor thread ends with an exception when an engine core is lost.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

PAIR = LARGEST | {"trainer.num_ranks": 2, "inference.data_parallel": 2}
SHORT_S = 4.0
"""A pause that must be survived; the stall limit of these tests is 20 s."""


class Pair:
    """Two trainer ranks and one engine of two ranks, each replaceable while the other lives."""

    def __init__(self, config: Config, checkpoints: dict[str, Path], runner: Any) -> None:
        self._config, self._checkpoints, self._runner = config, checkpoints, runner
        self._root = checkpoints["v1"]
        self._trainers = contextlib.ExitStack()
        self._engine = contextlib.ExitStack()
        trainers = self._trainers.enter_context(trainers_up(config, self._root))
        engine = self._engine.enter_context(engine_up(config, self._root, runner))
        self._join(trainers, engine)

    def _join(self, trainers: Any, engine: Any) -> None:
        self.stack = Stack(self._config, self._checkpoints, trainers, [engine], self._runner)
        self.stack.bake()
        self.synced()

    def synced(self) -> None:
        """The next sync succeeds and is right, on another version than the one held."""
        for version in ("v2", "v1"):
            self.stack.load(version)
            self.stack.sync()
            self.stack.expect(version)

    def new_engine(self) -> None:
        """Replace the engine; the trainer's weights stay where they are."""
        held = self.stack.on_trainers(lambda worker: worker._shards.num_bytes)
        self._engine.close()
        engine = self._engine.enter_context(engine_up(self._config, self._root, self._runner))
        self._join(self.stack.trainers, engine)
        assert self.stack.on_trainers(lambda worker: worker._shards.num_bytes) == held

    def new_trainers(self) -> None:
        """Replace the trainer ranks; the engine stays up."""
        engine = self.stack.inference
        self._trainers.close()
        trainers = self._trainers.enter_context(trainers_up(self._config, self._root))
        self._join(trainers, engine)

    def close(self) -> None:
        self._engine.close()
        self._trainers.close()


@pytest.fixture(scope="module")
def pair(cluster: Config, checkpoints: dict[str, Path], runner: asyncio.Runner) -> Iterator[Pair]:
    made = Pair(load_config("local", PAIR), checkpoints, runner)
    yield made
    made.close()


def pid_of_consumer(stack: Stack) -> int:
    pid: int = stack.wait(stack.inference.transfer_memory())["pid"]
    return pid


def pid_of_trainer(stack: Stack, rank: int) -> int:
    def ask(_worker: Any) -> int:
        import os

        return os.getpid()

    pid: int = stack.on_trainers(ask)[rank]
    return pid


class MidPull:
    """Does something to a sync while a pull is under way, on a thread of its own."""

    def __init__(self, stack: Stack, act: Callable[[], None]) -> None:
        self._stack, self._act = stack, act
        self.acted_at = 0.0
        self._failure: Exception | None = None

    def __enter__(self) -> "MidPull":
        self._stack.on_trainers(hold_pulls(after=2))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            held = self._stack.on_trainers(await_held())
        except RdtE2EError as error:
            self._failure = error
            return
        if not all(held):
            self._failure = TimeoutError("no pull was under way")
            return
        self.acted_at = time.monotonic()
        self._act()
        with contextlib.suppress(RdtE2EError):  # A paused rank answers later.
            self._stack.on_trainers(release_pulls())

    def __exit__(self, *_error: object) -> None:
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    @property
    def seconds(self) -> float:
        """Since the fault."""
        return time.monotonic() - self.acted_at


def pause_for(pid: int, seconds: float) -> Callable[[], None]:
    """Stop a process now, and let it go on later."""

    def act() -> None:
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
        timer.start()

    return act


@pytest.mark.parametrize("who", ["consumer", "trainer rank 1"])
def test_a_short_pause_is_survived(pair: Pair, fault_table: FaultTable, who: str) -> None:
    stack = pair.stack
    pid = pid_of_consumer(stack) if who == "consumer" else pid_of_trainer(stack, 1)
    with MidPull(stack, pause_for(pid, SHORT_S)):
        stack.sync()
    stack.expect("v1")
    fault_table.add(
        f"{who} paused for {SHORT_S:.0f} s (SIGSTOP), limits 10 and 20 s",
        None,
        "the sync waits",
        "as ever",
    )


def test_a_consumer_paused_beyond_the_limit_is_waited_out(
    pair: Pair, fault_table: FaultTable
) -> None:
    stack = pair.stack
    pid = pid_of_consumer(stack)
    try:
        with (
            MidPull(stack, lambda: os.kill(pid, signal.SIGSTOP)) as fault,
            pytest.raises(ConsumerLostError, match=rf"consumer 0 \(process {pid} on "),
        ):
            stack.sync()
        seconds = fault.seconds
    finally:
        os.kill(pid, signal.SIGCONT)
    assert stack.wait(stack.inference._engine.is_paused())
    pair.synced()
    fault_table.add(
        "consumer paused beyond its limit of 10 s",
        seconds,
        "ConsumerLostError, names consumer, process and node; engine stays paused",
        "nothing rebuilt",
    )


def calls(stack: Stack) -> dict[str, tuple[Callable[[Any], Any], str]]:
    """Calls of the serve surface that no consumer of ours makes."""

    def pull(keys: Any, seq: int, consumer: int | None = None) -> Callable[[Any], Any]:
        return lambda worker: worker.rdt_produce_weights_batched(
            keys, consumer_id=worker.producer_rank if consumer is None else consumer, seq=seq
        )

    norm = "model.norm.weight"
    return {
        "wrong consumer id": (pull([(norm, ())], 0, 9), "without a reserved serve ring"),
        "repeated seq": (pull([(norm, ())], 0), "was served already"),
        "stale seq, out of its window": (pull([(norm, ())], 500), "before pull"),
        "op that is not a view": (pull([(norm, (("to", (), ()),))], 0), "is not allowed"),
        "malformed op chain": (pull([(norm, (("view",),))], 0), "malformed op"),
    }


def test_refused_calls(pair: Pair, fault_table: FaultTable) -> None:
    stack = pair.stack
    for what, (call, message) in calls(stack).items():
        if "op" in what:
            stack.trainers.call("begin_sync", [0, 1], timeout_s=10)
        started = time.monotonic()
        with pytest.raises(SyncError, match=re.escape(message)):
            stack.on_trainers(call)
        fault_table.add(what, time.monotonic() - started, f'SyncError "... {message}"', "as ever")
    pair.synced()


def test_a_name_nobody_serves(pair: Pair, fault_table: FaultTable) -> None:
    stack = pair.stack
    stack.trainers.call("begin_sync", [0, 1], timeout_s=10)
    started = time.monotonic()
    with pytest.raises(SyncError, match=r"does not serve model\.other"):
        stack.on_trainers(
            lambda worker: worker.rdt_produce_weights_batched(
                [("model.other", ())], consumer_id=worker.producer_rank, seq=0
            )
        )
    seconds = time.monotonic() - started
    pair.synced()
    fault_table.add("name that nobody serves", seconds, "SyncError, names it", "as ever")


def test_a_changed_shape(pair: Pair, fault_table: FaultTable, tmp_path: Path) -> None:
    stack, name = pair.stack, "model.norm.weight"
    changed = changed_shape(stack.checkpoints["v1"], name, tmp_path / "changed")
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"{name} is"):
        stack.trainers.call("load_version", changed, timeout_s=60)
    seconds = time.monotonic() - started
    pair.synced()
    fault_table.add(
        "tensor whose shape changed between syncs",
        seconds,
        "CheckpointError, names it; the shards keep what they held",
        "as ever",
    )


def test_a_killed_consumer(pair: Pair, fault_table: FaultTable) -> None:
    stack = pair.stack
    pid = pid_of_consumer(stack)
    with (
        MidPull(stack, lambda: os.kill(pid, signal.SIGKILL)) as fault,
        pytest.raises((ConsumerLostError, EngineError)) as caught,
    ):
        stack.sync()
    seconds = fault.seconds
    assert stack.inference.is_dead
    pair.new_engine()
    fault_table.add(
        "consumer killed mid-pull (SIGKILL)",
        seconds,
        f"{type(caught.value).__name__}; the engine is gone",
        "a new engine; trainer weights stayed in memory",
    )


def test_a_killed_inference_node(pair: Pair, fault_table: FaultTable) -> None:
    from rdt_e2e.cluster import local

    stack = pair.stack
    state = local.status()
    assert state is not None
    node = psutil.Process(state.processes[1][0])
    (raylet,) = [one for one in node.children(recursive=True) if one.name() == "raylet"]
    # The pulls go on for as long as the processes live, so this one may still end well.
    with MidPull(stack, raylet.kill) as fault, contextlib.suppress(RdtE2EError):
        stack.sync()
    node.wait(60)
    with pytest.raises((ConsumerLostError, EngineError)) as caught:
        stack.sync()
    seconds = fault.seconds
    # What `rdt-e2e sync` does first.
    local.deploy(stack.config, Console(io.StringIO()), owner=os.getpid())
    wait_for_nodes(2)
    pair.new_engine()
    fault_table.add(
        "raylet of the inference node killed (SIGKILL)",
        seconds,
        f"{type(caught.value).__name__}; the engine is gone",
        "node started again, a new engine; trainer weights stayed in memory",
    )


def wait_for_nodes(count: int) -> None:
    import ray

    deadline = time.monotonic() + 60
    while len([node for node in ray.nodes() if node["Alive"]]) < count:
        assert time.monotonic() < deadline, "the node did not come back"
        time.sleep(0.1)


def raise_in_gather(victim: int, group_index: int) -> Callable[[Any], None]:
    def change(worker: Any) -> None:
        gather = worker._shards.gather_group

        def fail(group: Any) -> Any:
            if group.index == group_index and worker.producer_rank == victim:
                raise RuntimeError("injected")
            return gather(group)

        worker._shards.gather_group = fail

    return change


def test_a_gather_that_raises(pair: Pair, fault_table: FaultTable) -> None:
    stack = pair.stack
    stack.on_trainers(raise_in_gather(1, 2))
    started = time.monotonic()
    with pytest.raises(GatherError, match=r"producer 1: the gather of layers\.1 failed"):
        stack.sync()
    seconds = time.monotonic() - started
    assert stack.wait(stack.inference._engine.is_paused())
    with pytest.raises(RdtE2EError, match="cannot gather any more"):
        stack.sync()
    pair.new_trainers()
    fault_table.add(
        "gather that raises on one rank",
        seconds,
        "GatherError, names rank and group; engine stays paused",
        "trainer started again, the engine stayed",
    )


def test_a_trainer_rank_killed_mid_gather(pair: Pair, fault_table: FaultTable) -> None:
    stack = pair.stack
    started = time.monotonic()
    with (
        killed_mid_gather(stack, victim=1),
        pytest.raises(ProducerLostError, match="trainer rank 1 died during gather"),
    ):
        stack.sync()
    seconds = time.monotonic() - started
    assert stack.wait(stack.inference._engine.is_paused())
    pair.new_trainers()
    fault_table.add(
        "trainer rank killed mid-gather (SIGKILL)",
        seconds,
        "ProducerLostError, names the rank; engine stays paused",
        "trainer started again, the engine stayed",
    )


def test_a_trainer_rank_paused_beyond_the_limit(pair: Pair, fault_table: FaultTable) -> None:
    stack = pair.stack
    pid = pid_of_trainer(stack, 1)
    try:
        with (
            MidPull(stack, lambda: os.kill(pid, signal.SIGSTOP)) as fault,
            pytest.raises((SyncError, EngineError, PullTimeoutError)) as caught,
        ):
            stack.sync()
        seconds = fault.seconds
    finally:
        os.kill(pid, signal.SIGCONT)
    assert stack.wait(stack.inference._engine.is_paused())
    pair.new_trainers()
    fault_table.add(
        "trainer rank paused beyond the limit of 20 s",
        seconds,
        f"{type(caught.value).__name__}; engine stays paused",
        "trainer started again, the engine stayed",
    )

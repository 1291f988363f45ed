"""Independent engines: one is lost, the others go on; one comes later and is taken in."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from rdt_e2e.config import Config, load_config
from rdt_e2e.errors import ConsumerLostError, EngineError
from tests.fault_table import FaultTable
from tests.live import Stack, engine_up, trainers_up
from tests.long.conftest import LARGEST

# vLLM's own monitor thread ends with an exception when an engine core is lost.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

REPLICAS = LARGEST | {
    "trainer.num_ranks": 2,
    "inference.data_parallel": 1,
    "inference.num_replicas": 2,
}


def test_a_lost_replica_and_a_late_one(
    cluster: Config,
    checkpoints: dict[str, Path],
    runner: asyncio.Runner,
    fault_table: FaultTable,
) -> None:
    config = load_config("local", REPLICAS)
    root = checkpoints["v1"]
    with (
        trainers_up(config, root) as trainers,
        engine_up(config, root, runner, 0) as first,
    ):
        with engine_up(config, root, runner, 1) as second:
            stack = Stack(config, checkpoints, trainers, [first, second], runner)
            stack.bake()
            stack.sync()
            stack.expect("v1")
            held = trainers.call("resident_bytes", None, timeout_s=10)

            pid = stack.wait(second.transfer_memory())["pid"]
            os.kill(pid, signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises((ConsumerLostError, EngineError)) as caught:
                stack.sync()
            seconds = time.monotonic() - started
            assert second.is_dead
            assert stack.wait(first._engine.is_paused()), "the other one must not serve either"
            stack.session.drop(second)
            stack.load("v2")
            stack.sync()
            stack.expect("v2")
            fault_table.add(
                "one of two replicas killed (SIGKILL)",
                seconds,
                f"{type(caught.value).__name__}; both stay paused",
                "degraded, the live replica alone",
            )
        with engine_up(config, root, runner, 1) as late:
            stack.wait(stack.session.join(late))
            stack.load("v1")
            stack.sync()
            stack.expect("v1")
            stack.check_disk("v1")
            assert len(stack.session.replicas) == 2
            fault_table.add(
                "a replica that joins late", None, "baked on its own", "goes to all replicas"
            )
        assert trainers.call("resident_bytes", None, timeout_s=10) in (held, [None, None])

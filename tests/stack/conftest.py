"""One cluster, one model and one pair of fleets for every test of the real stack."""

import asyncio
import contextlib
import io
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from rdt_e2e.config import Config, load_config
from rdt_e2e.console import Console
from rdt_e2e.environment import apply_environment
from rdt_e2e.mini_kimi import ensure_mini_kimi

Result = TypeVar("Result")


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' cluster apart from the one a person may have running."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def config() -> Config:
    """The profile `local`, as users run it."""
    return load_config("local")


@pytest.fixture(scope="session")
def checkpoints(config: Config) -> dict[str, Path]:
    """Mini-kimi in both weight versions."""
    return {v: ensure_mini_kimi(config.paths.cache_dir, v) for v in ("v1", "v2")}


@dataclass
class Stack:
    """Both fleets up and baked, with what a test needs to poke at them.

    Attributes:
        before: What the engine said on dummy weights.
    """

    config: Config
    checkpoints: dict[str, Path]
    trainers: Any
    inference: Any
    session: Any
    runner: asyncio.Runner
    before: Sequence[Any] = ()

    def wait(self, job: Awaitable[Result]) -> Result:
        """Run a coroutine on the engine's own loop."""

        async def wrapped() -> Result:
            return await job

        return self.runner.run(wrapped())

    def say(self) -> Sequence[Any]:
        """Continue the configured prompts."""
        said: Sequence[Any] = self.wait(self.inference.generate(self.config.verify.prompts))
        return said

    def sync(self) -> Any:
        """One sync; returns its timing and counters."""
        return self.wait(self.session.sync())

    def load(self, version: str) -> None:
        """Put a weight version into the trainer's shards."""
        self.trainers.call("load_version", self.checkpoints[version], timeout_s=60)

    def on_trainers(self, change: Callable[[Any], Any]) -> list[Any]:
        """Run a function in every trainer rank, on the actor itself."""
        refs = self.trainers.submit("__ray_call__", change)
        return list(self.trainers.wait(refs, "a test's change", 60))

    def expect(self, version: str) -> None:
        """Check that the engine says what `version` says."""
        from rdt_e2e.verify.text import check_equal, read_reference

        verify = self.config.verify
        reference = read_reference(self.checkpoints[version], verify.prompts, verify.max_tokens)
        check_equal(self.say(), reference, f"after a sync of {version}")


@pytest.fixture(scope="session")
def live(config: Config, checkpoints: dict[str, Path], own_state: None) -> Iterator[Stack]:
    """The shared fleets. A test leaves them synced to v1, or uses `stack` which sees to it."""
    apply_environment(config)
    from rdt_e2e.checkpoint.index import read_index
    from rdt_e2e.checkpoint.layout import build_layout
    from rdt_e2e.cluster.placement import choose_nodes
    from rdt_e2e.cluster.session import cluster_session
    from rdt_e2e.inference.engine import inference_fleet
    from rdt_e2e.sync.session import SyncSession
    from rdt_e2e.trainer.fleet import TrainerFleet

    root = checkpoints["v1"]
    with contextlib.ExitStack() as exits:
        exits.enter_context(cluster_session(config, Console(io.StringIO())))
        import ray

        trainer_node, inference_node = choose_nodes(ray.nodes(), config)
        trainers = TrainerFleet(config, trainer_node)
        exits.callback(trainers.close)
        trainers.start()
        trainers.load(root)
        runner = exits.enter_context(asyncio.Runner())
        fleet_context = inference_fleet(config, root, inference_node)
        inference = runner.run(fleet_context.__aenter__())
        exits.callback(lambda: runner.run(fleet_context.__aexit__(None, None, None)))
        session = SyncSession(trainers, [inference], build_layout(read_index(root)), config)
        stack = Stack(config, checkpoints, trainers, inference, session, runner)
        stack.before = stack.say()
        stack.wait(session.bake())
        stack.sync()
        yield stack


@pytest.fixture
def stack(live: Stack) -> Iterator[Stack]:
    """The shared fleets; v1 is loaded and synced again after the test."""
    yield live
    live.load("v1")
    live.sync()


def flip_bytes(name: str) -> Callable[[Any], None]:
    """A change that inverts every bit of one tensor's rows, wherever they are held."""

    def change(worker: Any) -> None:
        key, row = worker._shards.layout.locate[name]
        local = worker._shards.local(key)
        if row is not None:
            from rdt_e2e.checkpoint.layout import shard_rows

            held = worker._shards.layout.held[key]
            start, stop = shard_rows(
                held.shape[0], worker.config.trainer.num_ranks, worker.producer_rank
            )
            local = local[row - start : row - start + 1] if start <= row < stop else local[:0]
        raw = local.view(torch.uint8)
        raw.bitwise_not_()

    return change

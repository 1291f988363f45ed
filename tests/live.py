"""Live fleets for tests: what `rdt_e2e.sync.driver` starts for a run, in pieces a test can hold.

Nothing here imports Ray or vLLM at the top: both read their settings when they are imported, and the
fixtures set them first.
"""

import asyncio
import contextlib
import io
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open

from rdt_e2e.config import Config
from rdt_e2e.console import Console
from tests.synthetic import edit_shard

Result = TypeVar("Result")


@contextlib.contextmanager
def cluster_up(config: Config) -> Iterator[None]:
    """The local cluster, joined."""
    from rdt_e2e.cluster.session import cluster_session

    with cluster_session(config, Console(io.StringIO())):
        yield


def nodes(config: Config) -> tuple[str, str]:
    """Addresses of the trainer's and of the inference node."""
    import ray

    from rdt_e2e.cluster.placement import choose_nodes

    return choose_nodes(ray.nodes(), config)


@contextlib.contextmanager
def trainers_up(config: Config, root: Path) -> Iterator[Any]:
    """A trainer fleet with a checkpoint loaded."""
    from rdt_e2e.trainer.fleet import TrainerFleet

    trainers = TrainerFleet(config, nodes(config)[0])
    try:
        trainers.start()
        trainers.load(root)
        yield trainers
    finally:
        trainers.close()


@contextlib.contextmanager
def engine_up(
    config: Config, root: Path, runner: asyncio.Runner, replica: int = 0
) -> Iterator[Any]:
    """One engine on dummy weights, driven on `runner`'s loop."""
    from rdt_e2e.inference.engine import inference_fleet

    context = inference_fleet(config, root, nodes(config)[1], replica)
    engine = runner.run(context.__aenter__())
    try:
        yield engine
    finally:
        runner.run(context.__aexit__(None, None, None))


@dataclass
class Stack:
    """Both fleets up and baked, with what a test needs to poke at them.

    Attributes:
        before: What the first engine said on dummy weights.
    """

    config: Config
    checkpoints: dict[str, Path]
    trainers: Any
    engines: list[Any]
    runner: asyncio.Runner
    before: Sequence[Any] = ()
    session: Any = field(init=False)

    def __post_init__(self) -> None:
        self.new_session(self.config)

    @property
    def inference(self) -> Any:
        """The first engine."""
        return self.engines[0]

    def new_session(self, config: Config) -> None:
        """Plan anew, by another configuration; `bake` is for the caller."""
        from rdt_e2e.checkpoint.index import read_index
        from rdt_e2e.checkpoint.layout import build_layout
        from rdt_e2e.sync.session import SyncSession

        layout = build_layout(read_index(self.checkpoints["v1"]))
        self.config = config
        self.session = SyncSession(self.trainers, self.engines, layout, config)

    def bake(self) -> None:
        """Init and bake every engine."""
        self.wait(self.session.bake())

    @contextlib.contextmanager
    def baked_with(self, config: Config) -> Iterator[None]:
        """Another configuration for the length of a block, baked at both ends."""
        before = self.config
        self.new_session(config)
        self.bake()
        try:
            yield
        finally:
            self.new_session(before)
            self.bake()

    def wait(self, job: Awaitable[Result]) -> Result:
        """Run a coroutine on the engines' own loop."""

        async def wrapped() -> Result:
            return await job

        return self.runner.run(wrapped())

    def say(self, engine: Any = None) -> Sequence[Any]:
        """Continue the configured prompts."""
        engine = engine or self.inference
        said: Sequence[Any] = self.wait(engine.generate(self.config.verify.prompts))
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
        """Check that every engine of the session says what `version` says."""
        from rdt_e2e.verify.text import check_equal, read_reference

        verify = self.config.verify
        reference = read_reference(self.checkpoints[version], verify.prompts, verify.max_tokens)
        for engine in self.session.replicas:
            check_equal(self.say(engine), reference, f"after a sync of {version}")

    def check_disk(self, version: str = "v1") -> None:
        """The rung `verify.weights: disk`."""
        for engine in self.session.replicas:
            self.wait(engine.check_weights(self.checkpoints[version]))


# What follows runs in the actors, which cannot import this module: closures, with local imports.


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


@contextlib.contextmanager
def killed_mid_gather(stack: Stack, victim: int, group_index: int = 2) -> Iterator[None]:
    """Kill one of two trainer ranks in the sync inside, once the other waits for it in a gather."""
    import ray

    stack.on_trainers(hang_in_gather(victim, group_index))
    survivor = stack.trainers._actors[1 - victim]

    def kill_once_under_way() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            published = survivor.__ray_call__.remote(lambda worker: len(worker._cache._published))
            if ray.get(published) == group_index:
                break
            time.sleep(0.05)
        ray.kill(stack.trainers._actors[victim])

    killer = threading.Thread(target=kill_once_under_way)
    killer.start()
    try:
        yield
    finally:
        killer.join()


def changed_shape(checkpoint: Path, name: str, folder: Path) -> Path:
    """A copy of a checkpoint in which one tensor has a row less."""
    shutil.copytree(checkpoint, folder)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            found = name in shard.keys()  # noqa: SIM118 - no mapping
        if found:
            edit_shard(path, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    return folder


def hang_in_gather(victim: int, group_index: int) -> Callable[[Any], None]:
    """A change that keeps one rank out of the collective of one group, for ever."""

    def change(worker: Any) -> None:
        gather = worker._shards.gather_group

        def hang(group: Any) -> Any:
            if group.index == group_index:
                threading.Event().wait()
            return gather(group)

        if worker.producer_rank == victim:
            worker._shards.gather_group = hang

    return change


def hold_pulls(after: int) -> Callable[[Any], None]:
    """A change that lets a producer serve `after` pulls of each sync, and then parks the others."""

    def change(worker: Any) -> None:
        replay_all = worker._replay_all
        worker._held = threading.Event()
        worker._release = threading.Event()

        def hold(*args: Any) -> Any:
            if worker._counters.num_pulls >= after:
                worker._held.set()
                worker._release.wait(60)
            return replay_all(*args)

        worker._replay_all = hold

    return change


def await_held() -> Callable[[Any], bool]:
    """Wait until a pull is parked by `hold_pulls`; says whether one is."""

    def wait(worker: Any) -> bool:
        held: bool = worker._held.wait(60)
        return held

    return wait


def release_pulls() -> Callable[[Any], None]:
    """Undo `hold_pulls`."""

    def change(worker: Any) -> None:
        del worker._replay_all
        worker._release.set()

    return change

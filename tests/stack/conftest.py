"""One cluster, one model and one pair of fleets for every test of the real stack."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdt_e2e.config import Config, load_config
from rdt_e2e.environment import apply_environment
from rdt_e2e.mini_kimi import ensure_mini_kimi
from tests.live import Stack, cluster_up, engine_up, trainers_up


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


@pytest.fixture(scope="session")
def live(config: Config, checkpoints: dict[str, Path], own_state: None) -> Iterator[Stack]:
    """The shared fleets. A test leaves them synced to v1, or uses `stack` which sees to it."""
    apply_environment(config)
    root = checkpoints["v1"]
    with contextlib.ExitStack() as exits:
        exits.enter_context(cluster_up(config))
        trainers = exits.enter_context(trainers_up(config, root))
        runner = exits.enter_context(asyncio.Runner())
        engine = exits.enter_context(engine_up(config, root, runner))
        stack = Stack(config, checkpoints, trainers, [engine], runner)
        stack.before = stack.say()
        stack.bake()
        stack.sync()
        yield stack


@pytest.fixture
def stack(live: Stack) -> Iterator[Stack]:
    """The shared fleets; v1 is loaded and synced again after the test."""
    yield live
    live.load("v1")
    live.sync()

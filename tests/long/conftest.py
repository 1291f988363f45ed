"""One cluster large enough for every shape, one model, and the table of faults."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdt_e2e.config import Config, load_config
from rdt_e2e.environment import apply_environment
from rdt_e2e.mini_kimi import ensure_mini_kimi
from tests.live import cluster_up

LARGEST = {
    "trainer.num_ranks": 4,
    "inference.data_parallel": 4,
    "sync.stall_timeout_s": 20,
    "sync.heartbeat_timeout_s": 10,
    "sync.control_timeout_s": 20,
}


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' cluster apart from the one a person may have running."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def config() -> Config:
    """The profile `local` with the largest fleets any test uses, and a short stall limit."""
    return load_config("local", LARGEST)


@pytest.fixture(scope="session")
def checkpoints(config: Config) -> dict[str, Path]:
    """Mini-kimi in both weight versions."""
    return {v: ensure_mini_kimi(config.paths.cache_dir, v) for v in ("v1", "v2")}


@pytest.fixture(scope="session")
def cluster(config: Config, checkpoints: dict[str, Path], own_state: None) -> Iterator[Config]:
    """A joined cluster; one for all, because a process reads Ray's token once."""
    del checkpoints  # Built first: it takes both cores.
    apply_environment(config)
    with cluster_up(config):
        yield config


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """The loop that engines live on."""
    with asyncio.Runner() as made:
        yield made

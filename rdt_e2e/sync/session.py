"""Both fleets, joined: the bake once, then one sync after another."""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rdt_e2e.checkpoint.layout import CheckpointLayout
from rdt_e2e.config import Config
from rdt_e2e.errors import EngineError
from rdt_e2e.sync.plan import init_info
from rdt_e2e.sync.record import SyncTiming
from rdt_e2e.trainer.fleet import TrainerFleet

if TYPE_CHECKING:
    from rdt_e2e.inference.engine import InferenceFleet


class SyncSession:
    """A trainer fleet with resident weights and an inference fleet that takes them.

    Attributes:
        num_syncs: Syncs completed so far.
    """

    def __init__(
        self,
        trainers: TrainerFleet,
        inference: "InferenceFleet",
        layout: CheckpointLayout,
        config: Config,
    ) -> None:
        self._trainers = trainers
        self._inference = inference
        self._layout = layout
        self._config = config
        self.num_syncs = 0

    async def bake(self) -> float:
        """Tell the consumers what is served; they bake, plan and register. Once per engine.

        Returns:
            Seconds it took.
        """
        started = time.perf_counter()
        payload = init_info(self._layout, self._trainers.actor_names, self._config)
        await self._inference.init_transfer(payload)
        return time.perf_counter() - started

    async def sync(self) -> SyncTiming:
        """One sync: pause, start, update while the trainers gather, finish, resume.

        Generation resumes only after `finish` has succeeded on every worker; any failure before
        that leaves the engine paused.

        Returns:
            The driver's timings and the producers' counters.

        Raises:
            SyncError: A trainer rank failed or stalled.
            EngineError: An inference rank failed or stalled.
        """
        seconds: dict[str, float] = {}
        trainers, inference = self._trainers, self._inference
        timeout_s = self._config.sync.sync_timeout_s
        with _timed(seconds, "pause"):
            await inference.pause()
        with _timed(seconds, "start"):
            trainers.call("begin_sync", self._config.num_consumers, timeout_s=timeout_s)
            await inference.start_sync()
        with _timed(seconds, "update"):
            gathers = trainers.submit("run_gathers")
            try:
                await inference.update()
            except EngineError:
                # A failed gather is the cause, a failed pull only its echo.
                trainers.raise_failed(gathers, "gather")
                raise
        with _timed(seconds, "finish"):
            await inference.finish_sync(f"sync-{self.num_syncs + 1}")
            producers = trainers.wait(gathers, "gather", timeout_s)
        with _timed(seconds, "resume"):
            await inference.resume()
        self.num_syncs += 1
        return SyncTiming(self.num_syncs, seconds, producers)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - started

"""Both fleets, joined: the bake once, then one sync after another."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rdt_e2e.checkpoint.layout import CheckpointLayout
from rdt_e2e.config import Config
from rdt_e2e.errors import EngineError, RdtE2EError
from rdt_e2e.sync.plan import init_info
from rdt_e2e.sync.record import SyncTiming
from rdt_e2e.trainer.fleet import TrainerFleet

if TYPE_CHECKING:
    from rdt_e2e.inference.fleet import InferenceFleet


END_TIMEOUT_S = 10.0
"""How long the trainer ranks may take to hear that the sync is given up, in seconds."""


class SyncSession:
    """A trainer fleet with resident weights, and the engines that take them.

    Attributes:
        replicas: The live engines; every sync goes to all of them.
        num_syncs: Syncs completed so far.
    """

    def __init__(
        self,
        trainers: TrainerFleet,
        replicas: Sequence["InferenceFleet"],
        layout: CheckpointLayout,
        config: Config,
    ) -> None:
        self._trainers = trainers
        self._layout = layout
        self._config = config
        self._failed = False
        self._sums_pulls = config.verify.pulls
        self.replicas = list(replicas)
        self.num_syncs = 0

    async def bake(self) -> float:
        """Tell the consumers what is served; they bake, plan and register. Once per engine.

        Returns:
            Seconds it took.
        """
        started = time.perf_counter()
        await self._on_all(self._bake_one)
        return time.perf_counter() - started

    async def join(self, replica: "InferenceFleet") -> None:
        """Take in an engine that was not there before; the next sync goes to it as well."""
        await self._bake_one(replica)
        self.replicas.append(replica)

    def drop(self, replica: "InferenceFleet") -> None:
        """Leave an engine out from now on; the next sync counts on the others only."""
        self.replicas.remove(replica)

    async def sum_pulls(self, *, on: bool) -> None:
        """Take and compare checksums of pulls from the next sync on, or leave them out."""
        timeout_s = self._config.sync.control_timeout_s
        self._trainers.call("sum_pulls", on, timeout_s=timeout_s)
        for replica in self.replicas:
            await replica.call_workers("sum_pulls", on, timeout_s=timeout_s)
        self._sums_pulls = on

    async def sync(self) -> SyncTiming:
        """One sync: pause, start, update while the trainers gather, finish, check, resume.

        Generation resumes only after `finish` has succeeded on every worker and every pull's
        checksum agrees on both ends; any failure before that leaves every engine paused. The next
        call repairs what a failed one left.

        Returns:
            The driver's timings and the producers' counters.

        Raises:
            SyncError: A trainer rank failed or stalled.
            EngineError: An inference rank failed or stalled.
            WeightMismatchError: A pull arrived with other bytes than were sent.
        """
        if not self.replicas:
            raise EngineError("no inference replica is left to sync; start one and join it")
        began = time.monotonic()
        seconds: dict[str, float] = {}
        trainers = self._trainers
        timeout_s = self._config.sync.sync_timeout_s
        with _timed(seconds, "pause"):
            # The trainers are not waited for, unless the engines still pull for a sync that failed.
            begun = [] if self._failed else trainers.submit("begin_sync", self._live_consumers())
            await self._on_all(lambda replica: replica.pause())
        with _timed(seconds, "start"):
            if self._failed:
                await self._on_all(lambda replica: replica.abandon())
                begun = trainers.submit("begin_sync", self._live_consumers())
            trainers.wait(begun, "begin_sync", timeout_s)
            # From here on, until the end, the engines hold weights in part.
            self._failed = True
            # First, so that what is pulled first is ready when it is asked for.
            gathers = trainers.submit("run_gathers")
            await self._while_gathering(gathers, lambda replica: replica.start_sync())
        with _timed(seconds, "update"):
            await self._while_gathering(gathers, lambda replica: replica.update())
        with _timed(seconds, "finish"):
            # Every pull has been served by now.
            sums = trainers.submit("pull_sums") if self._sums_pulls else []
            version = f"sync-{self.num_syncs + 1}"
            await self._while_gathering(gathers, lambda replica: replica.finish_sync(version))
            producers = trainers.wait(gathers, "gather", timeout_s)
        if self._sums_pulls:
            with _timed(seconds, "check"):
                sent = trainers.wait(sums, "pull_sums", timeout_s)
                await self._on_all(lambda replica: replica.check_pulls(sent))
        with _timed(seconds, "resume"):
            await self._on_all(lambda replica: replica.resume())
        self._failed = False
        self.num_syncs += 1
        wall_s = time.monotonic() - began
        return SyncTiming(self.num_syncs, seconds, producers, began, wall_s)

    def _live_consumers(self) -> list[int]:
        """Ids of the consumers of the live replicas, as each of them works out its own."""
        width = self._config.ranks_per_replica
        return [
            replica.replica * width + rank for replica in self.replicas for rank in range(width)
        ]

    async def _bake_one(self, replica: "InferenceFleet") -> None:
        payload = init_info(self._layout, self._trainers.actor_names, self._config, replica.replica)
        await replica.init_transfer(payload)

    async def _while_gathering(
        self, gathers: Sequence[Any], call: Callable[["InferenceFleet"], Awaitable[None]]
    ) -> None:
        """Call every replica; at the first failure end the sync on the trainers too.

        Without that, the other replicas and the gather loops would wait for the failed one until
        their stall limit.
        """
        jobs = [asyncio.ensure_future(call(replica)) for replica in self.replicas]
        try:
            await self._watch(jobs, gathers)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                for job in jobs:
                    job.cancel()
            reason = f"{type(error).__name__}: {_first_line(error)}"
            with contextlib.suppress(RdtE2EError):
                self._trainers.call("end_sync", reason, timeout_s=END_TIMEOUT_S)
            # Pulls fail at once now; what has not answered by then is not going to.
            await asyncio.wait(jobs, timeout=END_TIMEOUT_S)
            for job in jobs:
                job.cancel()
            if not isinstance(error, asyncio.CancelledError):
                await asyncio.gather(*(one.probe(END_TIMEOUT_S) for one in self.replicas))
            raise

    async def _watch(self, jobs: Sequence["asyncio.Future[None]"], gathers: Sequence[Any]) -> None:
        """Wait for every job, or raise the first failure of a job or a gather loop."""
        loops = {asyncio.wrap_future(ref.future()) for ref in gathers}
        for one in loops:
            # One that fails after the first has nobody left to look at it.
            one.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        waiting: set[asyncio.Future[Any]] = {*jobs, *loops}
        while any(not job.done() for job in jobs):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failed = [one for one in done if one.exception() is not None]
            if failed:
                # A failed gather is the cause, a failed pull only its echo.
                self._trainers.raise_failed(gathers, "gather")
                await failed[0]

    async def _on_all(self, call: Callable[["InferenceFleet"], Awaitable[None]]) -> None:
        """Call every replica at once; the first failure is raised when all have answered."""
        results = await asyncio.gather(*map(call, self.replicas), return_exceptions=True)
        failures = [one for one in results if isinstance(one, BaseException)]
        if failures:
            for replica, result in zip(self.replicas, results, strict=True):
                if isinstance(result, EngineError):
                    await replica.probe(END_TIMEOUT_S)
            raise failures[0]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


@contextlib.contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[step] = time.monotonic() - started

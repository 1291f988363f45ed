"""Profiles the syncs of a run: begins and ends each of them on every node, and writes the result.

Nothing that fails here fails a sync: it is named in the profile instead.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rdt_e2e.errors import RdtE2EError
from rdt_e2e.profiling.attribution import VerdictKind
from rdt_e2e.profiling.build import Material, build_iteration, build_profile
from rdt_e2e.profiling.nodes import Nodes
from rdt_e2e.profiling.place import PROFILE_FILE, Place
from rdt_e2e.profiling.producer import begin_producer, end_producer, stop_producer
from rdt_e2e.profiling.reading import ClockOffset, NodeReading

logger = logging.getLogger(__name__)

PROCESS_TIMEOUT_S = 60.0
"""Longest wait for the processes of one fleet to begin, write or end their profile, in seconds."""

AFTER_FAILURE_S = 10.0
"""The same once a sync has failed or was interrupted: a person waits for the end."""


class Timing(Protocol):
    """What a sync returns, as far as it matters here: `SyncTiming`."""

    @property
    def iteration(self) -> int:
        """1 is the cold one."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Duration of each step, in order."""

    @property
    def began(self) -> float:
        """The driver's monotonic clock at the start."""

    @property
    def wall_s(self) -> float:
        """Around all steps, in seconds."""


TimingT = TypeVar("TimingT", bound=Timing)


class Unprofiled:
    """Stands where profiling is off: a sync is a sync."""

    async def sync(self, sync: Callable[[], Awaitable[TimingT]]) -> TimingT:
        """Run it."""
        return await sync()


class Recorder:
    """Profiles one sync after another.

    Args:
        place: Where files lie on each node.
        trainers: The trainer fleet (`TrainerFleet`).
        replicas: Returns the engines (`InferenceFleet`) that take part now.
        ranks_per_replica: Inference ranks of one engine.
        nodes: The nodes to read.
        found: Called with each sync's verdict on the ranks.
    """

    def __init__(
        self,
        place: Place,
        trainers: Any,
        replicas: Callable[[], Sequence[Any]],
        ranks_per_replica: int,
        nodes: Nodes,
        found: Callable[[VerdictKind], None] | None = None,
    ) -> None:
        self._found = found
        self._place = place
        self._trainers = trainers
        self._replicas = replicas
        self._ranks_per_replica = ranks_per_replica
        self._nodes = nodes
        self._problems: list[str] = []
        self._number = 0
        self._timeout_s = PROCESS_TIMEOUT_S
        self.iterations: list[dict[str, Any]] = []

    async def sync(self, sync: Callable[[], Awaitable[TimingT]]) -> TimingT:
        """Run one sync under watch.

        Returns:
            What the sync returns.

        Raises:
            RdtE2EError: What the sync raises; there is no profile of it then.
        """
        self._problems = []
        self._number = len(self.iterations) + 1
        before = await self._begin()
        timing = await sync()
        await self._guarded(self._end, timing, before, default=None)
        return timing

    async def stop(self, *, engines: bool = True) -> None:
        """Take every hook out and remove the files from the nodes.

        Args:
            engines: Whether the engines answer; after a failure they may be stuck, and they end with
                the run anyway. Trainer ranks may outlive it.
        """
        self._problems = []
        self._timeout_s = PROCESS_TIMEOUT_S if engines else AFTER_FAILURE_S
        await self._producers("stop", stop_producer)
        if engines:
            await self._consumers("stop", "sync_profile_stop")
        await self._guarded(asyncio.to_thread, self._nodes.remove, self._timeout_s, default=None)
        for problem in self._problems:
            logger.warning("profile: %s", problem)

    async def _begin(self) -> list[NodeReading]:
        before: list[NodeReading] = await self._guarded(
            asyncio.to_thread, self._nodes.begin, default=[]
        )
        place = self._place
        await self._producers("begin", begin_producer, place, self._number)
        await self._consumers(
            "begin", "sync_profile_begin", place.base, place.run, place.level, self._number
        )
        return before

    async def _end(self, timing: Timing, before: Sequence[NodeReading]) -> None:
        after = await self._guarded(self._collect, default=[])
        offsets = await self._guarded(self._clocks, after, default={})
        ranks = [rank for replica in self._replicas() for rank in self._ranks_of(replica)]
        self.iterations.append(
            build_iteration(
                Material(
                    self._number,
                    timing.iteration == 1,
                    timing.seconds,
                    timing.wall_s,
                    timing.began,
                    ranks,
                    range(len(self._trainers.actor_names)),
                    before,
                    after,
                    offsets,
                    tuple(self._problems),
                )
            )
        )
        if self._found is not None:
            self._found(self.iterations[-1]["attribution"]["verdict"]["kind"])

    async def _collect(self) -> list[NodeReading]:
        await self._producers("write", end_producer)
        await self._consumers("write", "sync_profile_end")
        return await asyncio.to_thread(self._nodes.read)

    async def _clocks(self, readings: Sequence[NodeReading]) -> dict[str, ClockOffset]:
        offsets = {}
        for reading in readings:
            if reading.error is None:
                boot = str(reading.sample["boot_id"])
                offset = await asyncio.to_thread(self._nodes.clock_offset, reading.node_id, boot)
                if offset is not None:
                    offsets[reading.node_id] = offset
        return offsets

    async def _producers(self, what: str, function: Callable[..., None], *args: Any) -> None:
        """Run a function in every trainer rank; a failure is a problem of the profile alone."""
        try:
            refs = self._trainers.submit("__ray_call__", function, *args)
            await asyncio.to_thread(
                self._trainers.wait, refs, f"{what} of the profile", self._timeout_s
            )
        except RdtE2EError as error:
            self._problems.append(f"trainer ranks did not {what} their profile: {error}")

    async def _consumers(self, what: str, method: str, *args: Any) -> None:
        """Call a method of every inference rank; a failure is a problem of the profile alone."""
        for replica in self._replicas():
            try:
                await replica.call_workers(method, *args, timeout_s=self._timeout_s)
            except RdtE2EError as error:
                self._problems.append(f"inference ranks did not {what} their profile: {error}")

    def _ranks_of(self, replica: Any) -> range:
        """Consumer ids of an engine's ranks, as vLLM numbers them."""
        first = replica.replica * self._ranks_per_replica
        return range(first, first + self._ranks_per_replica)

    async def _guarded(self, step: Callable[..., Awaitable[Any]], *args: Any, default: Any) -> Any:
        try:
            return await step(*args)
        except Exception as error:  # noqa: BLE001 - measuring must not fail what is measured
            self._problems.append(f"{type(error).__name__}: {error}")
            logger.warning("profile: incomplete: %s", error)
            return default


@contextlib.asynccontextmanager
async def profiled(run: Any) -> AsyncIterator[Recorder | Unprofiled]:
    """Profile the syncs of a block, as the configuration says, and write `profile.json` at its end.

    Args:
        run: The run with its fleets (`LiveRun`).
    """
    config, folder = run.config, run.record.folder
    if config.profiling.level == "off":
        if run.trainers.resident:
            # A run whose driver was lost may have left its hooks in ranks that outlived it.
            with contextlib.suppress(RdtE2EError):
                refs = run.trainers.submit("__ray_call__", stop_producer)
                run.trainers.wait(refs, "stop of an old profile", PROCESS_TIMEOUT_S)
        yield Unprofiled()
        return
    recorder = recorder_of(run, config.profiling.level)
    completed = False
    try:
        yield recorder
        completed = True
    finally:
        await recorder.stop(engines=completed)
        profile = build_profile(
            folder.name, config.profiling.level, run.record.bake_s, recorder.iterations
        )
        write_profile(folder, profile)


def recorder_of(run: Any, level: str) -> Recorder:
    """A recorder for the syncs of a run.

    Args:
        run: The run with its fleets (`LiveRun`).
        level: `summary` or `full`.
    """
    base = run.config.profiling.node_dir
    place = Place(None if base is None else str(base), run.record.folder.name, level)
    return Recorder(
        place,
        run.trainers,
        lambda: run.session.replicas,
        run.config.ranks_per_replica,
        Nodes(place),
        run.metrics.balance,
    )


def write_profile(folder: Path, profile: Mapping[str, Any]) -> None:
    """Write `profile.json`; a disk that is full costs the profile, not the run."""
    try:
        (folder / PROFILE_FILE).write_text(json.dumps(profile, indent=1) + "\n")
    except OSError as error:
        logger.warning("profile: %s cannot be written: %s", folder / PROFILE_FILE, error.strerror)

"""The main job on live fleets: one sync after another, each of them checked."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rdt_e2e.config import Config
from rdt_e2e.console import Console
from rdt_e2e.errors import ConsumerLostError, EngineError
from rdt_e2e.profiling.metrics import RunMetrics
from rdt_e2e.profiling.progress import shown_progress
from rdt_e2e.profiling.recorder import profiled
from rdt_e2e.sync.record import RunRecord, SyncTiming
from rdt_e2e.sync.session import SyncSession
from rdt_e2e.trainer.fleet import TrainerFleet
from rdt_e2e.verify.text import Reference, check_differs, check_equal


@dataclass
class LiveRun:
    """A run with its fleets, as a job gets it.

    Attributes:
        config: What was asked for.
        console: Where to say how it goes.
        record: The run directory and its contents.
        root: The checkpoint folder.
        trainers: The trainer ranks, loaded.
        reference: What the engine must say after a sync, or None.
        session: Both fleets joined; set before the job starts.
        metrics: What Prometheus gets to know.
    """

    config: Config
    console: Console
    record: RunRecord
    root: Path
    trainers: TrainerFleet
    reference: Reference | None
    session: SyncSession = field(init=False)
    metrics: RunMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = RunMetrics(self.config.name)


Job = Callable[[LiveRun], Awaitable[None]]


async def sync_job(run: LiveRun) -> None:
    """Sync `sync.iters` times; after each, check what the engines say and hold.

    Raises:
        VerificationError: The text or a weight is wrong.
        RdtE2EError: A sync failed.
    """
    async with profiled(run) as profile:
        for iteration in range(1, run.config.sync.iters + 1):
            with run.console.step(f"sync {iteration} ({'cold' if iteration == 1 else 'warm'})"):
                run.record.syncs.append(await profile.sync(lambda: sync_live(run)))
                with run.metrics.verification():
                    await check_text(run, f"after sync {iteration}")
                    await check_weights(run, run.root)


async def sync_live(run: LiveRun) -> SyncTiming:
    """One sync, shown while it runs and counted; see `_sync_with_the_living`."""
    with run.metrics.sync():
        async with shown_progress(run.trainers, run.console):
            timing = await _sync_with_the_living(run)
    run.metrics.synced(timing)
    return timing


async def _sync_with_the_living(run: LiveRun) -> SyncTiming:
    """One sync; when an engine was lost and others live, once more without it."""
    session = run.session
    try:
        return await session.sync()
    except (EngineError, ConsumerLostError) as error:
        dead = [fleet for fleet in session.replicas if fleet.is_dead]
        if not dead or len(dead) == len(session.replicas):
            raise
        for fleet in dead:
            session.drop(fleet)
            run.record.facts.setdefault("lost_replicas", []).append(fleet.replica)
            run.console.info(
                f"  inference replica {fleet.replica} is lost ({error}); going on without it"
            )
        return await session.sync()


async def check_text(run: LiveRun, when: str, *, quiet: bool = False) -> None:
    """Ask every engine, and hold what it says against the reference.

    Args:
        run: The run.
        when: "before" for dummy weights, which must not say what the reference says.
        quiet: Print nothing.

    Raises:
        TextMismatchError: It is not as it must be.
    """
    for fleet in run.session.replicas:
        said = await fleet.generate(run.config.verify.prompts)
        many = run.config.inference.num_replicas > 1
        label = f"{when}, replica {fleet.replica}" if many else when
        run.record.texts[label] = [asdict(one) for one in said]
        for one in () if quiet else said:
            run.console.info(f"  {one.prompt!r} -> {one.text!r}")
        if run.reference is None:
            continue
        if when == "before":
            check_differs(said, run.reference)
        else:
            check_equal(said, run.reference, label)


async def check_weights(run: LiveRun, root: Path, *, quiet: bool = False) -> None:
    """Check the weights of every engine by the rung that `verify.weights` names.

    Args:
        run: The run.
        root: The checkpoint that was synced.
        quiet: Print nothing.

    Raises:
        WeightMismatchError: A weight is wrong.
    """
    said = ""
    if run.config.verify.weights == "disk":
        for fleet in run.session.replicas:
            await fleet.check_weights(root)
        said = "  every tensor of every rank is what the checkpoint gives"
    elif run.config.verify.weights == "names":
        for fleet in run.session.replicas:
            await fleet.check_slices(root)
        said = "  every slice that every rank received is the checkpoint's"
    if said and not quiet:
        run.console.info(said)


async def memory(run: LiveRun) -> dict[str, list[dict[str, Any]]]:
    """What every trainer rank, and the first rank of every engine, holds now."""
    timeout_s = run.config.cluster.start_timeout_s
    return {
        "trainer": run.trainers.call("memory", timeout_s=timeout_s),
        "inference": [await fleet.transfer_memory() for fleet in run.session.replicas],
    }

"""The row `ours`: this package's own sync, whole and in parts."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import ray

from rdt_e2e.bench.result import COLD, TRANSPORT, RowResult, Task
from rdt_e2e.bench.table import OURS
from rdt_e2e.bench.trace import (
    Call,
    start_producer_trace,
    take_producer_trace,
    total_seconds,
)
from rdt_e2e.bench.worker import EXTENSION
from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.cluster.placement import choose_nodes
from rdt_e2e.cluster.session import cluster_session
from rdt_e2e.config import Config
from rdt_e2e.console import Console
from rdt_e2e.errors import WeightMismatchError
from rdt_e2e.inference.engine import inference_fleet
from rdt_e2e.inference.fleet import InferenceFleet
from rdt_e2e.sync.record import SyncTiming
from rdt_e2e.sync.session import SyncSession
from rdt_e2e.trainer.fleet import TrainerFleet

NUM_SINGLE_PULLS = {"smallest": 100, "all": 10}


def measure_ours(task: Task, console: Console) -> RowResult:
    """Sync the slice again and again, with other weights each time.

    Every sync carries the weight version that the engine does not hold, so that a tensor that did
    not arrive is a wrong one. The weights are checked after the cold sync and after the last.

    Args:
        task: What to run.
        console: For progress lines.

    Raises:
        RdtE2EError: A fleet did not start, or a sync failed.
    """
    config = task.config()
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster_session(config, console))
        trainer_node, inference_node = choose_nodes(ray.nodes(), config)
        trainers = TrainerFleet(config, trainer_node)
        stack.callback(trainers.close)
        with console.step("trainer fleet"):
            trainers.start()
            trainers.load(task.roots[0])
        return asyncio.run(_measure(task, config, console, trainers, inference_node))


async def _measure(
    task: Task, config: Config, console: Console, trainers: TrainerFleet, node: str
) -> RowResult:
    result = RowResult(OURS)
    layout = build_layout(read_index(task.roots[0]))
    async with contextlib.AsyncExitStack() as stack:
        with console.step("inference fleet"):
            fleet = await stack.enter_async_context(
                inference_fleet(config, task.roots[0], node, extension=EXTENSION)
            )
        session = SyncSession(trainers, [fleet], layout, config)
        with console.step("bake"):
            result.add_part("init and bake", await session.bake())
        with console.step("the check on dummy weights"):
            await _prove_check(fleet, task.roots[0])
        versions = _alternate(task.roots)
        for iteration in range(1 + task.repeats):
            root = next(versions)
            trainers.call("load_version", root, timeout_s=config.trainer.load_timeout_s)
            with console.step(f"sync {iteration + 1}"):
                _note(result, await session.sync())
            if iteration in (0, task.repeats):
                when = "the cold sync" if iteration == 0 else "the last warm sync"
                with console.step(f"weights after {when}"):
                    result.checks[when] = await check(fleet, root)
        with console.step("pulls without loading"):
            await _pulls_alone(result, task, config, trainers, fleet)
        with console.step("one sync, traced"):
            await _traced(result, config, trainers, fleet, session)
        # Last: they ask for other keys, and so replace what the producers keep of repeated pulls.
        if config.trainer.gather == "owner" and config.sync.transport == "ray":
            with console.step("single pulls"):
                await _single_pulls(result, config, trainers, fleet)
    return result


async def check(fleet: InferenceFleet, root: Path) -> str:
    """Compare every tensor of every worker with the checkpoint's; the worker then holds those.

    Returns:
        What is wrong, or empty text.
    """
    try:
        await fleet.check_weights(root)
    except WeightMismatchError as error:
        return str(error)
    return ""


async def _prove_check(fleet: InferenceFleet, root: Path) -> None:
    """See the check fail on weights that nobody sent, so that its passing says something.

    Raises:
        WeightMismatchError: It passed.
    """
    if not await check(fleet, root):
        raise WeightMismatchError(
            "dummy weights passed the check of the synthetic checkpoint; it says nothing. Look into "
            "rdt_e2e/verify/weights.py"
        )


def _alternate(roots: tuple[Path, Path]) -> Iterator[Path]:
    # Trainer and engine both hold the first by now.
    while True:
        yield roots[1]
        yield roots[0]


def _note(result: RowResult, timing: SyncTiming) -> None:
    result.num_bytes = timing.num_bytes
    if timing.iteration == 1:
        result.add(COLD, timing.end_to_end_s)
        result.facts["cold_sync"] = {
            "seconds": dict(timing.seconds),
            "producers": [dict(counters) for counters in timing.producers],
        }
        return
    result.add_warm_sync(timing)


async def _pulls_alone(
    result: RowResult, task: Task, config: Config, trainers: TrainerFleet, fleet: InferenceFleet
) -> None:
    timeout_s = config.sync.sync_timeout_s
    for _ in range(task.repeats):
        trainers.call("begin_sync", list(range(config.num_consumers)), timeout_s=timeout_s)
        gathers = trainers.submit("run_gathers")
        slowest = max(await fleet.call_workers("pull_without_loading", timeout_s=timeout_s))
        trainers.wait(gathers, "gather", timeout_s)
        result.add(TRANSPORT, slowest)


async def _single_pulls(
    result: RowResult, config: Config, trainers: TrainerFleet, fleet: InferenceFleet
) -> None:
    # A producer serves each number of a sync once.
    trainers.call(
        "begin_sync", list(range(config.num_consumers)), timeout_s=config.sync.sync_timeout_s
    )
    workers = await fleet.call_workers(
        "time_single_pulls", NUM_SINGLE_PULLS, timeout_s=config.sync.sync_timeout_s
    )
    for _, num_bytes, samples in workers[0]:
        size = f"{num_bytes} bytes" if num_bytes < 1e6 else f"{num_bytes / 1e6:.1f} MB"
        # The first pull of a kind makes connections.
        result.parts[f"one pull of {size}"] = samples[1:]


async def _traced(
    result: RowResult,
    config: Config,
    trainers: TrainerFleet,
    fleet: InferenceFleet,
    session: SyncSession,
) -> None:
    """One more sync with every stage of every pull on record; it is not among the timed ones."""
    timeout_s = config.sync.sync_timeout_s
    trainers.wait(trainers.submit("__ray_call__", start_producer_trace), "trace", timeout_s)
    await fleet.call_workers("start_trace", timeout_s=timeout_s)
    timing = await session.sync()
    consumers: list[list[Call]] = await fleet.call_workers("take_trace", timeout_s=timeout_s)
    producers = trainers.wait(
        trainers.submit("__ray_call__", take_producer_trace), "trace", timeout_s
    )
    result.facts["traced_sync"] = {
        "seconds": dict(timing.seconds),
        "consumer_totals": total_seconds(consumers[0]),
        "producer_totals": total_seconds(producers[0]),
        "consumer_calls": consumers[0],
        "producer_calls": producers[0],
    }

"""The task `wire`: warm syncs over a link at one rate after another; runs in the inference namespace."""

import asyncio
import contextlib
import time
from collections.abc import Sequence

import psutil
import ray

from rdt_e2e.bench.link import ADDRESSES, Link
from rdt_e2e.bench.ours import check
from rdt_e2e.bench.result import COLD, TRANSPORT, RowResult, Task
from rdt_e2e.bench.stream import measure_stream
from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.cluster.placement import choose_nodes
from rdt_e2e.cluster.session import cluster_session
from rdt_e2e.config import Config
from rdt_e2e.console import Console
from rdt_e2e.errors import ConfigError, EnvironmentCheckError
from rdt_e2e.inference.engine import inference_fleet
from rdt_e2e.sync.session import SyncSession
from rdt_e2e.trainer.fleet import TrainerFleet

STREAM_SECONDS = 2.0
"""How long the plain stream is to take at the link's rate."""
UNLIMITED_STREAM_BYTES = 2_000_000_000


def measure_wire(task: Task, console: Console) -> list[RowResult]:
    """Sync over the link of the task, at each of its rates, some times each.

    The sync moves another weight version at each rate, and the weights are checked after the last.

    Args:
        task: What to run; it names the link.
        console: For progress lines.

    Returns:
        One result for each rate; `facts` says which, and how the bytes are divided.

    Raises:
        RdtE2EError: A fleet did not start, or a sync failed.
    """
    if task.link is None:
        raise ConfigError("the task names no link")
    config = task.config()
    link = Link(task.link["namespaces"], task.link["devices"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster_session(config, console))
        _wait_for_nodes(config.cluster.start_timeout_s)
        trainer_node, inference_node = choose_nodes(ray.nodes(), config)
        trainers = TrainerFleet(config, trainer_node)
        stack.callback(trainers.close)
        with console.step("trainer fleet"):
            trainers.start()
            trainers.load(task.roots[0])
        rates = task.link["rates"]
        return asyncio.run(_measure(task, link, rates, console, trainers, inference_node))


def _wait_for_nodes(timeout_s: float) -> None:
    """Wait until the second node has joined the head."""
    deadline = time.monotonic() + timeout_s
    while sum(node["Alive"] for node in ray.nodes()) < len(ADDRESSES):
        if time.monotonic() > deadline:
            raise EnvironmentCheckError(
                f"the inference node of the link did not join Ray within {timeout_s:g} s"
            )
        time.sleep(0.1)


async def _measure(
    task: Task,
    link: Link,
    rates: Sequence[float | None],
    console: Console,
    trainers: TrainerFleet,
    node: str,
) -> list[RowResult]:
    config = task.config()
    layout = build_layout(read_index(task.roots[0]))
    results = []
    async with contextlib.AsyncExitStack() as stack:
        with console.step("inference fleet"):
            fleet = await stack.enter_async_context(inference_fleet(config, task.roots[0], node))
        session = SyncSession(trainers, [fleet], layout, config)
        with console.step("bake"):
            bake_s = await session.bake()
        with console.step("first sync"):
            cold = await session.sync()
        for number, rate in enumerate(rates):
            link.set_rate(rate)
            result = RowResult(_label(config, rate), cold.num_bytes)
            result.facts |= {"bytes_per_s": rate, "num_groups": len(layout.groups)}
            with console.step(f"plain stream, {result.row}"):
                seconds, num_bytes = _stream(link, rate)
                result.add(TRANSPORT, seconds)
                result.facts["stream_bytes_per_s"] = num_bytes / seconds
            root = task.roots[(number + 1) % 2]
            trainers.call("load_version", root, timeout_s=config.trainer.load_timeout_s)
            with console.step(f"{task.repeats} syncs, {result.row}"):
                for _ in range(task.repeats):
                    await _sync(result, session)
            results.append(result)
        link.set_rate(None)
        results[0].add_part("init and bake", bake_s)
        results[0].add(COLD, cold.end_to_end_s)
        with console.step("weights after the last sync"):
            results[-1].checks["the last sync"] = await check(fleet, root)
    return results


def _label(config: Config, rate: float | None) -> str:
    at = "no limit" if rate is None else f"{rate / 1e6:g} MB/s"
    return f"{config.trainer.gather}, {at}"


async def _sync(result: RowResult, session: SyncSession) -> None:
    """One timed sync, with how many cores were busy meanwhile, whoever kept them so."""
    before, started = psutil.cpu_times(), time.perf_counter()
    timing = await session.sync()
    after, wall_s = psutil.cpu_times(), time.perf_counter() - started
    idle_s = sum(getattr(after, kind) - getattr(before, kind) for kind in ("idle", "iowait"))
    result.add_warm_sync(timing)
    busy = (psutil.cpu_count() or 1) - idle_s / wall_s
    result.facts.setdefault("busy_cores", []).append(round(busy, 2))


def _stream(link: Link, rate: float | None) -> tuple[float, int]:
    num_bytes = UNLIMITED_STREAM_BYTES if rate is None else int(rate * STREAM_SECONDS)
    sender = link.command("trainer")
    return measure_stream(ADDRESSES["inference"], sender, num_bytes), num_bytes

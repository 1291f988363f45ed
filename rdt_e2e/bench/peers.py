"""The peer rows: vLLM's own weight transfer backends, on the same tensors and the same engine."""

import asyncio
import contextlib
import pickle
import time
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from rdt_e2e.bench.ours import check
from rdt_e2e.bench.result import COLD, END_TO_END, UPDATE, RowResult, Task
from rdt_e2e.bench.worker import EXTENSION
from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.cluster.placement import choose_nodes
from rdt_e2e.cluster.session import cluster_session
from rdt_e2e.config import Config
from rdt_e2e.console import Console
from rdt_e2e.errors import EngineError, RdtE2EError, SyncError
from rdt_e2e.inference.engine import inference_fleet
from rdt_e2e.inference.fleet import InferenceFleet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BACKENDS = {
    "peer-rdt": "sharded_rdt",
    "peer-rdt-ours": "sharded_rdt",
    "peer-nccl": "nccl",
    "peer-nccl-1": "nccl",
    "peer-ipc": "ipc",
}
"""vLLM's name of each row's backend. `peer-rdt-ours` is vLLM's trainer with our consumer, `peer-nccl-1` is
`peer-nccl` with one packing buffer."""


def measure_peer(task: Task, console: Console) -> RowResult:
    """Send the slice again and again with one of vLLM's trainer engines.

    As in the row `ours`, every sync carries a version that the inference engine does not hold.

    Args:
        task: What to run.
        console: For progress lines.

    Raises:
        RdtE2EError: A side did not start, or a sync failed.
    """
    config = task.config()
    if config.trainer.device != "cuda":
        return RowResult(task.row, reason="vLLM's trainer engines need CUDA")
    if config.trainer.num_ranks != 1:
        return RowResult(task.row, reason="this row knows one trainer rank")
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster_session(config, console))
        _, node = choose_nodes(ray.nodes(), config)
        return asyncio.run(_measure(task, config, console, node))


async def _measure(task: Task, config: Config, console: Console, node: str) -> RowResult:
    # Here: importing vLLM's trainer engines takes seconds, and fails without CUDA.
    from rdt_e2e.bench.peer_trainer import peer_actor

    result = RowResult(task.row)
    shared = task.row == "peer-ipc"
    async with contextlib.AsyncExitStack() as stack:
        trainer = None
        if not shared:
            # First, so that it gets the first GPU, as in the row `ours`.
            trainer = peer_actor(config, None)
            stack.callback(ray.kill, trainer)
            with console.step("trainer"):
                result.num_bytes = await _within(config, trainer.load.remote(task.roots[0]))
        with console.step("inference fleet"):
            fleet = await stack.enter_async_context(
                inference_fleet(
                    config,
                    task.roots[0],
                    node,
                    backend=BACKENDS[task.row],
                    extension=EXTENSION,
                )
            )
        if trainer is None:
            uuids = await fleet.call_workers("device_uuid", timeout_s=config.sync.sync_timeout_s)
            trainer = peer_actor(config, uuids[0])
            stack.callback(ray.kill, trainer)
            with console.step("trainer, on the worker's GPU"):
                result.num_bytes = await _within(config, trainer.load.remote(task.roots[0]))
        peer = _Peer(trainer, fleet, config)
        with console.step("init"):
            if BACKENDS[task.row] == "nccl":
                await fleet.call_workers("accept_older_nccl", timeout_s=config.sync.sync_timeout_s)
            started = time.perf_counter()
            result.facts["missing_nccl"] = await peer.drive(trainer.connect.remote(task.row))
            result.add_part("init", time.perf_counter() - started)
        for iteration in range(1 + task.repeats):
            root = task.roots[(iteration + 1) % 2]
            await _within(config, trainer.load.remote(root))
            with console.step(f"sync {iteration + 1}"):
                await _sync(result, peer, iteration)
            if iteration in (0, task.repeats):
                when = "the cold sync" if iteration == 0 else "the last warm sync"
                with console.step(f"weights after {when}"):
                    result.checks[when] = await check(fleet, root)
    result.facts["num_names"] = len(read_index(task.roots[0]).entries)
    return result


async def _sync(result: RowResult, peer: "_Peer", iteration: int) -> None:
    peer.seconds.clear()
    started = time.perf_counter()
    await peer.fleet.pause()
    await peer.drive(peer.trainer.send.remote())
    await peer.fleet.resume()
    seconds = time.perf_counter() - started
    if iteration == 0:
        result.add(COLD, seconds)
        return
    result.add(END_TO_END, seconds)
    result.add(UPDATE, peer.seconds["update"])
    result.add_part("start", peer.seconds["start"])
    result.add_part("finish", peer.seconds["finish"])


class _Peer:
    """Answers what the trainer's engine asks of the inference side.

    Attributes:
        seconds: Time spent in each kind of command since it was last cleared.
    """

    def __init__(self, trainer: Any, fleet: InferenceFleet, config: Config) -> None:
        self.trainer = trainer
        self.fleet = fleet
        self.seconds: dict[str, float] = {}
        self._config = config
        self._verbs: dict[str, Callable[[Any], Awaitable[None]]] = {
            "init": fleet.init_transfer,
            "start": lambda _nothing: fleet.start_sync(),
            "update": lambda info: fleet.update(_portable(info)),
            "finish": lambda _version: fleet.finish_sync("peer"),
        }

    async def drive(self, job: Any) -> Any:
        """Serve commands until the trainer's call is over; returns what that returns.

        Raises:
            RdtE2EError: Either side failed.
        """
        failure: RdtE2EError | None = None
        while True:
            command = await _within(self._config, self.trainer.next_command.remote())
            if command is None:
                break
            verb, payload = command
            error = None
            started = time.perf_counter()
            try:
                await self._verbs[verb](payload)
            except EngineError as problem:
                failure, error = problem, str(problem)
            spent = time.perf_counter() - started
            self.seconds[verb] = self.seconds.get(verb, 0.0) + spent
            self.trainer.answer.remote(error)
            if failure is not None and verb == "update":
                # The trainer may be inside a collective that will never end.
                raise failure
        return await _within(self._config, job)


async def _within(config: Config, ref: Any) -> Any:
    try:
        return await asyncio.wait_for(_await(ref), config.sync.sync_timeout_s)
    except TimeoutError:
        raise SyncError(
            f"the peer's trainer did not answer within {config.sync.sync_timeout_s:g} s"
        ) from None
    except RayError as error:
        raise SyncError(
            f"the peer's trainer failed: {str(error).strip().splitlines()[-1]}"
        ) from error


async def _await(ref: Any) -> Any:
    return await ref


def _portable(update_info: dict[str, Any]) -> dict[str, Any]:
    """Memory handles as text, which is how vLLM's HTTP client sends them."""
    handles = update_info.get("ipc_handles")
    if handles is None:
        return {key: value for key, value in update_info.items() if value is not None}
    rest = {key: value for key, value in update_info.items() if key != "ipc_handles"}
    return rest | {"ipc_handles_pickled": b64encode(pickle.dumps(handles)).decode()}

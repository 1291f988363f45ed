"""One inference engine with all its ranks: vLLM's `AsyncLLM` over all data-parallel ranks."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from rdt_e2e.config import Config
from rdt_e2e.errors import EngineError, WeightMismatchError
from rdt_e2e.verify.weights import MISMATCH_MARK

WEIGHT_BACKEND = "sharded_rdt"
"""vLLM turns tensor transport on for its workers by this literal name; do not change it."""


@dataclass(frozen=True)
class Generation:
    """One prompt's greedy continuation."""

    prompt: str
    token_ids: tuple[int, ...]
    text: str


WORKER_EXTENSION = "rdt_e2e.inference.extension.WeightCheck"
"""Class whose methods every vLLM worker gets."""


def engine_arguments(
    config: Config,
    model: Path,
    node_address: str,
    *,
    backend: str = WEIGHT_BACKEND,
    extension: str = WORKER_EXTENSION,
) -> AsyncEngineArgs:
    """Build vLLM's arguments for this run.

    Args:
        config: The run's configuration.
        model: Checkpoint folder; its weights are not read (`load_format="dummy"`).
        node_address: IP address of the node that is to hold the fleet.
        backend: vLLM's weight transfer backend; another one only to compare with.
        extension: Worker extension class; one that adds to the default.
    """
    inference = config.inference
    return AsyncEngineArgs(
        model=str(model),
        trust_remote_code=config.model.trust_remote_code,
        load_format="dummy",
        dtype=inference.dtype,
        max_model_len=inference.max_model_len,
        max_num_seqs=inference.max_num_seqs,
        max_num_batched_tokens=max(2048, inference.max_model_len),
        gpu_memory_utilization=inference.gpu_memory_utilization,
        kv_cache_dtype=inference.kv_cache_dtype,
        kv_cache_memory_bytes=inference.kv_cache_bytes,
        enforce_eager=inference.enforce_eager,
        tensor_parallel_size=inference.tensor_parallel,
        **_data_parallel(inference.data_parallel, node_address),
        enable_expert_parallel=inference.expert_parallel,
        distributed_executor_backend="ray",
        weight_transfer_config=WeightTransferConfig(backend=backend),
        worker_extension_cls=extension,
        # A prefix cached under the old weights must not answer under the new ones.
        enable_prefix_caching=False,
        enable_log_requests=False,
        disable_log_stats=True,
    )


def _data_parallel(size: int, node_address: str) -> dict[str, Any]:
    """Arguments that place the data-parallel ranks; vLLM takes no address for a single one."""
    if size == 1:
        return {}
    return {
        "data_parallel_size": size,
        "data_parallel_size_local": size,
        "data_parallel_address": node_address,
        "data_parallel_backend": "ray",
    }


class InferenceFleet:
    """One engine with all its ranks, driven through weight transfers.

    Every call is bounded; a call that fails leaves the engine paused, never serving weights that
    arrived in part.

    Attributes:
        replica: Which of the run's independent engines this is, from 0.
        lost: Set by `probe` once a rank no longer answered.
        nics: What `pin_nic` chose, for the ranks of the first data-parallel rank; empty before init.
    """

    def __init__(self, engine: AsyncLLM, config: Config, replica: int = 0) -> None:
        self._engine = engine
        self._config = config
        self.replica = replica
        self.nics: list[dict[str, Any]] = []
        self._who = "the inference fleet"
        if config.inference.num_replicas > 1:
            self._who = f"inference replica {replica}"
        self._request_ids = itertools.count()
        self.lost = False

    @property
    def is_dead(self) -> bool:
        """Whether a process of the engine is gone: vLLM has given it up, or it no longer answers."""
        return self.lost or bool(self._engine.errored)

    async def generate(self, prompts: Sequence[str]) -> list[Generation]:
        """Continue prompts greedily.

        Raises:
            EngineError: The engine failed or did not answer in time.
        """
        timeout_s = self._config.sync.sync_timeout_s
        jobs = asyncio.gather(*(self._one(prompt) for prompt in prompts))
        return list(await self._bounded(jobs, "generation", timeout_s))

    async def _one(self, prompt: str) -> Generation:
        params = SamplingParams(temperature=0.0, max_tokens=self._config.verify.max_tokens)
        rendered = await self._engine.renderer.render_cmpl_async([{"prompt": prompt}])
        request_id = f"verify-{next(self._request_ids)}"
        final = None
        async for output in self._engine.generate(rendered[0], params, request_id=request_id):
            final = output
        if final is None:
            raise EngineError(f"the engine gave no output for the prompt {prompt!r}")
        completion = final.outputs[0]
        return Generation(prompt, tuple(completion.token_ids), completion.text)

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Choose NICs, bake the transfer plan and register buffers on every worker; once per engine.

        Raises:
            EngineError: A name does not bake, memory cannot be registered, or time is up.
        """
        timeout_s = self._config.sync.init_timeout_s
        self.nics = await self.call_workers("pin_nic", timeout_s=timeout_s)
        request = WeightTransferInitRequest(init_info=init_info)
        call = self._engine.init_weight_transfer_engine(request)
        await self._bounded(call, "init and bake", timeout_s)

    async def pause(self) -> None:
        """Stop generation, aborting what runs; requests wait until `resume`.

        An engine that is paused is left as it is: to pause, data-parallel ranks agree through a dummy
        batch, which kills an engine whose weights an interrupted sync left on the meta device.
        """
        timeout_s = self._config.sync.control_timeout_s
        if await self._bounded(self._engine.is_paused(), "asking for the pause", timeout_s):
            return
        await self._bounded(self._stop_scheduling(), "pause", timeout_s)

    async def _stop_scheduling(self) -> None:
        """`AsyncLLM.pause_generation(mode="abort")` without its last step, a sleep of 20 ms.

        The sleep lets the outputs of aborted requests arrive before the call returns, "not required for
        correctness" (vLLM 0.32.0); it would be a tenth of a sync between two GPUs.
        """
        await self._engine.renderer.clear_mm_cache_async()
        await self._engine.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)

    async def resume(self) -> None:
        """Generate again."""
        await self._bounded(
            self._engine.resume_generation(), "resume", self._config.sync.control_timeout_s
        )

    async def start_sync(self) -> None:
        """Prepare every worker's parameters for new weights."""
        await self._bounded(
            self._engine.start_weight_update(), "start", self._config.sync.control_timeout_s
        )

    async def update(self, update_info: dict[str, Any] | None = None) -> None:
        """Pull the whole checkpoint on every worker; returns when all pulls have landed.

        Args:
            update_info: What another backend than ours sends along; ours sends nothing.
        """
        info = {} if update_info is None else update_info
        call = self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self._bounded(call, "update", self._config.sync.sync_timeout_s)

    async def finish_sync(self, weight_version: str) -> None:
        """Finish processing on every worker; only then do the new weights count."""
        call = self._engine.finish_weight_update(weight_version)
        await self._bounded(call, "finish", self._config.sync.sync_timeout_s)

    async def check_pulls(self, served: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        """Compare every pull's checksum with the producers', on every worker.

        Args:
            served: For each producer, what it sent as (consumer id, seq, checksum).

        Raises:
            WeightMismatchError: A pull's bytes differ between its ends.
            EngineError: A worker did not answer in time.
        """
        await self._check("check_pulls", [list(sums) for sums in served], "pull checksums")

    async def check_slices(self, root: Path) -> None:
        """Compare every slice that every worker received with the checkpoint on disk.

        Raises:
            WeightMismatchError: A slice is not what the checkpoint holds, or a name is not synced.
            EngineError: The workers could not read it, or not in time.
        """
        await self._check("check_slices_against", str(root), "the per-name check")

    async def check_weights(self, root: Path) -> None:
        """Compare every tensor of every worker with the checkpoint on disk, which each then holds.

        Raises:
            WeightMismatchError: A tensor of a worker is not what the checkpoint gives.
            EngineError: The workers could not load it, or not in time.
        """
        await self._check("check_weights_against", str(root), "the weight check")

    async def abandon(self) -> None:
        """End an update that failed elsewhere, so that the next `start_sync` is accepted."""
        # It waits for what is still under way, within the limit of one pull.
        await self.call_workers("abandon_update", timeout_s=self._config.sync.sync_timeout_s)

    async def probe(self, timeout_s: float) -> bool:
        """Whether every rank still answers; an engine that does not is `lost` from then on.

        vLLM does not always notice itself: an engine core that waits for a dead worker waits on.
        """
        try:
            await asyncio.wait_for(self._engine.collective_rpc("transfer_memory"), timeout_s)
        except Exception:  # noqa: BLE001 - whatever it is, the engine is of no use
            self.lost = True
        return not self.lost

    async def transfer_memory(self) -> dict[str, Any]:
        """What the first rank holds for the transfer."""
        timeout_s = self._config.sync.sync_timeout_s
        found = await self.call_workers("transfer_memory", timeout_s=timeout_s)
        first: dict[str, Any] = found[0]
        return first

    async def call_workers(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of the worker extension on every worker.

        Returns:
            Results of the workers of the first data-parallel rank; vLLM drops the others.

        Raises:
            EngineError: It failed, or did not return in time.
        """
        call = self._engine.collective_rpc(method, args=args)
        return list(await self._bounded(call, method, timeout_s))

    async def _check(self, method: str, argument: Any, what: str) -> None:
        call = self._engine.collective_rpc(method, args=(argument,))
        try:
            await self._bounded(call, what, self._config.trainer.load_timeout_s)
        except EngineError as error:
            # vLLM hands a worker's error on as text.
            if MISMATCH_MARK in str(error):
                raise WeightMismatchError(str(error)) from error
            raise

    async def _bounded(self, call: Any, what: str, timeout_s: float) -> Any:
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise EngineError(
                f"{self._who} did not complete {what} within {timeout_s:g} s"
            ) from None
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{self._who} failed during {what}: {error}") from error


@contextlib.asynccontextmanager
async def inference_fleet(
    config: Config,
    model: Path,
    node_address: str,
    replica: int = 0,
    *,
    backend: str = WEIGHT_BACKEND,
    extension: str = WORKER_EXTENSION,
) -> AsyncIterator[InferenceFleet]:
    """Start one engine for the length of a block, and shut it down at its end.

    Args:
        config: The run's configuration.
        model: Checkpoint folder.
        node_address: IP address of the node that is to hold it.
        replica: Which of the run's independent engines this is.
        backend: As in `engine_arguments`.
        extension: As in `engine_arguments`.

    Raises:
        EngineError: The engine did not start, or not in time.
    """
    arguments = engine_arguments(config, model, node_address, backend=backend, extension=extension)
    with contextlib.ExitStack() as stack:
        placement = None
        if config.inference.data_parallel == 1:
            placement = stack.enter_context(_pinned(config, node_address))
        try:
            engine = await asyncio.wait_for(
                _in_daemon_thread(lambda: _start(arguments, placement)),
                config.inference.start_timeout_s,
            )
        except TimeoutError:
            raise EngineError(
                f"the inference fleet was not ready within {config.inference.start_timeout_s:g} s; "
                "raise inference.start_timeout_s"
            ) from None
        except Exception as error:
            raise EngineError(f"the inference fleet did not start: {error}") from error
        # Before the placement is released: the workers run in it.
        stack.callback(engine.shutdown)
        yield InferenceFleet(engine, config, replica)


def _start(arguments: AsyncEngineArgs, placement: PlacementGroup | None) -> AsyncLLM:
    if placement is None:
        return AsyncLLM.from_engine_args(arguments)
    vllm_config = arguments.create_engine_config()
    vllm_config.parallel_config.placement_group = placement
    return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)


@contextlib.contextmanager
def _pinned(config: Config, node_address: str) -> Iterator[PlacementGroup]:
    """Room for an engine without data parallelism, which Ray would place on any node.

    With data parallelism, vLLM places its ranks itself, by `data_parallel_address`.
    """
    bundle = {"GPU": 1, f"node:{node_address}": 0.001}
    group = placement_group([bundle] * config.inference.tensor_parallel, strategy="STRICT_PACK")
    try:
        if not group.wait(config.cluster.start_timeout_s):
            raise EngineError(
                f"node {node_address} could not take an engine of {config.inference.tensor_parallel} "
                f"GPUs within {config.cluster.start_timeout_s:g} s; end what else runs there"
            )
        yield group
    finally:
        remove_placement_group(group)


def _in_daemon_thread(start: Callable[[], AsyncLLM]) -> Awaitable[AsyncLLM]:
    """Run a blocking start-up without an executor, whose threads Python joins at exit.

    vLLM waits for its actors without a limit; after Ctrl-C or a time-out that wait must not keep
    the program alive.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[AsyncLLM] = loop.create_future()

    def settle(engine: AsyncLLM | None, error: Exception | None) -> None:
        if future.cancelled():
            if engine is not None:
                engine.shutdown()
        elif engine is not None:
            future.set_result(engine)
        elif error is not None:
            future.set_exception(error)

    def run() -> None:
        try:
            engine, failure = start(), None
        except Exception as error:  # noqa: BLE001 - handed to the waiting caller
            engine, failure = None, error
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, engine, failure)

    threading.Thread(target=run, name="engine-start", daemon=True).start()
    return future

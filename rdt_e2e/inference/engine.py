"""Starting vLLM's `AsyncLLM` over all data-parallel ranks of one engine, and shutting it down."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from rdt_e2e.config import Config
from rdt_e2e.errors import EngineError
from rdt_e2e.inference.fleet import InferenceFleet

WEIGHT_BACKEND = "sharded_rdt"
"""vLLM turns tensor transport on for its workers by this literal name; do not change it."""
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

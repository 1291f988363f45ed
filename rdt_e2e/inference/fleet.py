"""One inference engine with all its ranks, driven through weight transfers."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.v1.engine.async_llm import AsyncLLM

from rdt_e2e.config import Config
from rdt_e2e.errors import EngineError, WeightMismatchError
from rdt_e2e.verify.weights import MISMATCH_MARK


@dataclass(frozen=True)
class Generation:
    """One prompt's greedy continuation."""

    prompt: str
    token_ids: tuple[int, ...]
    text: str


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

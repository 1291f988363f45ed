"""Methods added to every vLLM worker for a benchmark: pulls on their own, and a trace of a sync."""

import time
from collections.abc import Mapping
from typing import Any

import ray
import torch
from ray.experimental import set_target_for_ref

from rdt_e2e.bench.trace import Trace
from rdt_e2e.checkpoint.naming import split_expert
from rdt_e2e.inference.extension import WeightCheck
from rdt_e2e.trainer.packing import ALIGNMENT_BYTES

EXTENSION = "rdt_e2e.bench.worker.BenchWorker"
TRACED = (
    "_issue_pull",
    "_read_pull",
    "_complete_pull",
    "_process_item",
    "_run_quant",
    "drain_pending",
)
"""Methods of the consumer, vLLM's own (0.32.0) and ours, whose calls a trace records."""

DIRECT = ("await_message", "read", "send")
"""Methods of `DirectAgent`."""


class BenchWorker(WeightCheck):
    """What a benchmark asks of a worker beside the check of its weights."""

    weight_transfer_engine: Any

    def device_uuid(self) -> str:
        """Identity of this worker's GPU, as CUDA_VISIBLE_DEVICES takes it."""
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def accept_older_nccl(self) -> list[str]:
        """Let vLLM's NCCL backend work with an older NCCL; see `nccl_symbols.py`."""
        # Here: this module is also imported where there is no CUDA.
        from rdt_e2e.bench.nccl_symbols import drop_missing_symbols

        return drop_missing_symbols()

    def pull_without_loading(self) -> float:
        """Pull every chunk of the plan, and drop what lands instead of loading it.

        Returns:
            Seconds from the first pull's issue to the last one's arrival.
        """
        engine = self.weight_transfer_engine
        engine._dispatch_item = lambda _item: None  # An attribute of the object hides the method.
        try:
            started = time.perf_counter()
            engine._run_chunk_pipeline(engine._cached_plan)
            seconds = time.perf_counter() - started
            # Signals of this pass must not count towards the next one.
            ray.get(engine._pending_frees)
        finally:
            engine._pending_frees = []
            del engine._dispatch_item
        return seconds

    def time_single_pulls(self, repeats: Mapping[str, int]) -> list[tuple[str, int, list[float]]]:
        """Pull experts of one chunk, one pull at a time, in a sync that was begun for it.

        Routed experts are served from the rank that owns them at any time, so nothing but the pull
        itself is in the way.

        Args:
            repeats: Number of pulls by kind: `smallest` is the smallest slice of the chunk, `all` is
                all of its experts at once.

        Returns:
            Kind, bytes per pull and the seconds of each, from the call to the landed bytes.
        """
        engine = self.weight_transfer_engine
        chunk, slices = max(
            ((chunk, _expert_slices(chunk)) for chunk in engine._cached_plan.chunks),
            key=lambda found: sum(num_bytes for _, num_bytes in found[1]),
        )
        smallest = min(slices, key=lambda one: one[1])
        found = []
        seq = 0
        for kind, wanted in (("smallest", [smallest]), ("all", slices)):
            end = 0
            for _, num_bytes in wanted:
                end = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + num_bytes
            keys = [key for key, _ in wanted]
            target = engine._dest_buffers[0][torch.uint8][:end]
            samples = []
            for _ in range(repeats[kind]):
                started = time.perf_counter()
                ref = engine._router.pull(chunk.owner, keys, seq)
                set_target_for_ref(ref, [target])
                ray.get(ref)
                samples.append(time.perf_counter() - started)
                seq += 1
            found.append((kind, end, samples))
        return found

    def start_trace(self) -> None:
        """Record the calls of the consumer's stages and of Ray's transport from now on."""
        self._trace = Trace()
        self._trace.wrap(self.weight_transfer_engine, TRACED)
        self._trace.wrap_transport()
        if self.weight_transfer_engine._direct is not None:
            self._trace.wrap(self.weight_transfer_engine._direct.agent, DIRECT)

    def take_trace(self) -> list[tuple[str, float, float]]:
        """Stop recording; returns (stage, start, end) on this machine's monotonic clock, in seconds."""
        return self._trace.stop()


def _expert_slices(chunk: Any) -> list[tuple[Any, int]]:
    """The keys of a chunk that are routed experts, each with its bytes."""
    return [
        (key, numel * dtype.itemsize)
        for key, (_, dtype, numel, _) in zip(chunk.keys, chunk.pack_layout, strict=True)
        if split_expert(key[0]) is not None
    ]

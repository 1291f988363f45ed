"""The producer: what consumers call on a trainer rank, and the gather loop behind it.

It lives in the trainer's own actor: no second process, no export of device memory. The names and
arguments of the three remote methods are vLLM's; everything else is ours.
"""

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import ray
import torch

from rdt_e2e.checkpoint.owners import gathered_groups
from rdt_e2e.config import SyncConfig, TrainerConfig
from rdt_e2e.fabric.agent import register
from rdt_e2e.trainer.gather_cache import GatherCache
from rdt_e2e.trainer.packing import FetchKey, lay_out, pack, replay
from rdt_e2e.trainer.serve_ring import ServeRings
from rdt_e2e.trainer.shards import ShardedCheckpoint


@dataclass
class ServeCounters:
    """What a producer did since the sync began."""

    num_pulls: int = 0
    num_slices: int = 0
    num_bytes: int = 0
    wait_s: float = 0.0
    """Time pulls waited for their group to be published, summed over pulls."""
    pack_s: float = 0.0
    """Time spent replaying ops and packing, summed over pulls."""
    gather_s: float = 0.0
    """Time the gather loop spent in collectives."""
    max_resident_groups: int = 0


class ProducerMixin:
    """Serves a sharded checkpoint; mixed into the trainer's Ray actor.

    The actor calls `start_producer` once. Per sync the driver calls `begin_sync` on every rank, then
    `run_gathers` on every rank at the same time; consumers call the other three.
    """

    producer_rank: int

    def start_producer(
        self,
        shards: ShardedCheckpoint,
        trainer: TrainerConfig,
        sync: SyncConfig,
        device: torch.device,
    ) -> None:
        """Set up the gather cache and the (still empty) serve rings."""
        self._shards = shards
        self._device = device
        self._groups = gathered_groups(shards.layout, trainer.gather)
        self._owned = shards.owned() if trainer.gather == "owner" else {}
        self._cache = GatherCache(
            self._groups, trainer.lookahead, sync.stall_timeout_s, self.producer_rank
        )
        presize_bytes = int(sync.buffer_presize_gib * 2**30)
        self._rings = ServeRings(sync.num_buffers, device, register, presize_bytes)
        self._counters = ServeCounters()
        self._counters_lock = threading.Lock()

    def begin_sync(self, num_consumers: int) -> None:
        """Reset for a sync with `num_consumers` live consumers; the previous one has ended."""
        self._cache.begin(num_consumers)
        self._counters = ServeCounters()

    def run_gathers(self) -> dict[str, Any]:
        """Gather and publish every group in order; return when all are freed.

        Returns:
            The counters of this sync.

        Raises:
            SyncError: A collective failed, or the sync stalled; every waiting pull raises it too.
        """
        try:
            for group in self._groups:
                self._cache.wait_for_room(group)
                started = time.perf_counter()
                tensors = self._shards.gather_group(group)
                if self._device.type == "cuda":
                    # Publish only bytes that are there: pulls are packed on other threads.
                    torch.cuda.current_stream(self._device).synchronize()
                self._counters.gather_s += time.perf_counter() - started
                self._cache.publish(group, tensors)
            self._cache.wait_all_freed()
        except BaseException as error:
            self._cache.fail(error)
            raise
        self._counters.max_resident_groups = self._cache.max_resident_groups
        return asdict(self._counters)

    @ray.method(tensor_transport="nixl")
    def rdt_produce_weights_batched(
        self, keys: list[FetchKey], *, consumer_id: int, seq: int
    ) -> list[torch.Tensor]:
        """Serve one pull: wait for the names, replay the op chains, pack into this pull's slot.

        Args:
            keys: (name, op chain) pairs.
            consumer_id: Who pulls; selects the serve ring.
            seq: Index of the pull in this consumer's stream to this producer; selects the slot.

        Returns:
            One contiguous 1-D uint8 tensor, whose length is the end of the last slice.

        Raises:
            SyncError: A name, op, consumer or sequence number is refused, or the wait stalled.

        Source: callers in `sharded_rdt_common.py` and `sharded_rdt_engine.py` (vLLM 0.32.0).
        """
        started = time.perf_counter()
        gathered = [name for name, _ in keys if name not in self._owned]
        published = self._cache.get(gathered, consumer_id)
        ready = time.perf_counter()
        slices = [
            replay(name, self._owned[name] if name in self._owned else published[name], chain)
            for name, chain in keys
        ]
        places, num_bytes = lay_out(slices)
        slot = self._rings.slot(consumer_id, seq, num_bytes)
        pack(slices, places, slot)
        self._cache.served()
        with self._counters_lock:
            self._counters.num_pulls += 1
            self._counters.num_slices += len(keys)
            self._counters.num_bytes += num_bytes
            self._counters.wait_s += ready - started
            self._counters.pack_s += time.perf_counter() - ready
        return [slot]

    def reserve_serve_buffer(self, consumer_id: int, nbytes: int, plan_digest: str | None) -> None:
        """Allocate and register a consumer's serve ring, sized for its largest chunk here.

        Args:
            consumer_id: The consumer.
            nbytes: Bytes of the largest chunk it will pull from this producer.
            plan_digest: Only of use to producers that share rings between engines; ours do not.

        Raises:
            PlanError: The consumer already has a smaller ring.
            BackendUnavailableError: The memory cannot be registered.
        """
        del plan_digest
        self._rings.reserve(consumer_id, nbytes)

    def free_group(self, group_index: int) -> None:
        """Count one consumer's signal that it is done with a group; never blocks."""
        self._cache.signal_free(group_index)

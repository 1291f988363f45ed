"""The producer: what consumers call on a trainer rank, and the gather loop behind it.

It lives in the trainer's own actor: no second process, no export of device memory. The names and
arguments of the three remote methods are vLLM's; everything else is ours.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray
import torch

from rdt_e2e.checkpoint.layout import GatherGroup
from rdt_e2e.checkpoint.owners import gathered_groups, largest_pull_bytes
from rdt_e2e.config import Config
from rdt_e2e.errors import GatherError, PullTimeoutError, SyncError
from rdt_e2e.fabric.agent import register
from rdt_e2e.fabric.checksum import checksum
from rdt_e2e.fabric.direct import RemoteSlots
from rdt_e2e.trainer.direct_serve import DirectServer
from rdt_e2e.trainer.gather_cache import GatherCache
from rdt_e2e.trainer.packing import Source
from rdt_e2e.trainer.progress import SyncProgress
from rdt_e2e.trainer.replay import FetchKey
from rdt_e2e.trainer.serve_plan import ServePlan
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
    max_resident_bytes: int = 0
    """Most bytes of gathered tensors held at once, those being gathered included."""


class ProducerMixin:
    """Serves a sharded checkpoint; mixed into the trainer's Ray actor.

    The actor calls `start_producer` once. Per sync the driver calls `begin_sync` on every rank, then
    `run_gathers` on every rank at the same time; consumers call the others.
    """

    producer_rank: int

    def start_producer(
        self, shards: ShardedCheckpoint, config: Config, device: torch.device
    ) -> None:
        """Set up the gather cache and the (still empty) serve rings."""
        trainer, sync = config.trainer, config.sync
        self._shards = shards
        self._device = device
        self._stall_timeout_s = sync.stall_timeout_s
        self._sums_pulls = config.verify.pulls
        self._groups = gathered_groups(shards.layout, trainer.gather)
        self._owned = shards.owned() if trainer.gather == "owner" else {}
        self._cache = GatherCache(
            self._groups,
            trainer.lookahead,
            sync.stall_timeout_s,
            self.producer_rank,
            heartbeat_timeout_s=sync.heartbeat_timeout_s,
        )
        self._rings = ServeRings(
            sync.num_buffers,
            device,
            register,
            num_consumers=config.num_consumers,
            max_chunk_bytes=largest_pull_bytes(shards.layout),
            presize_bytes=int(sync.buffer_presize_gib * 2**30),
        )
        self._counters = ServeCounters()
        self._pull_sums: dict[tuple[int, int], torch.Tensor] = {}
        self._plans: dict[tuple[int, int], ServePlan] = {}
        self._direct = DirectServer(
            device, self.producer_rank, self._serve, self._cache.check, sync.stall_timeout_s
        )
        self._lock = threading.Lock()
        self._gathering = threading.Lock()
        self._gathering_since = 0.0
        self._broken: str | None = None

    def begin_sync(self, consumer_ids: Sequence[int]) -> None:
        """Reset for a sync with these live consumers.

        A gather loop that an earlier driver left behind is ended first.

        Raises:
            PullTimeoutError: That loop did not end within the stall timeout.
            GatherError: A collective failed earlier: the ranks are no longer in step.
        """
        self.end_sync("another sync began")
        if not self._gathering.acquire(timeout=self._stall_timeout_s):
            raise PullTimeoutError(
                f"producer {self.producer_rank}: the gathers of the last sync did not end within "
                f"{self._stall_timeout_s:g} s; start the trainer again"
            )
        self._gathering.release()
        if self._broken is not None:
            raise GatherError(
                f"producer {self.producer_rank} cannot gather any more: {self._broken}. Start the "
                "trainer again"
            )
        self._cache.begin(consumer_ids)
        self._rings.begin()
        self._counters = ServeCounters()
        self._pull_sums = {}

    def end_sync(self, reason: str) -> None:
        """Give up the sync under way: pulls fail at once, and the gather loop comes to its end."""
        self._cache.fail(reason)

    def run_gathers(self) -> dict[str, Any]:
        """Gather and publish every group in order; return when all are freed.

        When the sync has to be given up, the remaining gathers still run and are dropped: a rank
        that left a collective out would leave the others hanging in it, now and in the next sync.

        Returns:
            The counters of this sync.

        Raises:
            SyncError: A collective failed, or the sync stalled or was given up; every waiting pull
                raises it too.
        """
        with self._gathering:
            self._gathering_since = time.monotonic()
            failure: SyncError | None = None
            for group in self._groups:
                if failure is None:
                    try:
                        self._cache.wait_for_room(group)
                    except SyncError as error:
                        failure = error
                        self._cache.fail(str(error))
                tensors = self._gather(group)
                if failure is None:
                    self._cache.publish(group, tensors)
                del tensors
            if failure is not None:
                raise failure
            self._cache.wait_all_freed()
        self._counters.max_resident_groups = self._cache.max_resident_groups
        return asdict(self._counters)

    def sync_progress(self) -> SyncProgress | None:
        """How far the sync is; None while none is under way. Takes no lock and waits for nothing."""
        if not self._gathering.locked():
            return None
        return SyncProgress(
            self._cache.num_freed,
            len(self._groups),
            self._counters.num_bytes,
            time.monotonic() - self._gathering_since,
        )

    def _gather(self, group: GatherGroup) -> dict[str, torch.Tensor]:
        started = time.perf_counter()
        resident_bytes = self._cache.resident_bytes
        try:
            tensors = self._shards.gather_group(group)
            if self._device.type == "cuda":
                # Publish only bytes that are there: pulls are packed on other threads.
                torch.cuda.current_stream(self._device).synchronize()
        except Exception as error:
            # After this the ranks' collectives no longer pair up.
            self._broken = f"the gather of {group.label} failed: {type(error).__name__}: {error}"
            self._cache.fail(self._broken)
            raise GatherError(f"producer {self.producer_rank}: {self._broken}") from error
        self._counters.gather_s += time.perf_counter() - started
        if self._shards.gathers:
            resident_bytes += sum(tensor.nbytes for tensor in tensors.values())
            self._counters.max_resident_bytes = max(
                self._counters.max_resident_bytes, resident_bytes
            )
        return tensors

    def sum_pulls(self, on: bool) -> None:
        """Take checksums of pulls from the next sync on, or leave them out."""
        self._sums_pulls = on

    def pull_sums(self) -> list[tuple[int, int, int]]:
        """Checksum of each blob served in this sync, as (consumer id, seq, checksum)."""
        return [(consumer, seq, int(one)) for (consumer, seq), one in self._pull_sums.items()]

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
        return [self._serve(keys, consumer_id, seq)]

    def open_stream(
        self, consumer_id: int, pulls: list[list[FetchKey]], metadata: bytes
    ) -> RemoteSlots:
        """Take what a consumer will pull in every sync, for `sync.transport: nixl`.

        Args:
            consumer_id: The consumer; its serve ring is reserved.
            pulls: Keys of each of its pulls from this producer, in order.
            metadata: Description of its NIXL agent.

        Returns:
            Where its serve ring is.

        Raises:
            SyncError: It has no ring, or a key is refused.
            BackendUnavailableError: Its agent cannot be reached from here.
        """
        slots = self._rings.slots(consumer_id)
        if not isinstance(pulls, list) or not isinstance(metadata, bytes):
            raise SyncError(
                f"consumer {consumer_id}: a stream is a list of pulls and an agent's metadata, not "
                f"{type(pulls).__name__} and {type(metadata).__name__}"
            )
        for seq, keys in enumerate(pulls):
            self._plan(keys, consumer_id, seq).prepare()
        return self._direct.open(consumer_id, pulls, metadata, slots)

    def serve_stream(self, consumer_id: int, sync: int) -> int:
        """Serve all of a consumer's pulls once; returns their number when the last one is ready.

        Args:
            consumer_id: The consumer, with an open stream.
            sync: A number that it has not used before.

        Raises:
            SyncError: A pull was refused, or the sync ended or stalled here.
        """
        return self._direct.serve(consumer_id, sync, self._rings.depth)

    def _serve(self, keys: Sequence[FetchKey], consumer_id: int, seq: int) -> torch.Tensor:
        started = time.perf_counter()
        slot_bytes = self._rings.check(consumer_id, seq)
        plan = self._plan(keys, consumer_id, seq)
        published = self._cache.get(plan.gathered, consumer_id)
        ready = time.perf_counter()
        slices, num_bytes = self._replay_all(plan, published, slot_bytes)
        slot = self._rings.claim(consumer_id, seq, num_bytes)
        self._pack(plan, slices, slot)
        total = checksum(slot) if self._sums_pulls else None
        self._cache.served()
        with self._lock:
            if total is not None:
                self._pull_sums[consumer_id, seq] = total
            self._counters.num_pulls += 1
            self._counters.num_slices += len(keys)
            self._counters.num_bytes += num_bytes
            self._counters.wait_s += ready - started
            self._counters.pack_s += time.perf_counter() - ready
        return slot

    def _plan(self, keys: Sequence[FetchKey], consumer_id: int, seq: int) -> ServePlan:
        """The plan of a pull: the one of the last sync, if the same is asked for again."""
        plan = self._plans.get((consumer_id, seq))
        if plan is None or plan.keys != keys:
            plan = ServePlan(keys, self._owned, f"consumer {consumer_id}")
            self._plans[consumer_id, seq] = plan
        return plan

    def _replay_all(
        self, plan: ServePlan, published: dict[str, torch.Tensor], slot_bytes: int
    ) -> tuple[list[Source], int]:
        return plan.replay(published, slot_bytes)

    def _pack(self, plan: ServePlan, slices: list[Source], slot: torch.Tensor) -> None:
        plan.pack(slices, slot)

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

    def heartbeat(self, consumer_id: int, who: str) -> None:
        """Note that a consumer lives; it calls every two seconds, whatever else it does."""
        self._cache.hear(consumer_id, who)

    def free_group(self, group_index: int) -> None:
        """Count one consumer's signal that it is done with a group; never blocks."""
        self._cache.signal_free(group_index)

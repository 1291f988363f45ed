"""The consumer on any device: vLLM's `sharded_rdt` engine, with chunk split, checksums and bounds.

Bake, plan, routing, issue-ahead and free signals are inherited unchanged. Added are a limit on the
bytes of one pull, a checksum of every blob that lands, and a limit on every wait whose error says
who was waited for.
"""

import contextlib
import gc
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import ray
import torch

from rdt_e2e.checkpoint.naming import split_expert, summarize
from rdt_e2e.errors import PullTimeoutError, SyncError, WeightMismatchError
from rdt_e2e.fabric.checksum import checksum
from rdt_e2e.fabric.transport_memo import remember_transports
from rdt_e2e.fabric.words import as_bytes
from rdt_e2e.inference.plugin.chunk_split import split_scatters
from rdt_e2e.inference.plugin.direct_reads import DirectReads
from rdt_e2e.inference.plugin.heartbeat import Heartbeat
from rdt_e2e.inference.plugin.internals import (
    LAYERWISE_INFO,
    CallPlan,
    Chunk,
    PendingPull,
    ProcItem,
    RoutedExperts,
    ShardedRDTWeightTransferEngine,
    ShardedRDTWeightTransferInitInfo,
    materialize_layer,
)
from rdt_e2e.inference.plugin.scatter import ScatterList
from rdt_e2e.inference.plugin.waits import wait_for_producers
from rdt_e2e.verify.weights import MISMATCH_MARK


@dataclass
class ConsumerInitInfo(ShardedRDTWeightTransferInitInfo):
    """What this consumer is told at init beyond vLLM's own fields.

    Attributes:
        max_chunk_bytes: Most bytes of one pull; None for no limit.
        wait_timeout_s: Longest wait for a pull, a reservation or a free signal, in seconds.
        pull_checksums: Whether to sum every blob that lands.
        slice_checksums: Whether to sum every slice in it as well.
        transport: ``ray`` or ``nixl``; see `SyncConfig`.
    """

    max_chunk_bytes: int | None = None
    wait_timeout_s: float = 600.0
    pull_checksums: bool = True
    slice_checksums: bool = False
    transport: str = "ray"


@dataclass(frozen=True)
class Flight:
    """A pull under way, and the thread's answer when its bytes have landed."""

    pending: PendingPull
    chunk: Chunk
    landed: futures.Future[None]


class Consumer(ShardedRDTWeightTransferEngine):
    """Pulls as the released consumer does, but reads pulls that are under way side by side.

    Ray posts the read of a pull only when it is asked for the value. A thread for each receive slot
    asks at once, so that the next read is under way when one lands and the link never waits for it.

    Source: `vllm/distributed/weight_transfer/sharded_rdt_engine.py` (0.32.0).
    """

    init_info_cls = ConsumerInitInfo
    _heartbeat: Heartbeat | None = None
    _readers: futures.ThreadPoolExecutor
    _direct: DirectReads | None = None

    def init_transfer_engine(self, init_info: ConsumerInitInfo) -> None:
        """Bake, plan and register as vLLM does; then freeze the object graph, static from here on."""
        self._settings = init_info
        self._in_flight: list[Flight] = []
        self._pull_sums: dict[tuple[int, int], torch.Tensor] = {}
        self._slice_sums: dict[Any, torch.Tensor] = {}
        # A second init, by another trainer: the views of the first plan's chunks are of no use.
        self._pending_frees.clear()
        self._stop_threads()
        super().init_transfer_engine(init_info)
        self._scatters = {id(chunk): ScatterList(chunk) for chunk in self._cached_plan.chunks}
        remember_transports()
        self._direct = self._open_streams() if init_info.transport == "nixl" else None
        self._readers = futures.ThreadPoolExecutor(
            self._ring_depth, "rdt-read", initializer=self._enter_reader
        )
        self._heartbeat = Heartbeat(self._router._actors, self._router.consumer_id)
        # A collection over the plan's objects would cost a pull its tail.
        gc.collect()
        gc.freeze()

    @property
    def receive_ring_bytes(self) -> int:
        """Bytes of the registered receive slots."""
        return sum(slot.numel() for ring in self._dest_buffers for slot in ring.values())

    def start_weight_update(self) -> None:
        """Prepare the parameters; without Ray, the first pulls are on their way meanwhile."""
        self._pull_sums = {}
        self._slice_sums = {}
        if self._direct is not None:
            # What an update left that never came, or failed elsewhere.
            self._settle()
            self._begin_streams(self._direct)
        super().start_weight_update()

    def receive_weights(self, update_info: Any) -> None:
        """Pull the whole plan; after a failure, wait until nothing is in flight any more."""
        try:
            super().receive_weights(update_info)
        except BaseException:
            self._settle()
            raise

    def drain_pending(self) -> None:
        """Wait for processing and for every free signal to have been counted.

        Raises:
            PullTimeoutError: A producer did not answer in time.
            ProducerLostError: A producer is gone.
        """
        frees = list(self._pending_frees)
        self._wait(frees, "free signals", f"{len(frees)} free signals to be counted")
        super().drain_pending()

    def shutdown(self) -> None:
        """Stop reading and reporting, then end as the released engine does."""
        self._stop_threads()
        super().shutdown()

    def sum_pulls(self, on: bool) -> None:
        """Take checksums of pulls from the next sync on, or leave them out."""
        self._settings.pull_checksums = on

    def check_pulls(self, served: Sequence[Sequence[tuple[int, int, int]]]) -> int:
        """Compare the checksums of this sync's pulls with those of the producers.

        Args:
            served: For each producer, what it sent as (consumer id, seq, checksum).

        Returns:
            Number of pulls compared.

        Raises:
            WeightMismatchError: A blob differs, or was summed on one end only.
        """
        plan, router = self._cached_plan, self._router
        me = router.consumer_id
        chunks = {(chunk.owner, chunk.seq): chunk for chunk in plan.chunks}
        sent = {
            (rank, seq): total
            for rank, sums in enumerate(served)
            for consumer, seq, total in sums
            if consumer == me
        }
        got = {pull: int(total) for pull, total in self._pull_sums.items()}
        for pull in sorted(chunks.keys() | sent.keys() | got.keys()):
            if pull not in sent or sent[pull] != got.get(pull):
                names = sorted({name for name, _ in chunks[pull].keys}) if pull in chunks else []
                raise WeightMismatchError(
                    f"consumer {me}: pull {pull[1]} from producer {pull[0]} ({summarize(names)}): "
                    f"its bytes {MISMATCH_MARK}: sent {_hex(sent.get(pull))}, received "
                    f"{_hex(got.get(pull))}"
                )
        return len(got)

    def slice_sums(self) -> dict[Any, int]:
        """Checksum of every slice that landed in this sync, by (name, op chain)."""
        return {key: int(total) for key, total in self._slice_sums.items()}

    @property
    def synced_names(self) -> frozenset[str]:
        """Every checkpoint name this consumer was told of at init."""
        return frozenset(self._name_meta)

    def _resolve_producers(self, init_info: ConsumerInitInfo) -> None:
        super()._resolve_producers(init_info)
        reserve = self._router.reserve_serve_buffers

        def bounded(*args: Any) -> list[Any]:
            refs: list[Any] = reserve(*args)
            self._wait(refs, "reservation", "serve rings to be reserved and registered")
            return refs

        # The engine waits for what this returns without a limit.
        self._router.reserve_serve_buffers = bounded

    def _build_fake_weights(self, names: list[str], *how: Any) -> list[tuple[str, torch.Tensor]]:
        """Leave out experts that no layer here holds, for whose names every loader does nothing.

        Of K2's names on eight ranks that is 87 %, each of which vLLM holds against 1,152 patterns.
        """
        absent = absent_experts(self.model)
        kept = [
            name
            for name in names
            if (found := split_expert(name)) is None or found[1] not in absent
        ]
        return list(super()._build_fake_weights(kept, *how))

    def _chunk_module_scatters(self, modules: list[list[Any]]) -> list[tuple[int, list[Any]]]:
        """Cut one group's copies by owner class, as vLLM does, and then by `max_chunk_bytes`."""
        by_class: list[tuple[int, list[Any]]] = super()._chunk_module_scatters(modules)
        limit = self._settings.max_chunk_bytes
        if limit is None:
            return by_class
        return [
            (owner_class, part)
            for owner_class, scatters in by_class
            for part in split_scatters(scatters, limit)
        ]

    def _run_chunk_pipeline(self, plan: CallPlan) -> None:
        """Pull every chunk, some ahead, with a slot to spare.

        The released engine issues a pull into the slot that has just landed, and so waits for its
        scatter. From three slots on, one of them is kept out of flight here: the next pull goes into
        the slot whose scatter had a whole pull's time to end. Nothing is registered during a sync,
        so that the first one needs no care.
        """
        if self._direct is not None and not self._in_flight:
            self._begin_streams(self._direct)
        for group in plan.pre_free:
            self._signal_group_done(group)
        for number in range(len(self._in_flight), len(plan.chunks)):
            if len(self._in_flight) >= self._most_in_flight:
                self._land_one()
            self._issue_pull(plan.chunks[number], number % self._ring_depth)
        while self._in_flight:
            self._land_one()
        if self._direct is not None:
            self._direct.end()

    @property
    def _most_in_flight(self) -> int:
        depth: int = self._ring_depth
        return depth - 1 if depth > 2 else depth

    def _begin_streams(self, direct: DirectReads) -> None:
        """Start the producers' streams and issue the first pulls, whose slots nothing reads any more."""
        direct.begin()
        for number, chunk in enumerate(self._cached_plan.chunks[: self._most_in_flight]):
            self._issue_pull(chunk, number % self._ring_depth)

    def _land_one(self) -> None:
        """Wait for the oldest pull, hand it on, and signal the groups that end with it."""
        pending, chunk = self._in_flight[0].pending, self._in_flight[0].chunk
        results = self._complete_pull(pending)
        self._dispatch_item(ProcItem(chunk=chunk, results=results, slot=pending.slot))
        for group in chunk.free:
            self._signal_group_done(group)

    def _issue_pull(self, chunk: Chunk, slot: int) -> PendingPull:
        """Ask for a pull; without Ray the producer knows already, and only the slot is waited for."""
        if self._direct is None:
            pending: PendingPull = super()._issue_pull(chunk, slot)
        else:
            self._await_slot(slot)
            buffer = self._dest_buffers[slot][torch.uint8]
            targets = self._pull_targets(chunk, slot, buffer)
            blob = buffer[: chunk.pack_bytes]
            pending = PendingPull(ref=None, keys=chunk.keys, targets=targets, blob=blob, slot=slot)
        landed = self._readers.submit(self._read_pull, pending, chunk)
        self._in_flight.append(Flight(pending, chunk, landed))
        return pending

    def _read_pull(self, pending: PendingPull, chunk: Chunk) -> None:
        """Read one pull into its slot, with a limit; runs on a thread of its own."""
        names = summarize(sorted({name for name, _ in chunk.keys}))
        what = f"pull {chunk.seq} from producer {chunk.owner} ({names})"
        if self._direct is None:
            self._wait([pending.ref], what, what)
        else:
            what = f"consumer {self._router.consumer_id}: {what}"
            self._direct.read(chunk, pending.blob, chunk.seq % self._ring_depth, what)

    def _complete_pull(self, pending: PendingPull) -> dict[Any, torch.Tensor]:
        """Wait until a blob has landed in its slot; the thread that reads it has the limit."""
        flight = next(one for one in self._in_flight if one.pending is pending)
        flight.landed.result()
        self._in_flight = [one for one in self._in_flight if one is not flight]
        return dict(zip(pending.keys, pending.targets, strict=True))

    def _open_streams(self) -> DirectReads:
        router = self._router
        return DirectReads(
            router.consumer_id,
            torch.device(self.device),
            router._actors,
            self._cached_plan.chunks,
            self._settings.wait_timeout_s,
        )

    def _await_slot(self, slot: int) -> None:
        """Wait until what landed in a slot before has been read out of it, on the device too.

        An event that has not been recorded yet counts as passed, so the count comes first.
        """
        if not self._slot_read_done:
            return
        limit_s = self._settings.wait_timeout_s
        with self._slot_cv:
            if not self._slot_cv.wait_for(
                lambda: self._slot_done[slot] >= self._slot_queued[slot], limit_s
            ):
                raise PullTimeoutError(
                    f"consumer {self._router.consumer_id} waited {limit_s:g} s for receive slot {slot} to "
                    "be loaded from; the engine's own processing is stuck"
                )
        self._slot_read_done[slot].synchronize()

    def _enter_reader(self) -> None:
        """What a reading thread does first."""

    def _stop_threads(self) -> None:
        if self._heartbeat is not None:  # The readers were started just before it.
            self._heartbeat.stop()
            self._readers.shutdown(wait=False)

    def _sum_landed(self, item: ProcItem) -> None:
        """Take the checksums of a landed chunk, on the stream that will read its slot."""
        chunk = item.chunk
        if self._settings.pull_checksums:
            blob = self._dest_buffers[item.slot][torch.uint8][: chunk.pack_bytes]
            self._pull_sums[chunk.owner, chunk.seq] = checksum(blob)
        if self._settings.slice_checksums:
            for key, piece in item.results.items():
                self._slice_sums[key] = checksum(as_bytes(piece))

    def _materialize(self, chunk: Chunk) -> None:
        """Make the parameters of every module whose first slices are in this chunk."""
        for layer in chunk.materialize:
            info = LAYERWISE_INFO.get(layer)
            if info is None or not info.can_load():
                raise SyncError(
                    f"{type(layer).__name__} was not prepared for this sync: "
                    "start_weight_update has to come before update_weights"
                )
            materialize_layer(layer, info)

    def _scatter(self, item: ProcItem) -> None:
        """Copy a landed chunk's slices into the parameters."""
        blob = self._dest_buffers[item.slot][torch.uint8]
        self._scatters[id(item.chunk)].copy(blob, item.results)

    def abandon(self) -> None:
        """Forget an update that failed here or on another rank, so that nothing of it comes later."""
        self._settle()
        # What was queued for processing belongs to the failed sync, and so does its error.
        with contextlib.suppress(Exception):
            super().drain_pending()

    def _settle(self) -> None:
        """Let what is still under way end: it must neither land nor count in the next sync."""
        limit_s = self._settings.wait_timeout_s
        # Each read has the limit in itself.
        futures.wait([one.landed for one in self._in_flight])
        frees = list(self._pending_frees)
        if frees:
            ray.wait(frees, num_returns=len(frees), timeout=limit_s, fetch_local=False)
        self._in_flight = []
        self._pending_frees.clear()

    def _wait(self, refs: Sequence[Any], what: str, waited_for: str) -> list[Any]:
        limit_s = self._settings.wait_timeout_s
        return wait_for_producers(refs, self._router.consumer_id, limit_s, what, waited_for)


def absent_experts(model: torch.nn.Module) -> frozenset[int]:
    """Numbers of the routed experts that no layer of this rank holds; empty without expert parallelism."""
    absent: set[int] | None = None
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            local = module.expert_map_manager.expert_map
            here = [] if local is None else (local < 0).nonzero().flatten().tolist()
            absent = set(here) if absent is None else absent & set(here)
    return frozenset(absent or ())


def _hex(total: int | None) -> str:
    return "nothing" if total is None else f"{total % 2**64:016x}"

"""Registered buffers a producer serves from: one ring of slots per consumer."""

import threading
from collections.abc import Callable

import torch

from rdt_e2e.errors import PlanError, SyncError

ROUND_BYTES = 256 << 20
"""Slots are rounded up to this, so that they never grow: a grown buffer may reuse an address whose
registration Ray still remembers, and would then be read through a stale registration."""


def slot_bytes(chunk_bytes: int, presize_bytes: int = 0) -> int:
    """Size of one slot in bytes for the largest chunk it has to hold.

    Source: the consumer sizes its receive slots the same way (`buffer_alloc_bytes` in
    `vllm/distributed/weight_transfer/sharded_rdt_common.py`, 0.32.0).
    """
    rounded = -(-chunk_bytes // ROUND_BYTES) * ROUND_BYTES
    return max(chunk_bytes, presize_bytes, rounded)


class ServeRings:
    """One ring of `depth` slots for each consumer, registered once.

    A pull with sequence number `seq` uses slot `seq % depth`: the consumer has finished reading
    pull `i` before it issues pull `i + depth`. Ray may start calls in any order, so a slot is never
    chosen by order of execution.
    """

    def __init__(
        self,
        depth: int,
        device: torch.device,
        register: Callable[[torch.Tensor], None],
        presize_bytes: int = 0,
    ) -> None:
        self._depth = depth
        self._device = device
        self._register = register
        self._presize_bytes = presize_bytes
        self._rings: dict[int, list[torch.Tensor]] = {}
        # Registration on one NIXL agent is not safe from several threads.
        self._lock = threading.Lock()

    @property
    def registered_bytes(self) -> int:
        """Bytes of all slots of all rings."""
        return sum(slot.numel() for ring in self._rings.values() for slot in ring)

    def reserve(self, consumer_id: int, chunk_bytes: int) -> None:
        """Allocate and register a consumer's ring; calling again with the same size does nothing.

        Args:
            consumer_id: The consumer the ring belongs to.
            chunk_bytes: The largest chunk it will pull here.

        Raises:
            PlanError: The consumer already has a ring, and it is too small: rings never grow.
        """
        wanted = slot_bytes(chunk_bytes, self._presize_bytes)
        with self._lock:
            ring = self._rings.get(consumer_id)
            if ring is not None:
                if ring[0].numel() < wanted:
                    raise PlanError(
                        f"consumer {consumer_id} has slots of {ring[0].numel()} bytes here and now "
                        f"asks for {wanted}; start the trainer again or raise sync.buffer_presize_gib"
                    )
                return
            slots = []
            for _ in range(self._depth):
                slot = torch.empty(wanted, dtype=torch.uint8, device=self._device)
                self._register(slot)
                slots.append(slot)
            self._rings[consumer_id] = slots

    def slot(self, consumer_id: int, seq: int, num_bytes: int) -> torch.Tensor:
        """Return the slot of one pull, cut to its length.

        Args:
            consumer_id: Who pulls.
            seq: Index of the pull among this consumer's pulls from this producer, in this sync.
            num_bytes: Length of the blob.

        Returns:
            1-D uint8 of `num_bytes`, a view of the registered slot.

        Raises:
            SyncError: No ring was reserved, `seq` is negative or the blob is larger than a slot.
        """
        ring = self._rings.get(consumer_id)
        if ring is None:
            raise SyncError(
                f"consumer {consumer_id} pulls without a reserved serve ring; known are "
                f"{sorted(self._rings)}. Initialise the engine's weight transfer first"
            )
        if seq < 0:
            raise SyncError(f"consumer {consumer_id}: pull number {seq} is negative")
        slot = ring[seq % self._depth]
        if num_bytes > slot.numel():
            raise SyncError(
                f"consumer {consumer_id}: a chunk of {num_bytes} bytes does not fit its slot of "
                f"{slot.numel()}; the consumer's plan and its reservation differ"
            )
        return slot[:num_bytes]

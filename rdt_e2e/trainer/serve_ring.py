"""Registered buffers a producer serves from: one ring of slots per consumer."""

import threading
from collections.abc import Callable

import torch

from rdt_e2e.errors import PlanError, SyncError
from rdt_e2e.trainer.replay import is_int, shown

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


class _Ring:
    """One consumer's slots, and which of its pulls were served in this sync."""

    def __init__(self, slots: list[torch.Tensor]) -> None:
        self.slots = slots
        self.begin()

    @property
    def slot_bytes(self) -> int:
        return self.slots[0].numel()

    def begin(self) -> None:
        self.first_unserved = 0
        self.served_ahead: set[int] = set()

    def claim(self, seq: int) -> None:
        self.served_ahead.add(seq)
        while self.first_unserved in self.served_ahead:
            self.served_ahead.remove(self.first_unserved)
            self.first_unserved += 1

    def is_served(self, seq: int) -> bool:
        return seq < self.first_unserved or seq in self.served_ahead


class ServeRings:
    """One ring of `depth` slots for each consumer, registered once.

    A pull with sequence number `seq` uses slot `seq % depth`: the consumer has finished reading
    pull `i` before it issues pull `i + depth`. Ray may start calls in any order, so a slot is never
    chosen by order of execution, and a pull outside that window is refused: it would overwrite
    bytes that are being read.

    Args:
        depth: Slots per ring.
        device: Where the slots are.
        register: Registers a slot with the fabric.
        num_consumers: Consumer ids are below this.
        max_chunk_bytes: No chunk can be larger than this.
        presize_bytes: Smallest size of a slot.
    """

    def __init__(
        self,
        depth: int,
        device: torch.device,
        register: Callable[[torch.Tensor], None],
        *,
        num_consumers: int,
        max_chunk_bytes: int,
        presize_bytes: int = 0,
    ) -> None:
        self.depth = depth
        self._device = device
        self._register = register
        self._num_consumers = num_consumers
        self._max_chunk_bytes = max_chunk_bytes
        self._presize_bytes = presize_bytes
        self._rings: dict[int, _Ring] = {}
        # Registration on one NIXL agent is not safe from several threads.
        self._lock = threading.Lock()

    @property
    def registered_bytes(self) -> int:
        """Bytes of all slots of all rings."""
        return sum(slot.numel() for ring in self._rings.values() for slot in ring.slots)

    def begin(self) -> None:
        """Count pulls from 0 again: a new sync begins."""
        with self._lock:
            for ring in self._rings.values():
                ring.begin()

    def reserve(self, consumer_id: int, chunk_bytes: int) -> None:
        """Allocate and register a consumer's ring; calling again with the same size does nothing.

        Args:
            consumer_id: The consumer the ring belongs to.
            chunk_bytes: The largest chunk it will pull here.

        Raises:
            SyncError: No consumer has this id, or no chunk can have this size.
            PlanError: The consumer already has a ring, and it is too small: rings never grow.
        """
        if not _is_below(consumer_id, self._num_consumers):
            raise SyncError(
                f"consumer id {shown(consumer_id)} reserves a serve ring; this trainer was started for "
                f"{self._num_consumers} consumers, numbered from 0"
            )
        if not _is_below(chunk_bytes, self._max_chunk_bytes + 1) or chunk_bytes == 0:
            raise SyncError(
                f"consumer {consumer_id} reserves chunks of {shown(chunk_bytes)} bytes; the largest "
                f"gather group has {self._max_chunk_bytes}"
            )
        wanted = slot_bytes(chunk_bytes, self._presize_bytes)
        with self._lock:
            ring = self._rings.get(consumer_id)
            if ring is not None:
                if ring.slot_bytes < wanted:
                    raise PlanError(
                        f"consumer {consumer_id} has slots of {ring.slot_bytes} bytes here and now "
                        f"asks for {wanted}; start the trainer again or raise sync.buffer_presize_gib"
                    )
                return
            slots = []
            for _ in range(self.depth):
                slot = torch.empty(wanted, dtype=torch.uint8, device=self._device)
                self._register(slot)
                slots.append(slot)
            self._rings[consumer_id] = _Ring(slots)

    def slots(self, consumer_id: int) -> list[torch.Tensor]:
        """The slots of a consumer's ring, 1-D uint8 and of one size.

        Raises:
            SyncError: No ring was reserved.
        """
        with self._lock:
            return self._ring(consumer_id).slots

    def check(self, consumer_id: int, seq: int) -> int:
        """Check that a pull may be served next, without claiming its slot.

        Args:
            consumer_id: Who pulls.
            seq: Index of the pull among this consumer's pulls from this producer, in this sync.

        Returns:
            Bytes its slot holds.

        Raises:
            SyncError: No ring was reserved, or the pull is not one of the next `depth`.
        """
        with self._lock:
            return self._expect(consumer_id, seq).slot_bytes

    def claim(self, consumer_id: int, seq: int, num_bytes: int) -> torch.Tensor:
        """Take the slot of one pull, cut to its length; each pull can be claimed once in a sync.

        Args:
            consumer_id: Who pulls.
            seq: Index of the pull among this consumer's pulls from this producer, in this sync.
            num_bytes: Length of the blob.

        Returns:
            1-D uint8 of `num_bytes`, a view of the registered slot.

        Raises:
            SyncError: As `check`, or the blob is larger than a slot.
        """
        with self._lock:
            ring = self._expect(consumer_id, seq)
            if num_bytes > ring.slot_bytes:
                raise SyncError(
                    f"consumer {consumer_id}: a chunk of {num_bytes} bytes does not fit its slot of "
                    f"{ring.slot_bytes}; the consumer's plan and its reservation differ"
                )
            ring.claim(seq)
        return ring.slots[seq % self.depth][:num_bytes]

    def _ring(self, consumer_id: int) -> _Ring:
        ring = self._rings.get(consumer_id) if _is_below(consumer_id, self._num_consumers) else None
        if ring is None:
            raise SyncError(
                f"consumer {shown(consumer_id)} pulls without a reserved serve ring; known are "
                f"{sorted(self._rings)}. Initialise the engine's weight transfer first"
            )
        return ring

    def _expect(self, consumer_id: int, seq: int) -> _Ring:
        ring = self._ring(consumer_id)
        last = ring.first_unserved + self.depth - 1
        if not _is_below(seq, last + 1):
            raise SyncError(
                f"consumer {consumer_id}: pull {shown(seq)} before pull {ring.first_unserved} was served; "
                f"at most {self.depth} may be under way"
            )
        if ring.is_served(seq):
            raise SyncError(
                f"consumer {consumer_id}: pull {seq} was served already in this sync; its slot may "
                "hold a later pull by now"
            )
        return ring


def _is_below(value: object, limit: int) -> bool:
    """Whether what arrived is a number from 0 up to, and without, `limit`."""
    return is_int(value) and 0 <= value < limit

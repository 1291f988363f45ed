"""Serving without a call for each pull: a consumer's whole stream, packed as slots become free.

The consumer says at init what it will pull, in order. In a sync the producer packs pull after pull, as far
ahead as its ring is deep, and sends `ready`; the consumer reads the slot, and the read's own message
`done` gives the slot back. Ray carries one call per sync and consumer: its end, its error, and the
death of either side.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rdt_e2e.errors import PullTimeoutError, SyncError
from rdt_e2e.fabric.direct import DirectAgent, RemoteSlots
from rdt_e2e.trainer.replay import FetchKey, is_int, shown

Serve = Callable[[Sequence[FetchKey], int, int], torch.Tensor]
"""Packs a pull, of (keys, consumer id, seq), into its slot."""


def ready(sync: int, seq: int) -> bytes:
    """A producer's message: the slot of pull `seq` holds its bytes."""
    return b"ready %d %d" % (sync, seq)


def done(sync: int, seq: int) -> bytes:
    """A consumer's message: the bytes of pull `seq` have been read."""
    return b"done %d %d" % (sync, seq)


@dataclass
class _Stream:
    peer: str
    pulls: Sequence[Sequence[FetchKey]]
    busy: threading.Lock = field(default_factory=threading.Lock)
    cuda_stream: torch.cuda.Stream | None = None


class DirectServer:
    """The streams of one producer.

    Args:
        device: Where the slots are.
        producer_rank: For messages.
        serve: Packs one pull.
        check: Raises when the sync has ended or stalled; given what is waited for.
        limit_s: Longest wait for a slot that a consumer reads, in seconds.
        agent: Another agent than this process's, for tests.
    """

    def __init__(
        self,
        device: torch.device,
        producer_rank: int,
        serve: Serve,
        check: Callable[[str], None],
        limit_s: float,
        agent: DirectAgent | None = None,
    ) -> None:
        self._device = device
        self._producer_rank = producer_rank
        self._serve = serve
        self._check = check
        self._limit_s = limit_s
        self._agent = agent
        self._streams: dict[int, _Stream] = {}

    @property
    def is_open(self) -> bool:
        """Whether any consumer has a stream here."""
        return bool(self._streams)

    def open(
        self,
        consumer_id: int,
        pulls: Sequence[Sequence[FetchKey]],
        metadata: bytes,
        slots: Sequence[torch.Tensor],
    ) -> RemoteSlots:
        """Take a consumer's stream, in place of any earlier one.

        Args:
            consumer_id: The consumer, whose ring is reserved.
            pulls: Keys of each pull, in the order they will be read; checked.
            metadata: Description of the consumer's agent.
            slots: The consumer's ring.

        Returns:
            Where to read.

        Raises:
            BackendUnavailableError: The consumer's agent cannot be reached.
        """
        if self._agent is None:
            self._agent = DirectAgent(self._device)
        stream = _Stream(self._agent.meet(metadata), pulls)
        if self._device.type == "cuda":
            stream.cuda_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._streams[consumer_id] = stream
        return self._agent.describe(slots)

    def serve(self, consumer_id: int, sync: int, depth: int) -> int:
        """Serve a consumer's whole stream once; returns when the last pull is ready.

        Args:
            consumer_id: The consumer.
            sync: A number that the consumer has not used before.
            depth: Slots of its ring.

        Returns:
            Number of pulls.

        Raises:
            SyncError: The stream is not open, a pull was refused, or the sync ended or stalled.
        """
        stream = self._streams.get(consumer_id) if is_int(consumer_id) else None
        if stream is None or self._agent is None or not is_int(sync):
            raise SyncError(
                f"producer {self._producer_rank}: consumer {shown(consumer_id)} has no open stream here "
                f"(sync {shown(sync)}); initialise the engine's weight transfer first"
            )
        if not stream.busy.acquire(timeout=self._limit_s):
            raise PullTimeoutError(
                f"producer {self._producer_rank}: the last sync of consumer {consumer_id} is still being "
                f"served after {self._limit_s:g} s"
            )
        try:
            # Nobody waits for the last pulls of a sync.
            self._agent.forget(stream.peer)
            for seq, keys in enumerate(stream.pulls):
                if seq >= depth:
                    self._await_slot(self._agent, stream.peer, consumer_id, done(sync, seq - depth))
                self._pack(stream, keys, consumer_id, seq)
                self._agent.send(stream.peer, ready(sync, seq))
        finally:
            stream.busy.release()
        return len(stream.pulls)

    def _await_slot(self, agent: DirectAgent, peer: str, consumer_id: int, message: bytes) -> None:
        what = (
            f"producer {self._producer_rank}: consumer {consumer_id} to give a slot back "
            f"({message.decode()})"
        )
        agent.await_message(peer, message, self._limit_s, what, lambda: self._check(what))

    def _pack(self, stream: _Stream, keys: Sequence[FetchKey], consumer_id: int, seq: int) -> None:
        if stream.cuda_stream is None:
            self._serve(keys, consumer_id, seq)
            return
        # What is packed was gathered on another stream, and waited for there.
        with torch.cuda.stream(stream.cuda_stream):
            self._serve(keys, consumer_id, seq)
        # Only bytes that are there are announced; other consumers' packing is not waited for.
        stream.cuda_stream.synchronize()

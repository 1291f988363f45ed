"""Reading pulls without Ray on the way: `sync.transport: nixl`, the consumer's side.

Each producer is told at init what this consumer pulls from it, in order, and says where its ring is.
In a sync one call per producer starts its stream; `ready` messages and reads do the rest (see
`trainer/direct_serve.py`). That call ends with the stream's error, also when the producer dies.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import ray
import torch

from rdt_e2e.errors import SyncError
from rdt_e2e.fabric.direct import DirectAgent, RemoteSlots
from rdt_e2e.inference.plugin.internals import Chunk
from rdt_e2e.inference.plugin.waits import wait_for_producers
from rdt_e2e.trainer.direct_serve import done, ready


class DirectReads:
    """This consumer's streams.

    Attributes:
        agent: What reads and waits for messages.

    Args:
        consumer_id: This consumer.
        device: Where its receive slots are.
        actors: The producers.
        chunks: Its pulls in the order of the plan.
        limit_s: Longest wait for one pull or call, in seconds.

    Raises:
        SyncError: A producer refuses the stream, or is gone.
        BackendUnavailableError: The agents do not reach each other.
    """

    def __init__(
        self,
        consumer_id: int,
        device: torch.device,
        actors: Sequence[Any],
        chunks: Sequence[Chunk],
        limit_s: float,
    ) -> None:
        self._consumer_id = consumer_id
        self._actors = actors
        self._limit_s = limit_s
        self.agent = DirectAgent(device)
        self._sync = 0
        self._served: dict[int, Any] = {}
        pulls: dict[int, list[Any]] = defaultdict(list)
        for chunk in chunks:
            if chunk.seq != len(pulls[chunk.owner]):
                raise SyncError(
                    f"consumer {consumer_id}: pull {chunk.seq} from producer {chunk.owner} is number "
                    f"{len(pulls[chunk.owner])} of the plan; the stream would be out of order"
                )
            pulls[chunk.owner].append(chunk.keys)
        metadata = self.agent.metadata
        refs = [
            actors[owner].open_stream.remote(consumer_id, keys, metadata)
            for owner, keys in pulls.items()
        ]
        what = f"{len(refs)} producers to open streams"
        slots: list[RemoteSlots] = wait_for_producers(
            refs, consumer_id, limit_s, "the opening of streams", what
        )
        self._slots = dict(zip(pulls, slots, strict=True))
        self._peers = {owner: self.agent.meet(one.metadata) for owner, one in self._slots.items()}

    def begin(self) -> None:
        """Start every producer's stream for a new sync."""
        self._sync += 1
        for peer in self._peers.values():
            self.agent.forget(peer)
        self._served = {
            owner: self._actors[owner].serve_stream.remote(self._consumer_id, self._sync)
            for owner in self._peers
        }

    def read(self, chunk: Chunk, target: torch.Tensor, slot: int, what: str) -> None:
        """Wait until a pull is ready, and read it.

        Args:
            chunk: The pull.
            target: Where its bytes go: 1-D uint8 in a registered slot.
            slot: Which slot of the producer's ring holds it.
            what: What is read, for errors.

        Raises:
            ProducerLostError: The producer died.
            SyncError: The producer gave the sync up, the read failed, or time was up.
        """
        owner, sync = chunk.owner, self._sync
        peer, limit_s = self._peers[owner], self._limit_s

        def check() -> None:
            self._raise_failed(owner, what)

        self.agent.await_message(peer, ready(sync, chunk.seq), limit_s, what, check)
        self.agent.read(
            target,
            peer,
            self._slots[owner],
            slot,
            done(sync, chunk.seq),
            limit_s=limit_s,
            what=what,
            check=check,
        )

    def end(self) -> None:
        """Wait until every producer says that its stream has ended well."""
        refs = list(self._served.values())
        self._served = {}
        what = f"{len(refs)} streams to end"
        wait_for_producers(refs, self._consumer_id, self._limit_s, "the end of streams", what)

    def _raise_failed(self, owner: int, what: str) -> None:
        ref = self._served.get(owner)
        if ref is None or not ray.wait([ref], timeout=0)[0]:
            return
        wait_for_producers([ref], self._consumer_id, self._limit_s, what, what)

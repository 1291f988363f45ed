"""Gathered groups, from their publication until every consumer is done with them.

States of a group within one sync:

    waiting -> published -> freed

The gather loop publishes groups in order and may run at most `lookahead` groups ahead of the
oldest group not yet freed (so `lookahead + 1` are resident). Each consumer signals each group once;
signals may arrive before the publication. The last one frees the group: the free barrier.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from rdt_e2e.checkpoint.layout import GatherGroup
from rdt_e2e.checkpoint.naming import summarize
from rdt_e2e.errors import ConsumerLostError, GatherError, PullTimeoutError, SyncError
from rdt_e2e.trainer.replay import is_int, shown

POLL_S = 1.0
"""Longest sleep between two looks at the stall clock, in seconds."""


class GatherCache:
    """Thread-safe store of the gathered tensors of one producer.

    Every wait ends: when a consumer has not been heard from, or when nothing at all has happened here for `stall_timeout_s` (no publication, no
    serve, no free signal), it raises an error that names what is missing and who has not signalled.
    """

    def __init__(
        self,
        groups: Sequence[GatherGroup],
        lookahead: int,
        stall_timeout_s: float,
        producer_rank: int,
        clock: Callable[[], float] = time.monotonic,
        heartbeat_timeout_s: float = math.inf,
    ) -> None:
        self._groups = groups
        self._lookahead = lookahead
        self._stall_timeout_s = stall_timeout_s
        self._producer_rank = producer_rank
        self._clock = clock
        self._group_of = {name: group.index for group in groups for name in group.names}
        self._changed = threading.Condition()
        self._tensors: dict[str, torch.Tensor] = {}
        self._published: set[int] = set()
        self._freed: set[int] = set()
        self._signals: dict[int, int] = {}
        self._num_consumers = 0
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._heard: dict[int, tuple[float, str]] = {}
        self._error: str | None = None
        self._last_progress = clock()
        self.max_resident_groups = 0

    def begin(self, consumer_ids: Sequence[int]) -> None:
        """Reset for a new sync in which these consumers take part.

        Call it only after the previous sync's `finish` has returned, or has failed.
        """
        with self._changed:
            self._tensors.clear()
            self._published.clear()
            self._freed.clear()
            self._signals.clear()
            self._num_consumers = len(consumer_ids)
            now = self._clock()
            self._heard = {
                one: (now, self._heard.get(one, (now, "never heard from"))[1])
                for one in consumer_ids
            }
            self._error = None
            self.max_resident_groups = 0
            self._progressed()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the gathered tensors held now."""
        with self._changed:
            return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def num_freed(self) -> int:
        """Groups of this sync that every consumer is done with."""
        return len(self._freed)

    def wait_for_room(self, group: GatherGroup) -> None:
        """Block until `group` may be gathered without exceeding the resident limit.

        Raises:
            PullTimeoutError: Nothing progressed for the stall timeout.
            GatherError: The sync has already failed on this producer.
        """

        def room() -> bool:
            return len(self._published - self._freed) <= self._lookahead

        def describe() -> str:
            return (
                f"a free slot to gather {group.label}: {self._lookahead + 1} groups are resident, "
                f"and {self._describe_unfreed()}"
            )

        self._wait(room, describe)

    def publish(self, group: GatherGroup, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make a gathered group servable.

        Args:
            group: The group.
            tensors: One tensor per name of the group, in checkpoint form.
        """
        with self._changed:
            self._tensors.update(tensors)
            self._published.add(group.index)
            resident = len(self._published - self._freed)
            self.max_resident_groups = max(self.max_resident_groups, resident)
            self._free_if_done(group.index)
            self._progressed()

    def fail(self, reason: str) -> None:
        """End this sync here; every present and later wait of it raises the first reason given."""
        with self._changed:
            if self._error is None:
                self._error = reason
            self._tensors.clear()
            self._progressed()

    def get(self, names: Sequence[str], consumer_id: int) -> dict[str, torch.Tensor]:
        """Wait until all of `names` are published, and return them.

        Args:
            names: Checkpoint names, any number of times each.
            consumer_id: Who asks, for the error message.

        Returns:
            Tensor by name.

        Raises:
            SyncError: A name is not served here, or its group was already freed in this sync.
            PullTimeoutError: Nothing progressed for the stall timeout.
            GatherError: Gathering failed.
        """
        wanted = dict.fromkeys(names)
        unknown = [name for name in wanted if name not in self._group_of]
        if unknown:
            raise SyncError(
                f"producer {self._producer_rank} does not serve {summarize(unknown)}, asked for by "
                f"consumer {consumer_id}; the engine was initialised with another checkpoint's names"
            )

        def missing() -> list[str]:
            return [name for name in wanted if name not in self._tensors]

        def ready() -> bool:
            gone = [name for name in wanted if self._group_of[name] in self._freed]
            if gone:
                raise SyncError(
                    f"producer {self._producer_rank}: consumer {consumer_id} asks for "
                    f"{summarize(gone)} after their group was freed in this sync"
                )
            return not missing()

        def describe() -> str:
            waiting = missing()
            labels = sorted({self._groups[self._group_of[name]].label for name in waiting})
            return (
                f"the gather of {summarize(labels)} (names {summarize(waiting)}) for consumer "
                f"{consumer_id}; {self._describe_unfreed()}"
            )

        self._wait(ready, describe)
        with self._changed:
            return {name: self._tensors[name] for name in wanted}

    def served(self) -> None:
        """Note that a pull was served: progress for the stall clock."""
        with self._changed:
            self._progressed()

    def hear(self, consumer_id: int, who: str) -> None:
        """Note that a consumer lives.

        Args:
            consumer_id: The consumer.
            who: Its process and node, for the message when it is lost.
        """
        with self._changed:
            if consumer_id in self._heard:
                self._heard[consumer_id] = (self._clock(), who)

    def signal_free(self, group_index: int) -> None:
        """Count one consumer's signal that it is done with a group; never blocks.

        Raises:
            SyncError: The group does not exist, or more consumers signalled than take part.
        """
        if not is_int(group_index) or not 0 <= group_index < len(self._groups):
            raise SyncError(
                f"producer {self._producer_rank}: no gather group {shown(group_index)}; there are "
                f"{len(self._groups)}"
            )
        with self._changed:
            count = self._signals.get(group_index, 0) + 1
            if count > self._num_consumers:
                raise SyncError(
                    f"producer {self._producer_rank}: {count} free signals for "
                    f"{self._groups[group_index].label}, but {self._num_consumers} consumers take part"
                )
            self._signals[group_index] = count
            self._free_if_done(group_index)
            self._progressed()

    def wait_all_freed(self) -> None:
        """Block until every group is freed.

        Raises:
            PullTimeoutError: Nothing progressed for the stall timeout.
            GatherError: The sync has already failed on this producer.
        """
        self._wait(
            lambda: len(self._freed) == len(self._groups),
            lambda: f"the free barrier of the last groups: {self._describe_unfreed()}",
        )

    def _free_if_done(self, index: int) -> None:
        if index in self._published and self._signals.get(index, 0) == self._num_consumers:
            self._freed.add(index)
            for name in self._groups[index].names:
                self._tensors.pop(name, None)

    def _check_heartbeats(self) -> None:
        now = self._clock()
        for consumer_id, (heard, who) in self._heard.items():
            if now - heard > self._heartbeat_timeout_s:
                raise ConsumerLostError(
                    f"consumer {consumer_id} ({who}) has not been heard from for {now - heard:.0f} s: "
                    "its process or node is gone, or stopped. If it is merely slow, raise "
                    "sync.heartbeat_timeout_s"
                )

    def _progressed(self) -> None:
        self._last_progress = self._clock()
        self._changed.notify_all()

    def _describe_unfreed(self) -> str:
        resident = sorted(self._published - self._freed)
        if not resident:
            return "no group is resident"
        return ", ".join(
            f"{self._groups[i].label} has {self._signals.get(i, 0)} of {self._num_consumers} free signals"
            for i in resident
        )

    def check(self, waiting_for: str) -> None:
        """Raise what ends a wait that is not one of this cache's own.

        Args:
            waiting_for: What is waited for elsewhere, for the message.

        Raises:
            GatherError: The sync has ended on this producer.
            ConsumerLostError: A consumer has not been heard from.
            PullTimeoutError: Nothing progressed for the stall timeout.
        """
        with self._changed:
            self._check(lambda: waiting_for)

    def _check(self, describe: Callable[[], str]) -> float:
        """Raise what ends a wait; the seconds left until it would be the stall timeout."""
        self._check_error()
        self._check_heartbeats()
        stalled_s = self._clock() - self._last_progress
        if stalled_s >= self._stall_timeout_s:
            raise PullTimeoutError(
                f"producer {self._producer_rank} made no progress for {stalled_s:.0f} s while "
                f"waiting for {describe()}. If consumers are merely slow, raise sync.stall_timeout_s"
            )
        return self._stall_timeout_s - stalled_s

    def _check_error(self) -> None:
        if self._error is not None:
            raise GatherError(f"producer {self._producer_rank} ended this sync: {self._error}")

    def _wait(self, done: Callable[[], bool], describe: Callable[[], str]) -> None:
        with self._changed:
            while True:
                self._check_error()
                if done():
                    return
                self._changed.wait(timeout=min(POLL_S, self._check(describe)))

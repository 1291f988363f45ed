"""Profile of a trainer rank: how each pull is served, and how long each gather group is held.

The driver runs the functions at the end in the rank's own process. The served method itself cannot
be wrapped, because Ray calls the class's function and not the object's: it is timed from the first
thing it calls to the last.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

from rdt_e2e.profiling.columns import PRODUCER_COLUMNS
from rdt_e2e.profiling.hooks import Call
from rdt_e2e.profiling.place import Place
from rdt_e2e.profiling.process import ProcessProfile, stop_quietly
from rdt_e2e.profiling.transport import nixl_agent, nixl_transport, watch_agent, watch_extract
from rdt_e2e.trainer import producer as producer_module

SERVE_STAGES: Mapping[str, str] = {
    "get": "wait_s",
    "replay_all": "slice_s",
    "pack": "pack_s",
    "checksum": "checksum_s",
}
"""Stage of serving a pull to its column."""


class ProducerProfile(ProcessProfile):
    """Watches one `TrainerWorker`.

    Args:
        worker: The rank, with its producer started.
        place: What the driver said.
        node_id: Ray's id of this node.
        transport: Ray's NIXL transport; another object in tests.
    """

    role = "producer"
    columns = PRODUCER_COLUMNS

    def __init__(self, worker: Any, place: Place, node_id: str, transport: Any) -> None:
        super().__init__(place, node_id, worker.producer_rank, worker.device.type)
        self._local = threading.local()
        self._published: dict[int, float] = {}
        self._cache = getattr(worker, "_cache", None)
        self._watch_serving(worker)
        self._watch_groups(worker)
        direct = getattr(getattr(worker, "_direct", None), "is_open", False)
        watch_extract(self.hooks, transport, expected=not direct)
        watch_agent(self.hooks, nixl_agent(transport), describes=not direct)

    def begin(self, iteration: int) -> None:
        """Start anew for a sync."""
        self._published = {}
        super().begin(iteration)

    def _watch_serving(self, worker: Any) -> None:
        hooks = self.hooks
        rings, cache = getattr(worker, "_rings", None), self._cache
        ends = ("method_s", "pulls")
        hooks.wrap(rings, "check", before=self._serve_begins, columns=ends, expected=True)
        hooks.wrap(rings, "claim", self._slot_claimed, columns=("bytes",), expected=True)
        hooks.wrap(cache, "served", self._serve_ends, columns=ends, expected=True)
        hooks.wrap(cache, "get", self._stage_done, columns=("wait_s",), expected=True)
        hooks.wrap(
            worker, "_replay_all", self._replayed, columns=("slice_s", "specs"), expected=True
        )
        hooks.wrap(worker, "_pack", self._stage_done, columns=("pack_s",), expected=True)
        # Not expected: verify.pulls may be off, and then 0 is the truth.
        hooks.wrap(producer_module, "checksum", self._stage_done, columns=("checksum_s",))

    def _watch_groups(self, worker: Any) -> None:
        hooks, cache = self.hooks, self._cache
        held = ("held_s", "held_max_s", "groups")
        hooks.wrap(worker, "_gather", self._gathered, columns=("gather_s",))
        hooks.wrap(cache, "wait_for_room", self._had_room, columns=("room_wait_s",))
        hooks.wrap(cache, "publish", before=self._publish_begins, columns=held)
        hooks.wrap(cache, "_free_if_done", self._maybe_freed, columns=held)

    def _serve_begins(self, consumer_id: int, seq: int) -> None:
        self._local.serve = {"consumer": consumer_id, "seq": seq, "started": time.monotonic()}

    def _stage_done(self, call: Call) -> None:
        column = SERVE_STAGES[call.stage]
        self.hooks.add(column, call.seconds)
        self._note(column, call.seconds)

    def _replayed(self, call: Call) -> None:
        self._stage_done(call)
        self.hooks.add("specs", len(call.args[0].wanted))

    def _slot_claimed(self, call: Call) -> None:
        self.hooks.add("bytes", call.args[2])
        self._note("bytes", call.args[2])

    def _serve_ends(self, call: Call) -> None:
        serve = self._local.__dict__.pop("serve", None)
        if serve is None:
            return
        started = serve.pop("started")
        self.hooks.add("method_s", call.ended - started)
        self.hooks.add("pulls", 1)
        self.write("serve", span=(started, call.ended), **serve)

    def _note(self, key: str, value: float) -> None:
        serve = getattr(self._local, "serve", None)
        if serve is not None:
            serve[key] = value

    def _gathered(self, call: Call) -> None:
        self.hooks.add("gather_s", call.seconds)
        self.write("gather", group=call.args[0].label, span=(call.started, call.ended))

    def _had_room(self, call: Call) -> None:
        self.hooks.add("room_wait_s", call.seconds)

    def _publish_begins(self, group: Any, _tensors: Any) -> None:
        self._published[group.index] = time.monotonic()
        self.hooks.add("groups", 1)

    def _maybe_freed(self, call: Call) -> None:
        index = call.args[0]
        if self._cache is None or index not in self._cache._freed:
            return
        published = self._published.pop(index, None)
        if published is not None:
            self.hooks.add("held_s", call.ended - published)
            self.hooks.raise_to("held_max_s", call.ended - published)
            self.write("held", group=index, span=(published, call.ended))


# Run in the rank by reference, with the rank as the first argument.


def begin_producer(worker: Any, place: Place, iteration: int) -> None:
    """Begin a sync's profile in a trainer rank, hooking in if that has not been done."""
    from rdt_e2e.profiling.nodes import this_node_id

    profile = getattr(worker, "sync_profile", None)
    if profile is None or profile.place != place:
        # What an earlier driver left behind goes first.
        stop_quietly(profile)
        profile = ProducerProfile(worker, place, this_node_id(), nixl_transport())
        worker.sync_profile = profile
    profile.begin(iteration)


def end_producer(worker: Any) -> None:
    """Write a trainer rank's figures to its node's disk."""
    worker.sync_profile.end()


def stop_producer(worker: Any) -> None:
    """Take every hook out of a trainer rank."""
    stop_quietly(getattr(worker, "sync_profile", None))
    worker.sync_profile = None

"""Profile of an inference rank: what each pull waited for, and what handling its bytes took."""

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from rdt_e2e.profiling.columns import CONSUMER_COLUMNS
from rdt_e2e.profiling.hooks import Call
from rdt_e2e.profiling.place import Place
from rdt_e2e.profiling.process import ProcessProfile, stop_quietly
from rdt_e2e.profiling.transport import (
    Receive,
    ReceiveWatch,
    nixl_agent,
    nixl_transport,
    watch_agent,
)

logger = logging.getLogger(__name__)

RELOAD = "vllm.model_executor.model_loader.reload"
"""Package of vLLM (0.32.0) whose functions its own engine imports where it calls them."""
PROCESS_STAGES: Mapping[str, str] = {
    "process_item": "scatter_s",
    "sum_landed": "checksum_s",
    "materialize": "materialize_s",
    "finish_layer": "post_load_s",
    "run_quant": "post_load_s",
    "kernel_copy": "kernel_copy_s",
}
"""Stage of handling a landed chunk to the column that gets its own seconds."""


class ConsumerProfile(ProcessProfile):
    """Watches one weight transfer engine.

    Args:
        engine: The engine, initialised.
        place: What the driver said.
        node_id: Ray's id of this node.
        transport: Ray's NIXL transport; another object in tests.
    """

    role = "consumer"
    columns = CONSUMER_COLUMNS

    def __init__(self, engine: Any, place: Place, node_id: str, transport: Any) -> None:
        super().__init__(place, node_id, engine._router.consumer_id, engine.device.type)
        self._pulls: dict[int, tuple[Any, Call]] = {}
        self._reads: dict[int, tuple[Call, Receive | None]] = {}
        self._reading = threading.local()
        self._watch_pulls(engine)
        self._watch_processing(engine)
        agent = nixl_agent(transport)
        watch_agent(self.hooks, agent)
        direct = getattr(engine, "_direct", None)
        self._receives = ReceiveWatch(
            self.hooks, transport, agent, self._on_receive, getattr(direct, "agent", None)
        )

    def begin(self, iteration: int) -> None:
        """Start anew for a sync."""
        self._pulls = {}
        self._reads = {}
        self._receives.reset()
        super().begin(iteration)

    def _watch_pulls(self, engine: Any) -> None:
        hooks = self.hooks
        both = ("pull_s", "pulls", "bytes", "produce_wait_s")
        hooks.wrap(engine, "_issue_pull", self._issued, columns=("issue_s", *both), expected=True)
        hooks.wrap(
            engine,
            "_read_pull",
            self._read,
            before=self._read_begins,
            columns=("produce_wait_s", "meta_wait_s"),
            expected=True,
        )
        hooks.wrap(engine, "_complete_pull", self._completed, columns=both, expected=True)
        hooks.wrap(engine, "receive_weights", self._span("receive_weights"))
        hooks.wrap(engine, "drain_pending", self._drained, columns=("drain_s",), expected=True)

    def _watch_processing(self, engine: Any) -> None:
        hooks = self.hooks
        full = self.place.keeps_events
        hooks.wrap(
            engine,
            "_process_item",
            self._processed,
            columns=("process_s", "scatter_s"),
            settle=_stream_wait(engine, "_proc_stream") if full else None,
            expected=True,
        )
        # Not expected: verify.pulls may be off, and then 0 is the truth.
        hooks.wrap(engine, "_sum_landed", columns=("checksum_s",))
        inline = hasattr(engine, "_finish_layer")
        hooks.wrap(
            engine,
            "_finish_layer" if inline else "_run_quant",
            None if inline else self._post_loaded,
            columns=("post_load_s",),
            settle=None if inline or not full else _stream_wait(engine, "_quant_stream"),
            expected=True,
        )
        hooks.wrap(engine, "_materialize", columns=("materialize_s",), expected=True)
        ours = _module_with(engine, "copy_into_kernel_storage")
        hooks.wrap(
            ours or sys.modules.get(f"{RELOAD}.layerwise"),
            "copy_into_kernel_storage" if ours else "_copy_and_restore_kernel_tensors",
            stage="kernel_copy",
            columns=("kernel_copy_s",),
            expected=True,
        )

    def _issued(self, call: Call) -> None:
        self.hooks.add("issue_s", call.seconds)
        self.hooks.add("pull_s", call.seconds)
        if not call.failed:
            # The pending pull is kept too: its id must not be given to another one.
            self._pulls[id(call.result)] = (call.result, call)

    def _read_begins(self, *_pull: Any) -> None:
        self._reading.received = None

    def _on_receive(self, receive: Receive) -> None:
        # On the thread that reads the pull, whichever way it comes.
        self._reading.received = receive

    def _read(self, call: Call) -> None:
        self._reads[id(call.args[0])] = (call, self._reading.received)

    def _completed(self, call: Call) -> None:
        self.hooks.add("pull_s", call.seconds)
        pull = id(call.args[0])
        _, issue = self._pulls.pop(pull)
        read, received = self._reads.pop(pull, (call, None))
        if call.failed:
            return
        chunk = issue.args[0]
        self.hooks.add("pulls", 1)
        self.hooks.add("bytes", chunk.pack_bytes)
        if received is not None:
            self.hooks.add("produce_wait_s", received.started - issue.started)
            self.hooks.add("meta_wait_s", received.started - read.started)
        self.write(
            "pull",
            seq=chunk.seq,
            producer=chunk.owner,
            bytes=chunk.pack_bytes,
            issue=(issue.started, issue.ended),
            get=(call.started, call.ended),
            receive=None if received is None else (received.started, received.ended),
            transfer=None if received is None else received.transfer,
        )

    def _processed(self, call: Call) -> None:
        chunk = call.args[0].chunk
        self._handled("process", call, seq=chunk.seq, producer=chunk.owner)

    def _post_loaded(self, call: Call) -> None:
        self._handled("post_load", call)

    def _handled(self, kind: str, call: Call, **fields: Any) -> None:
        self.hooks.add("process_s", call.seconds)
        stages: dict[str, float] = {}
        for stage, seconds in (*call.inside.items(), (call.stage, call.own_s)):
            column = PROCESS_STAGES.get(stage)
            if column is not None:
                stages[column] = stages.get(column, 0.0) + seconds
        for column, seconds in stages.items():
            self.hooks.add(column, seconds)
        self.write(kind, span=(call.started, call.ended), stages=stages, **fields)

    def _drained(self, call: Call) -> None:
        self.hooks.add("drain_s", call.seconds)
        self._span("drain")(call)

    def _span(self, name: str) -> Callable[[Call], None]:
        return lambda call: self.write("span", name=name, span=(call.started, call.ended))


def _stream_wait(engine: Any, stream: str) -> Callable[[], None]:
    """Wait for one of the engine's streams; the phase's clock then shows the device's time."""

    def wait() -> None:
        found = getattr(engine, stream, None)
        if isinstance(found, torch.cuda.Stream):
            found.synchronize()

    return wait


def _module_with(engine: Any, function: str) -> ModuleType | None:
    """The module, of those that the engine's classes are defined in, that calls a function by name."""
    modules = [sys.modules.get(one.__module__) for one in type(engine).__mro__]
    return next((one for one in modules if one is not None and hasattr(one, function)), None)


class SyncProfile:
    """Methods for vLLM's worker extension: begin, end and stop a profile on this rank.

    None of them raises: a rank without a profile is named in the report, and the sync goes on.
    """

    weight_transfer_engine: Any
    _sync_profile: ConsumerProfile | None

    def sync_profile_begin(self, base: str | None, run: str, level: str, iteration: int) -> None:
        """Begin a sync's profile, hooking in if that has not been done; see `Place`."""
        try:
            from rdt_e2e.profiling.nodes import this_node_id

            place, profile = Place(base, run, level), getattr(self, "_sync_profile", None)
            if profile is None or profile.place != place:
                # What an earlier driver left behind goes first.
                stop_quietly(profile)
                profile = ConsumerProfile(
                    self.weight_transfer_engine, place, this_node_id(), nixl_transport()
                )
                self._sync_profile = profile
            profile.begin(iteration)
        except Exception:
            logger.exception("profile: this rank is not measured")

    def sync_profile_end(self) -> None:
        """Write this rank's figures to its node's disk."""
        try:
            profile = getattr(self, "_sync_profile", None)
            if profile is not None:
                profile.end()
        except Exception:
            logger.exception("profile: this rank's figures are lost")

    def sync_profile_stop(self) -> None:
        """Take every hook out of this rank."""
        stop_quietly(getattr(self, "_sync_profile", None))
        self._sync_profile = None

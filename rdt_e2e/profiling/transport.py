"""Hooks on the NIXL agent of this process and on Ray's transport around it.

Source: `ray/experimental/rdt/nixl_tensor_transport.py` (Ray 2.60.0). `ray.get` on a tensor object goes
through `fetch_multiple_tensors` and `wait_fetch_complete`; `recv_multiple_tensors`, which earlier
profilers watched, is still there and is not on that path.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rdt_e2e.profiling.hooks import Call, HookSet


@dataclass(frozen=True)
class Receive:
    """One receive of a tensor object; times are on the machine's monotonic clock.

    Attributes:
        started: When Ray began it.
        ended: When its tensors were there.
        transfer: Start of the NIXL transfer and when it was first seen done, if both were seen.
    """

    started: float
    ended: float
    transfer: tuple[float, float] | None


def nixl_transport() -> Any:
    """Ray's NIXL transport of this process, or None if this Ray keeps it elsewhere."""
    try:
        from ray.experimental.rdt.util import get_tensor_transport_manager

        return get_tensor_transport_manager("NIXL")
    except (ImportError, AttributeError, ValueError):
        return None


def nixl_agent(transport: Any) -> Any:
    """The NIXL agent behind Ray's transport, if it has been built; builds none."""
    return getattr(transport, "_nixl_agent", None)


def watch_agent(hooks: HookSet, agent: Any, *, describes: bool = True) -> None:
    """Count what any process does with its agent: registrations, descriptors, peers.

    Args:
        hooks: Where the hooks and columns belong.
        agent: The agent.
        describes: Whether every sync makes it describe memory; a producer of streams does so at init.
    """

    def timed(column: str, calls: str | None = None) -> Callable[[Call], None]:
        def observe(call: Call) -> None:
            hooks.add(column, call.seconds)
            if calls is not None:
                hooks.add(calls, 1)

        return observe

    def counted(column: str) -> Callable[[Call], None]:
        return lambda _call: hooks.add(column, 1)

    hooks.wrap(
        agent,
        "register_memory",
        timed("register_s", "register_calls"),
        columns=("register_s", "register_calls"),
    )
    hooks.wrap(
        agent, "deregister_memory", counted("deregister_calls"), columns=("deregister_calls",)
    )
    for method in ("get_serialized_descs", "deserialize_descs", "get_agent_metadata"):
        hooks.wrap(agent, method, timed("descs_s"), columns=("descs_s",))
    hooks.wrap(agent, "get_xfer_descs", timed("descs_s"), columns=("descs_s",), expected=describes)
    hooks.wrap(
        agent,
        "add_remote_agent",
        timed("add_agent_s", "add_agent_calls"),
        columns=("add_agent_s", "add_agent_calls"),
    )
    hooks.wrap(
        agent, "remove_remote_agent", counted("remove_agent_calls"), columns=("remove_agent_calls",)
    )


def watch_extract(hooks: HookSet, transport: Any, *, expected: bool = True) -> None:
    """Time Ray's step between the return of a served pull and its metadata being sent.

    Args:
        hooks: Where the hooks and columns belong.
        transport: Ray's NIXL transport.
        expected: Whether pulls come through Ray.
    """

    def observe(call: Call) -> None:
        hooks.add("extract_s", call.seconds)
        hooks.add("device_sync_s", call.own_s)

    hooks.wrap(
        transport,
        "extract_tensor_transport_metadata",
        observe,
        stage="extract",
        columns=("extract_s", "device_sync_s"),
        expected=expected,
    )


class ReceiveWatch:
    """Times transfers and receives in a consumer's process.

    A transfer is known by its handle and a receive by its request, so that neither needs to stay on
    one thread.

    Args:
        hooks: Where the hooks and columns belong.
        transport: Ray's NIXL transport.
        agent: Its agent.
        on_receive: Called with each finished receive.
        direct: The agent as `sync.transport: nixl` uses it; None where pulls come through Ray.
    """

    def __init__(
        self,
        hooks: HookSet,
        transport: Any,
        agent: Any,
        on_receive: Callable[[Receive], None],
        direct: Any = None,
    ) -> None:
        self._hooks = hooks
        self._on_receive = on_receive
        self._lock = threading.Lock()
        self._open: dict[int, float] = {}
        self._done: dict[int, tuple[float, float]] = {}
        self._requests: dict[int, float] = {}
        self._busy_since = 0.0
        hooks.wrap(
            agent,
            "initialize_xfer",
            self._initialized,
            columns=("initialize_s", "descriptors"),
            expected=True,
        )
        hooks.wrap(
            agent,
            "transfer",
            self._started,
            columns=("transfer_s", "rdma_s", "transfer_calls"),
            expected=True,
        )
        hooks.wrap(
            agent,
            "check_xfer_state",
            self._checked,
            columns=("check_calls", "transfer_s", "rdma_s"),
            expected=True,
        )
        waits = ("receive_s", "produce_wait_s", "meta_wait_s")
        if direct is not None:
            hooks.wrap(direct, "read", self._read, stage="receive", columns=waits, expected=True)
            return
        hooks.wrap(
            transport,
            "fetch_multiple_tensors",
            self._fetched,
            stage="fetch",
            columns=waits,
            expected=True,
        )
        hooks.wrap(
            transport,
            "wait_fetch_complete",
            self._received,
            stage="wait_fetch",
            columns=waits,
            expected=True,
        )
        hooks.wrap(
            transport,
            "actor_has_tensor_transport",
            lambda call: hooks.add("control_s", call.seconds),
            stage="control",
            columns=("control_s",),
            expected=True,
        )

    def reset(self) -> None:
        """Forget what an earlier sync left open."""
        with self._lock:
            for table in (self._open, self._done, self._requests):
                table.clear()

    def _initialized(self, call: Call) -> None:
        self._hooks.add("initialize_s", call.seconds)
        self._hooks.add("descriptors", call.args[1].descCount())

    def _started(self, call: Call) -> None:
        self._hooks.add("transfer_calls", 1)
        handle = id(call.args[0])
        with self._lock:
            if not self._open:
                self._busy_since = call.started
            self._open[handle] = call.started
        if call.result != "PROC":
            self._finish(handle, call.ended)

    def _checked(self, call: Call) -> None:
        self._hooks.add("check_calls", 1)
        if call.result != "PROC":
            self._finish(id(call.args[0]), call.ended)

    def _finish(self, handle: int, ended: float) -> None:
        with self._lock:
            started = self._open.pop(handle, None)
            if started is None:
                return
            self._done[handle] = (started, ended)
            busy_s = 0.0 if self._open else ended - self._busy_since
        self._hooks.add("transfer_s", ended - started)
        self._hooks.add("rdma_s", busy_s)

    def _read(self, call: Call) -> None:
        if not call.failed:
            self._hooks.add("receive_s", call.seconds)
            span = (call.started, call.ended)
            self._on_receive(Receive(*span, transfer=span))

    def _fetched(self, call: Call) -> None:
        if not call.failed:
            with self._lock:
                self._requests[id(call.result)] = call.started

    def _received(self, call: Call) -> None:
        if call.failed:  # Such as a short wait that is repeated.
            return
        request = call.args[0]
        with self._lock:
            started = self._requests.pop(id(request), None)
            transfer = self._done.pop(id(getattr(request, "xfer_handle", None)), None)
        if started is not None:
            self._hooks.add("receive_s", call.ended - started)
            self._on_receive(Receive(started, call.ended, transfer))

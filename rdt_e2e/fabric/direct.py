"""One-sided reads and messages between NIXL agents, without Ray on the way of the bytes.

Two agents that know each other's metadata need nothing else: one sends a message when bytes are ready,
the other reads them, and a message that goes with the read says when it has ended.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rdt_e2e.errors import BackendUnavailableError, PullTimeoutError, SyncError
from rdt_e2e.fabric.agent import nixl_agent

POLL_S = {"cpu": 0.001, "cuda": 0.00005}
"""Shortest sleep between two looks at the agent, by device. NIXL has no wait that blocks, and on CPU the
cores are scarce."""
POLL_SHARE = 0.05
"""A sleep grows with what has been waited, up to `MAX_POLLS` times the shortest: each look takes the
interpreter from the threads that load what has landed."""
MAX_POLLS = 20
CHECK_S = 0.25
"""Time between two looks at what may have gone wrong while a message or a read is waited for."""

Check = Callable[[], None]
"""Raises if there is no point in waiting on."""


@dataclass(frozen=True)
class RemoteSlots:
    """Registered memory of another process, as its agent describes it.

    Attributes:
        metadata: The agent's own description, opaque.
        addresses: Where each slot begins.
        slot_bytes: Length of each slot in bytes.
        device: ``cpu`` or ``cuda``.
        device_index: Which GPU of that process; 0 for memory of the host.
    """

    metadata: bytes
    addresses: Sequence[int]
    slot_bytes: int
    device: str
    device_index: int


class DirectAgent:
    """This process's agent, as Ray built it, used without Ray; safe from several threads.

    Args:
        device: Where the memory is that is read from and into.
        agent: Another agent than this process's, for tests.
    """

    def __init__(self, device: torch.device, agent: Any = None) -> None:
        self._agent = nixl_agent() if agent is None else agent
        self._poll_s = POLL_S[device.type]
        self._messages: dict[str, set[bytes]] = defaultdict(set)
        self._lock = threading.Lock()

    def describe(self, slots: Sequence[torch.Tensor]) -> RemoteSlots:
        """What another agent needs to read these slots, which are registered and of one size."""
        first = slots[0]
        return RemoteSlots(
            self._agent.get_agent_metadata(),
            [slot.data_ptr() for slot in slots],
            first.numel(),
            first.device.type,
            max(first.get_device(), 0),
        )

    @property
    def metadata(self) -> bytes:
        """This agent's description."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def meet(self, metadata: bytes) -> str:
        """Make another agent known here, and forget what it has said so far.

        Returns:
            Its name.

        Raises:
            BackendUnavailableError: Its description is not of an agent that can be reached.
        """
        try:
            found: str | bytes = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise BackendUnavailableError(f"NIXL does not accept another agent: {error}") from error
        name = found.decode() if isinstance(found, bytes) else found
        self.forget(name)
        return name

    def forget(self, peer: str) -> None:
        """Drop every message of a peer that nobody has waited for."""
        with self._lock:
            self._fetch()
            self._messages[peer].clear()

    def send(self, peer: str, message: bytes) -> None:
        """Send a message to a peer.

        Raises:
            SyncError: NIXL refused it, as it does for a peer that is gone.
        """
        with _failing_as(f"no message could be sent to agent {peer}"):
            self._agent.send_notif(peer, message)

    def await_message(
        self, peer: str, message: bytes, limit_s: float, what: str, check: Check
    ) -> None:
        """Wait until a peer has sent exactly this message, and take it.

        Args:
            peer: Name of the peer.
            message: The message.
            limit_s: Longest wait in seconds.
            what: What it means, for the error.
            check: Called now and then.

        Raises:
            PullTimeoutError: Time is up.
        """

        def arrived() -> bool:
            with self._lock:
                self._fetch()
                if message not in self._messages[peer]:
                    return False
                self._messages[peer].remove(message)
                return True

        self._poll(arrived, limit_s, what, check)

    def read(
        self,
        target: torch.Tensor,
        peer: str,
        slots: RemoteSlots,
        slot: int,
        message: bytes,
        *,
        limit_s: float,
        what: str,
        check: Check,
    ) -> None:
        """Read the first bytes of a peer's slot, and tell the peer when they are here.

        Args:
            target: Contiguous, in registered memory; as many bytes as it has are read.
            peer: Name of the peer.
            slots: Its slots.
            slot: Which of them.
            message: What the peer is sent after the last byte.
            limit_s: Longest wait in seconds.
            what: What is read, for errors.
            check: Called now and then.

        Raises:
            PullTimeoutError: Time is up. The transfer is given up as far as NIXL allows it.
            SyncError: The transfer failed.
        """
        if target.nbytes > slots.slot_bytes:
            raise SyncError(f"{what}: {target.nbytes} bytes are more than a slot of {peer} has")
        here = (target.data_ptr(), target.nbytes, max(target.get_device(), 0))
        there = (slots.addresses[slot], target.nbytes, slots.device_index)
        agent = self._agent
        with _failing_as(f"{what}: the read from agent {peer} failed"):
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs([here], mem_type=target.device.type),
                agent.get_xfer_descs([there], mem_type=slots.device),
                peer,
                message,
            )
        state = ""

        def ended() -> bool:
            nonlocal state
            with _failing_as(f"{what}: the read from agent {peer} failed"):
                state = agent.check_xfer_state(handle) if state else agent.transfer(handle, message)
            return bool(state != "PROC")

        try:
            self._poll(ended, limit_s, what, check)
        finally:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise SyncError(f"{what}: the read from agent {peer} failed (state {state})")

    def _fetch(self) -> None:
        for peer, messages in self._agent.get_new_notifs().items():
            self._messages[peer].update(messages)

    def _poll(self, done: Callable[[], bool], limit_s: float, what: str, check: Check) -> None:
        started = checked = time.monotonic()
        longest = MAX_POLLS * self._poll_s
        while not done():
            now = time.monotonic()
            if now - started >= limit_s:
                raise PullTimeoutError(f"{what}: waited {limit_s:g} s")
            if now - checked >= CHECK_S:
                checked = now
                check()
            time.sleep(min(max(self._poll_s, POLL_SHARE * (now - started)), longest))


@contextlib.contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Whatever NIXL raises, as an error of ours."""
    try:
        yield
    except Exception as error:
        raise SyncError(f"{what}: {type(error).__name__}: {error}") from error

"""One end of a NIXL read between two processes, for measuring a fabric by itself, without RDT."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rdt_e2e.environment import trace_ucx
from rdt_e2e.errors import BackendUnavailableError, PullTimeoutError
from rdt_e2e.fabric.agent_config import build_agent
from rdt_e2e.fabric.probe import read_ucx_log, ucx_lanes

POLL_S = 0.0001
"""Pause between two looks at a running read, in seconds."""


@dataclass(frozen=True)
class Offer:
    """What a peer needs to read this end's buffer; it crosses processes.

    Attributes:
        metadata: NIXL's description of the agent.
        descriptors: NIXL's description of the buffer.
        num_bytes: Size of the buffer.
        checksum: Of its content; see `checksum`.
    """

    metadata: bytes
    descriptors: bytes
    num_bytes: int
    checksum: int


@dataclass(frozen=True)
class ReadResult:
    """One measured read.

    Attributes:
        num_bytes: Bytes read.
        seconds: Time of the fastest of its repetitions.
        is_same: Whether the content that arrived has the peer's checksum.
        lanes: Transports and devices that UCX's log names for this peer.
    """

    num_bytes: int
    seconds: float
    is_same: bool
    lanes: tuple[str, ...]

    @property
    def gb_per_s(self) -> float:
        """Bandwidth in GB (10^9 bytes) per second."""
        return self.num_bytes / self.seconds / 1e9


class Peer:
    """A NIXL agent with one registered buffer, to be read from and to read into.

    Args:
        device: Where the buffer lies.
        num_bytes: Its size.
        backend: NIXL backend.
        folder: An existing folder for UCX's log.

    Raises:
        BackendUnavailableError: There is no agent, or the buffer cannot be registered.
    """

    def __init__(self, device: torch.device, num_bytes: int, backend: str, folder: Path) -> None:
        self._log = folder / "ucx.log"
        trace_ucx(self._log)
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        try:
            self._agent = build_agent(backend)
            self._registration = self._agent.register_memory(self._buffer)
        except Exception as error:
            raise BackendUnavailableError(
                f"NIXL cannot register {num_bytes} bytes on {device} over {backend}: {error}; run "
                "`rdt-e2e doctor` on this node"
            ) from error

    def offer(self, seed: int) -> Offer:
        """Fill the buffer with noise and describe it.

        Args:
            seed: Of the noise; another one for each read, so that an old result cannot pass.
        """
        generator = torch.Generator(device=self._buffer.device).manual_seed(seed)
        self._buffer.random_(0, 256, generator=generator)
        if self._buffer.device.type == "cuda":
            torch.cuda.synchronize(self._buffer.device)
        agent = self._agent
        descriptors = agent.get_serialized_descs(agent.get_xfer_descs(self._buffer))
        return Offer(
            agent.get_agent_metadata(), descriptors, self._buffer.numel(), checksum(self._buffer)
        )

    def read(self, offer: Offer, *, repeats: int, timeout_s: float) -> ReadResult:
        """Read a peer's buffer into this one.

        Args:
            offer: Of the peer; its buffer is as large as this one.
            repeats: Number of reads, of which the fastest counts.
            timeout_s: Longest wait for one read, in seconds.

        Raises:
            PullTimeoutError: A read did not end in time.
            BackendUnavailableError: NIXL reports an error.
        """
        agent = self._agent
        name = agent.add_remote_agent(offer.metadata)
        remote = agent.deserialize_descs(offer.descriptors)
        self._buffer.zero_()
        if self._buffer.device.type == "cuda":
            torch.cuda.synchronize(self._buffer.device)
        handle = agent.initialize_xfer("READ", agent.get_xfer_descs(self._buffer), remote, name)
        try:
            seconds = min(self._timed(handle, timeout_s) for _ in range(repeats))
        finally:
            agent.release_xfer_handle(handle)
            agent.remove_remote_agent(name)
        lanes = tuple(ucx_lanes(read_ucx_log(self._log), to_peer=True))
        is_same = checksum(self._buffer) == offer.checksum
        return ReadResult(offer.num_bytes, seconds, is_same, lanes)

    def _timed(self, handle: Any, timeout_s: float) -> float:
        started = time.perf_counter()
        state = self._agent.transfer(handle)
        while state == "PROC":
            if time.perf_counter() - started > timeout_s:
                raise PullTimeoutError(f"a NIXL read did not end within {timeout_s:g} s")
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise BackendUnavailableError(f"a NIXL read ended as {state}")
        return time.perf_counter() - started


def checksum(buffer: torch.Tensor) -> int:
    """Sum of bytes weighted by position, which a swap of two blocks changes too.

    Args:
        buffer: uint8 [n] on any device, n a multiple of 8.
    """
    words = buffer.view(torch.int64)
    # Wraps around in 64 bits, which loses nothing that a comparison needs.
    positions = torch.arange(words.numel(), dtype=torch.int64, device=buffer.device) * 2 + 1
    return int((words * positions).sum().item())

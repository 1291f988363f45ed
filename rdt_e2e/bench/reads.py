"""Reads between two processes by themselves, with NIXL's progress thread as released and as we set it."""

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch

from rdt_e2e.errors import BackendUnavailableError, WeightMismatchError
from rdt_e2e.fabric.agent_config import SLEEP_US, build_agent, configure_agents
from rdt_e2e.fabric.checksum import checksum
from rdt_e2e.fabric.direct import DirectAgent, RemoteSlots

DELAYS_US = {"polls, as released": 0, "sleeps, as here": SLEEP_US}
"""What NIXL's progress thread does, and its delay."""
START_TIMEOUT_S = 120.0
"""Longest time for both processes to start, in seconds."""
READ_TIMEOUT_S = 60.0
_COLUMNS = "{:<20}{:>11}{:>12}{:>10}{:>10}{:>9}"


@dataclass(frozen=True)
class ReadOptions:
    """What to measure.

    Attributes:
        num_bytes: Bytes of one read.
        repeats: Reads, one after another.
        device: ``cpu``, or ``cuda``: from device 0 into device 1, or within the only one.
    """

    num_bytes: int
    repeats: int
    device: str


@dataclass(frozen=True)
class ReadTimes:
    """Reads of one pair of processes.

    Attributes:
        progress_thread: What NIXL's progress thread does meanwhile.
        num_bytes: Bytes of one read.
        seconds: Time of each read, in order; the first one was preceded by nothing.
    """

    progress_thread: str
    num_bytes: int
    seconds: list[float]


def measure_reads(options: ReadOptions) -> list[ReadTimes]:
    """Read the same bytes again and again, in a new pair of processes for each delay.

    Raises:
        BackendUnavailableError: A process gave no result; its own output says why.
        WeightMismatchError: Other bytes arrived than were there.
    """
    found = []
    for name, delay_us in DELAYS_US.items():
        same, seconds = _measure(options, delay_us)
        if not same:
            raise WeightMismatchError(
                f"bench reads: {options.num_bytes} bytes read over NIXL are not those that were there"
            )
        found.append(ReadTimes(name, options.num_bytes, seconds))
    return found


def reads_table(rows: Sequence[ReadTimes]) -> list[str]:
    """The table, one line per delay; milliseconds of a read, and the rate of all of them."""
    lines = [_COLUMNS.format("progress thread", "first ms", "others ms", "min", "max", "GB/s")]
    for row in rows:
        milliseconds = [1e3 * one for one in row.seconds]
        others = milliseconds[1:]
        rate = row.num_bytes * len(row.seconds) / sum(row.seconds) / 1e9
        figures = (milliseconds[0], statistics.median(others), min(others), max(others))
        shown = [f"{one:.2f}" for one in figures]
        lines.append(_COLUMNS.format(row.progress_thread, *shown, f"{rate:.1f}"))
    return lines


def _measure(options: ReadOptions, delay_us: int) -> tuple[bool, list[float]]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    answer, results = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_hold, args=(options, delay_us, here), daemon=True),
        context.Process(target=_read, args=(options, delay_us, there, results), daemon=True),
    ]
    for process in processes:
        process.start()
    limit_s = START_TIMEOUT_S + options.repeats * READ_TIMEOUT_S
    try:
        if answer in wait([answer, *(one.sentinel for one in processes)], limit_s):
            found: tuple[bool, list[float]] = answer.recv()
            return found
        raise BackendUnavailableError(
            f"bench reads: no result within {limit_s:.0f} s, or a process ended before; run "
            "`rdt-e2e doctor` on this node"
        )
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _buffer(options: ReadOptions, delay_us: int, side: int) -> tuple[DirectAgent, torch.Tensor]:
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", min(side, torch.cuda.device_count() - 1))
        torch.cuda.set_device(device)
    configure_agents(delay_us)
    agent = build_agent("UCX")
    buffer = torch.zeros(options.num_bytes, dtype=torch.uint8, device=device)
    agent.register_memory(buffer)
    return DirectAgent(device, agent), buffer


def _hold(options: ReadOptions, delay_us: int, pipe: Connection) -> None:
    agent, buffer = _buffer(options, delay_us, 0)
    buffer.random_(0, 256)
    pipe.send((agent.describe([buffer]), int(checksum(buffer))))
    pipe.recv()  # Nothing comes: the other side reads, and then both are ended.


def _read(options: ReadOptions, delay_us: int, pipe: Connection, results: Connection) -> None:
    agent, buffer = _buffer(options, delay_us, 1)
    slots: RemoteSlots
    slots, total = pipe.recv()
    peer = agent.meet(slots.metadata)
    seconds = []
    for number in range(options.repeats):
        started = time.perf_counter()
        agent.read(
            buffer,
            peer,
            slots,
            0,
            b"done %d" % number,
            limit_s=READ_TIMEOUT_S,
            what=f"read {number}",
            check=lambda: None,
        )
        seconds.append(time.perf_counter() - started)
    results.send((int(checksum(buffer)) == total, seconds))

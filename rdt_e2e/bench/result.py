"""What a row of the benchmark is asked to do and what it measured; both cross a process as JSON."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rdt_e2e.config import Config, load_config
from rdt_e2e.errors import EnvironmentCheckError

if TYPE_CHECKING:
    from rdt_e2e.sync.record import SyncTiming

TRANSPORT = "transport"
"""Clock A: bytes on the way and nothing else; for a sync, its pulls without loading what they bring."""
UPDATE = "update"
"""Clock B: the update call on the inference side."""
END_TO_END = "end to end"
"""Clock C: pause to resume."""
COLD = "cold"
"""Clock D: the first sync, pause to resume; init and bake are apart from it."""
CLOCKS = (TRANSPORT, UPDATE, END_TO_END, COLD)


@dataclass(frozen=True)
class Task:
    """One row to be measured, as handed to its process.

    Attributes:
        row: Name of the row.
        profile: Profile name or file.
        overrides: Dotted configuration keys over it.
        versions: Folders of two synthetic checkpoints that differ in every tensor.
        repeats: Warm repetitions.
        output: Where the process writes its `RowResult`.
        link: For the row `wire`: namespaces and devices of the link, and the rates to set.
    """

    row: str
    profile: str
    overrides: Mapping[str, Any]
    versions: tuple[str, str]
    repeats: int
    output: str
    link: Mapping[str, Any] | None = None

    @property
    def roots(self) -> tuple[Path, Path]:
        """The two checkpoint folders."""
        return Path(self.versions[0]), Path(self.versions[1])

    def config(self) -> Config:
        """The configuration of the row."""
        return load_config(self.profile, self.overrides)

    def to_json(self) -> str:
        """The task as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The task that `to_json` wrote."""
        content = json.loads(text)
        return cls(**(content | {"versions": tuple(content["versions"])}))


@dataclass
class RowResult:
    """What one row measured.

    Attributes:
        row: Name of the row.
        num_bytes: Bytes moved in one repetition, over all consumers.
        seconds: Samples by clock (`CLOCKS`), in seconds; one per warm repetition, one in all for cold.
        parts: Samples by name of other things measured, in seconds.
        checks: Outcome of each fingerprint check: empty text when every tensor was right.
        reason: Why there are no figures, or nothing.
        facts: Anything else worth keeping, as JSON values.
    """

    row: str
    num_bytes: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    reason: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def wrong_weights(self) -> list[str]:
        """When a check found weights that were not those sent."""
        return [when for when, problem in self.checks.items() if problem]

    def add(self, clock: str, seconds: float) -> None:
        """Append a sample of a clock."""
        self.seconds.setdefault(clock, []).append(seconds)

    def add_part(self, part: str, seconds: float) -> None:
        """Append a sample of a part."""
        self.parts.setdefault(part, []).append(seconds)

    def add_warm_sync(self, timing: "SyncTiming") -> None:
        """Append a warm sync of ours: its clocks, its steps, and the slowest producer's shares."""
        self.add(END_TO_END, timing.end_to_end_s)
        self.add(UPDATE, timing.update_s)
        for step, seconds in timing.seconds.items():
            if step != "update":
                self.add_part(step, seconds)
        for key in ("pack_s", "gather_s", "wait_s"):
            slowest = max(float(counters[key]) for counters in timing.producers)
            self.add_part(f"{key.removesuffix('_s')} of a producer, summed over pulls", slowest)
        self.facts["num_pulls"] = sum(int(counters["num_pulls"]) for counters in timing.producers)

    def to_json(self) -> str:
        """The result as JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The result that `to_json` wrote."""
        return cls(**json.loads(text))

    def merge(self, other: "RowResult") -> None:
        """Take over the samples of another round of the same row."""
        for mine, theirs in ((self.seconds, other.seconds), (self.parts, other.parts)):
            for name, samples in theirs.items():
                mine.setdefault(name, []).extend(samples)
        self.checks |= {f"{when}, round 2 or later": what for when, what in other.checks.items()}
        self.num_bytes = max(self.num_bytes, other.num_bytes)
        # A row that failed once and then ran is a row with figures, and with a blemish.
        if other.reason is not None:
            self.facts.setdefault("failed_rounds", []).append(other.reason)
        elif self.reason is not None:
            self.facts.setdefault("failed_rounds", []).append(self.reason)
            self.reason, self.facts = None, self.facts | other.facts


def write_report(report: Path | None, content: Any) -> None:
    """Write what was measured as JSON, if anyone asked for it.

    Raises:
        EnvironmentCheckError: It cannot be written there.
    """
    if report is None:
        return
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise EnvironmentCheckError(
            f"{report} cannot be written: {error.strerror}; give another --json"
        ) from error


@dataclass(frozen=True)
class Spread:
    """Median and extremes of some samples, in seconds."""

    median: float
    least: float
    most: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Of at least one sample."""
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))

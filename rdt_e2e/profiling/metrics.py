"""What a run tells Prometheus: the driver's figures, through Ray's metrics endpoint of its node.

Ray reports a live driver's values every few seconds. Counters stay on the endpoint after the driver
has ended, gauges for some twenty seconds.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ray.util import metrics

from rdt_e2e.errors import RdtE2EError, VerificationError
from rdt_e2e.profiling.attribution import VERDICT_TEXTS, VerdictKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Series:
    """One metric.

    Attributes:
        name: As it is given to Ray.
        kind: Counters only grow; a gauge is the last value.
        description: What it counts, with its unit.
        label: What its values are told apart by, beside `config`.
    """

    name: str
    kind: Literal["counter", "gauge"]
    description: str
    label: str | None = None

    @property
    def exported(self) -> str:
        """Its name at the endpoint."""
        return f"ray_{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def labels(self) -> tuple[str, ...]:
        """Every label."""
        return ("config",) if self.label is None else ("config", self.label)


SYNCS = Series("rdt_e2e_syncs", "counter", "Syncs completed")
FAILURES = Series(
    "rdt_e2e_failures", "counter", "Syncs and verifications that failed, by error", "error"
)
BYTES = Series("rdt_e2e_sync_bytes", "counter", "Bytes pulled by all inference ranks")
SECONDS = Series("rdt_e2e_sync_seconds", "counter", "Seconds of completed syncs, by stage", "stage")
LAST_SECONDS = Series("rdt_e2e_last_sync_seconds", "gauge", "The same of the last sync", "stage")
LAST_BYTES = Series("rdt_e2e_last_sync_bytes", "gauge", "Bytes pulled in the last sync")
VERDICT = Series(
    "rdt_e2e_verdict", "gauge", "1 for what the last verification came to, else 0", "verdict"
)
BALANCE = Series(
    "rdt_e2e_balance", "gauge", "1 for the last profile's verdict on the ranks, else 0", "verdict"
)
ALL_SERIES = (SYNCS, FAILURES, BYTES, SECONDS, LAST_SECONDS, LAST_BYTES, VERDICT, BALANCE)
VERDICTS = ("PASS", "FAIL")


class Timing(Protocol):
    """What a sync returns, as far as it matters here: `SyncTiming`."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Duration of each step."""

    @property
    def num_bytes(self) -> int:
        """Bytes pulled."""


class RunMetrics:
    """The metrics of one driver; nothing that fails here fails a sync.

    Args:
        config_name: Name of the configuration, the label `config` of everything.
    """

    def __init__(self, config_name: str) -> None:
        self._config_name = config_name
        self._made: dict[Series, Any] = {}
        self._off = False

    @contextlib.contextmanager
    def sync(self) -> Iterator[None]:
        """Count a failure of the block."""
        try:
            yield
        except RdtE2EError as error:
            self._put(FAILURES, 1, type(error).__name__)
            raise

    def synced(self, timing: Timing) -> None:
        """Count a completed sync."""
        self._put(SYNCS, 1)
        self._put(BYTES, timing.num_bytes)
        self._put(LAST_BYTES, timing.num_bytes)
        for stage, seconds in timing.seconds.items():
            self._put(SECONDS, seconds, stage)
            self._put(LAST_SECONDS, seconds, stage)

    @contextlib.contextmanager
    def verification(self) -> Iterator[None]:
        """Say how the checks of the block went."""
        try:
            yield
        except VerificationError as error:
            self._put(FAILURES, 1, type(error).__name__)
            self._choose(VERDICT, VERDICTS, "FAIL")
            raise
        self._choose(VERDICT, VERDICTS, "PASS")

    def balance(self, kind: VerdictKind) -> None:
        """Say what the last sync's profile found."""
        self._choose(BALANCE, tuple(VERDICT_TEXTS), kind)

    def _choose(self, series: Series, values: tuple[str, ...], chosen: str) -> None:
        for value in values:
            self._put(series, 1 if value == chosen else 0, value)

    def _put(self, series: Series, value: float, label: str | None = None) -> None:
        if self._off:
            return
        labels = dict(zip(series.labels, (self._config_name, str(label)), strict=False))
        try:
            metric = self._metric(series)
            if series.kind == "gauge":
                metric.set(value, labels)
            elif value > 0:
                metric.inc(value, labels)
        except Exception as error:  # noqa: BLE001 - measuring must not fail what is measured
            self._off = True
            logger.warning("metrics: nothing is exported from now on: %s", error)

    def _metric(self, series: Series) -> Any:
        if series not in self._made:
            made = metrics.Gauge if series.kind == "gauge" else metrics.Counter
            self._made[series] = made(series.name, series.description, series.labels)
        return self._made[series]

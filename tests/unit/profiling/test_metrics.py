"""Metrics: what a run exports, that a failing export fails nothing, and that the dashboard asks for it."""

import json
import re
import types
from pathlib import Path

import pytest
import yaml
from ray.util import metrics as ray_metrics

from rdt_e2e.errors import EngineError, TextMismatchError
from rdt_e2e.profiling.metrics import ALL_SERIES, RunMetrics
from rdt_e2e.sync.record import SyncTiming

MONITORING = Path(__file__).parents[3] / "k8s" / "monitoring"
TIMING = SyncTiming(1, {"pause": 0.5, "update": 2.0, "resume": 0.0}, [{"num_bytes": 7}])


@pytest.fixture
def exported(monkeypatch):
    """Values by (name, labels), as Ray would hold them."""
    values = {}

    class Metric:
        def __init__(self, name, _description, labels):
            self.name, self.labels = name, labels

        def put(self, value, labels):
            assert tuple(labels) == self.labels
            values[self.name, *labels.values()] = value

    class Counter(Metric):
        def inc(self, value, labels):
            assert value > 0, "Ray refuses others"
            self.put(values.get((self.name, *labels.values()), 0) + value, labels)

    class Gauge(Metric):
        def set(self, value, labels):
            self.put(value, labels)

    monkeypatch.setattr(ray_metrics, "Counter", Counter)
    monkeypatch.setattr(ray_metrics, "Gauge", Gauge)
    return values


def test_completed_syncs_add_up_and_the_last_one_stands_alone(exported):
    metrics = RunMetrics("local")
    for _ in range(2):
        with metrics.sync():
            metrics.synced(TIMING)
    assert exported == {
        ("rdt_e2e_syncs", "local"): 2,
        ("rdt_e2e_sync_bytes", "local"): 14,
        ("rdt_e2e_last_sync_bytes", "local"): 7,
        ("rdt_e2e_sync_seconds", "local", "pause"): 1.0,
        ("rdt_e2e_sync_seconds", "local", "update"): 4.0,
        ("rdt_e2e_last_sync_seconds", "local", "pause"): 0.5,
        ("rdt_e2e_last_sync_seconds", "local", "update"): 2.0,
        ("rdt_e2e_last_sync_seconds", "local", "resume"): 0.0,
    }


def test_failures_are_counted_by_error_and_go_on(exported):
    metrics = RunMetrics("local")
    for _ in range(2):
        with pytest.raises(EngineError), metrics.sync():
            raise EngineError("it is gone")
    with pytest.raises(KeyboardInterrupt), metrics.sync():
        raise KeyboardInterrupt
    assert exported == {("rdt_e2e_failures", "local", "EngineError"): 2}


def test_the_last_verification_is_one_of_its_verdicts(exported):
    metrics = RunMetrics("local")
    with metrics.verification():
        pass
    assert exported["rdt_e2e_verdict", "local", "PASS"] == 1
    assert exported["rdt_e2e_verdict", "local", "FAIL"] == 0
    with pytest.raises(TextMismatchError), metrics.verification():
        raise TextMismatchError("noise")
    assert exported["rdt_e2e_verdict", "local", "PASS"] == 0
    assert exported["rdt_e2e_verdict", "local", "FAIL"] == 1
    assert exported["rdt_e2e_failures", "local", "TextMismatchError"] == 1


def test_a_failure_to_verify_is_no_verdict(exported):
    with pytest.raises(EngineError), RunMetrics("local").verification():
        raise EngineError("it is gone")
    assert exported == {}


def test_the_profiles_verdict_on_the_ranks(exported):
    RunMetrics("local").balance("byte imbalance")
    chosen = {labels[2]: value for labels, value in exported.items()}
    assert chosen == {"balanced": 0, "byte imbalance": 1, "transport straggler": 0, "n/a": 0}


def test_an_export_that_fails_costs_one_warning(monkeypatch, caplog):
    def broken(*_args):
        raise RuntimeError("no such agent")

    monkeypatch.setattr(ray_metrics, "Counter", broken)
    metrics = RunMetrics("local")
    metrics.synced(TIMING)
    metrics.synced(TIMING)
    assert [record.message for record in caplog.records] == [
        "metrics: nothing is exported from now on: no such agent"
    ]


def expressions():
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    variables = [one for one in dashboard["templating"]["list"] if one["type"] == "query"]
    return [one["query"]["query"] for one in variables] + [
        target["expr"] for panel in dashboard["panels"] for target in panel["targets"]
    ]


def test_the_dashboard_asks_for_what_is_exported_and_for_all_of_it():
    series = {one.exported: one for one in ALL_SERIES}
    asked = set()
    for expression in expressions():
        names = set(re.findall(r"\bray_\w+", expression))
        assert names <= set(series), expression
        asked |= names
        labels = set(re.findall(r"by \(([^)]*)\)", expression)) | {
            label for selector in re.findall(r"{([^}]*)}", expression)
            for label in re.findall(r"(\w+)=", selector)
        }  # fmt: skip
        known = {label for name in names for label in series[name].labels}
        assert {one.strip() for found in labels for one in found.split(",")} <= known, expression
    assert asked == set(series)


def test_panels_do_not_overlap_and_have_titles_of_their_own():
    panels = json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == 8
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = types.SimpleNamespace(**panel["gridPos"])
        cells = {
            (x, y) for x in range(grid.x, grid.x + grid.w) for y in range(grid.y, grid.y + grid.h)
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells


def test_the_monitor_reaches_the_ray_pods_and_nothing_else():
    monitor, policy = yaml.safe_load_all((MONITORING / "pod-monitor.yaml").read_text())
    cluster = yaml.safe_load((MONITORING.parent / "70-raycluster.yaml").read_text())["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for wanted in (monitor["spec"]["selector"], policy["spec"]["podSelector"]):
        for group in groups:
            labels = group["template"]["metadata"]["labels"]
            assert wanted["matchLabels"].items() <= labels.items()
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    # `kubectl apply -f k8s/` reads no folder below it.
    assert MONITORING.parent.joinpath("monitoring").is_dir()
    assert not list(MONITORING.parent.glob("*monitor*.yaml"))

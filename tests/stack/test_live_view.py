"""What can be seen of a sync from outside: its progress while it runs, and Ray's metrics endpoint."""

import io
import re
import time
import urllib.request
from typing import Any

import pytest

from rdt_e2e.console import Console
from rdt_e2e.errors import EngineError, TextMismatchError
from rdt_e2e.profiling.metrics import ALL_SERIES
from tests.live import Stack, await_held, hold_pulls, release_pulls

EXPORT_TIMEOUT_S = 90
"""Ray exports every ten seconds; the rest is for a machine that does other things."""
SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)


def progress(live: Stack) -> list[Any]:
    """Every trainer rank's answer."""
    found: list[Any] = live.trainers.call("sync_progress", timeout_s=60)
    return found


def test_a_sync_says_how_far_it_is_and_is_not_held_up_by_being_asked(stack: Stack) -> None:
    import asyncio

    assert progress(stack) == [None, None]
    stack.on_trainers(hold_pulls(after=1))

    async def sync() -> tuple[list[Any], Any]:
        syncing = asyncio.ensure_future(stack.session.sync())
        try:
            held = await asyncio.to_thread(stack.on_trainers, await_held())
            assert all(held)
            seen = await asyncio.to_thread(progress, stack)
        finally:
            await asyncio.to_thread(stack.on_trainers, release_pulls())
        return seen, await syncing

    seen, timing = stack.wait(sync())
    for rank in seen:
        assert 0 <= rank.num_done < rank.num_groups
        assert rank.elapsed_s > 0
    assert 0 < sum(rank.num_bytes for rank in seen) < timing.num_bytes
    assert progress(stack) == [None, None]


def scraped() -> dict[str, list[tuple[dict[str, str], float]]]:
    """Our metrics at the endpoints of every node: (labels, value) by name."""
    import ray

    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for node in ray.nodes():
        address = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        for name, labels, value in SAMPLE.findall(text):
            if name.startswith("ray_rdt_e2e_"):
                pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
                found.setdefault(name, []).append((pairs, float(value)))
    return found


def scraped_when_complete() -> dict[str, list[tuple[dict[str, str], float]]]:
    """The same once every metric is there."""
    wanted = {one.exported for one in ALL_SERIES}
    deadline = time.monotonic() + EXPORT_TIMEOUT_S
    while True:
        found = scraped()
        if found.keys() >= wanted:
            return found
        missing = sorted(wanted - found.keys())
        assert time.monotonic() < deadline, f"not exported: {missing}"
        time.sleep(1)


def test_every_metric_of_the_dashboard_is_at_rays_endpoint(live: Stack) -> None:
    from rdt_e2e.sync.job import LiveRun, sync_live

    config = live.config.model_copy(update={"name": "scraped"})
    record: Any = None
    root = live.checkpoints["v1"]
    run = LiveRun(config, Console(io.StringIO()), record, root, live.trainers, None)
    run.session = live.session
    timing = live.wait(sync_live(run))
    with run.metrics.verification():
        live.expect("v1")
    with pytest.raises(TextMismatchError), run.metrics.verification():
        raise TextMismatchError("other text")
    with pytest.raises(EngineError), run.metrics.sync():
        raise EngineError("an engine is gone")
    run.metrics.balance("balanced")

    found = scraped_when_complete()
    values = {
        (series.exported, labels.get(series.label or "")): value
        for series in ALL_SERIES
        for labels, value in found[series.exported]
        if labels["config"] == "scraped"
    }
    assert values["ray_rdt_e2e_syncs_total", None] == 1
    assert values["ray_rdt_e2e_sync_bytes_total", None] == timing.num_bytes
    assert values["ray_rdt_e2e_last_sync_bytes", None] == timing.num_bytes
    for stage, seconds in timing.seconds.items():
        for name in ("ray_rdt_e2e_sync_seconds_total", "ray_rdt_e2e_last_sync_seconds"):
            assert values[name, stage] == pytest.approx(seconds)
    assert values["ray_rdt_e2e_verdict", "FAIL"] == 1
    assert values["ray_rdt_e2e_verdict", "PASS"] == 0
    assert values["ray_rdt_e2e_balance", "balanced"] == 1
    for error in ("TextMismatchError", "EngineError"):
        assert values["ray_rdt_e2e_failures_total", error] == 1

"""A profile of syncs on the real Ray, NIXL and vLLM: complete, additive, and gone afterwards."""

import io
import json
import types
from pathlib import Path
from typing import Any

import pytest

from rdt_e2e.config import load_config
from rdt_e2e.console import Console
from tests.browser import Page, browser, check_report, needs_browser
from tests.live import Stack

NUM_SYNCS = 2


def profiled_syncs(live: Stack, folder: Path, level: str, num_syncs: int) -> list[Any]:
    """Sync under a profile that goes to `folder`, as `sync_job` does; returns the timings."""
    from rdt_e2e.profiling.recorder import profiled

    run = types.SimpleNamespace(
        config=load_config(
            "local", {"profiling.level": level, "profiling.node_dir": str(folder / "nodes")}
        ),
        record=types.SimpleNamespace(folder=folder, bake_s=1.0),
        session=live.session,
        trainers=live.trainers,
        metrics=types.SimpleNamespace(balance=lambda _kind: None),
    )

    async def syncs() -> list[Any]:
        async with profiled(run) as profile:
            return [await profile.sync(live.session.sync) for _ in range(num_syncs)]

    return live.wait(syncs())


def hooked(live: Stack) -> list[set[str]]:
    """Methods that objects of each trainer rank hold as their own attributes, wrapped ones among them."""

    def look(worker: Any) -> set[str]:
        from ray.experimental.rdt.util import get_tensor_transport_manager

        transport = get_tensor_transport_manager("NIXL")
        watched = (worker, worker._cache, worker._rings, transport, transport._nixl_agent)
        return {name for one in watched for name, value in vars(one).items() if callable(value)}

    return live.on_trainers(look)


class Profiled:
    """What the module's profiled syncs left."""

    def __init__(self, live: Stack, folder: Path) -> None:
        self.folder = folder
        self.before = hooked(live)
        self.timings = profiled_syncs(live, folder, "full", NUM_SYNCS)
        self.after = hooked(live)
        self.profile = json.loads((folder / "profile.json").read_text())

    @property
    def syncs(self) -> list[dict[str, Any]]:
        """Entries of the profile."""
        found: list[dict[str, Any]] = self.profile["iterations"]
        return found


@pytest.fixture(scope="module")
def profiled_run(live: Stack, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """Two warm syncs at level full: the shared fleets have synced before."""
    return Profiled(live, tmp_path_factory.mktemp("profiled"))


def test_every_rank_of_both_nodes_is_there_and_nothing_went_wrong(
    live: Stack, profiled_run: Profiled
) -> None:
    assert len(profiled_run.syncs) == NUM_SYNCS
    for sync in profiled_run.syncs:
        assert sync["problems"] == []
        assert sorted(row["rank"] for row in sync["consumers"]) == [0, 1]
        assert sorted(row["rank"] for row in sync["producers"]) == [0, 1]
        cluster = live.config.cluster
        assert {row["node"] for row in sync["consumers"]} == {cluster.inference_ip}
        assert {row["node"] for row in sync["producers"]} == {cluster.trainer_ip}
        assert {node["error"] for node in sync["nodes"]} == {None}


def test_no_column_is_missing(profiled_run: Profiled) -> None:
    for sync in profiled_run.syncs:
        assert sync["not_measured"] == {}
        for row in (*sync["consumers"], *sync["producers"]):
            assert [name for name, value in row["columns"].items() if value is None] == []


def test_the_buckets_sum_to_the_wall(profiled_run: Profiled) -> None:
    for sync, timing in zip(profiled_run.syncs, profiled_run.timings, strict=True):
        path = sync["critical_path"]
        assert path["sums_up"]
        assert sum(one["seconds"] for one in path["buckets"]) == pytest.approx(path["wall_s"])
        assert sync["clocks"]["end_to_end_s"] == timing.wall_s >= timing.end_to_end_s
        assert sync["clocks"]["update_call_s"] == timing.update_s


def test_warm_syncs_register_nothing(profiled_run: Profiled) -> None:
    for sync in profiled_run.syncs:
        assert sync["registrations"] == {"consumers": 0, "producers": 0}
        for row in (*sync["consumers"], *sync["producers"]):
            assert row["columns"]["deregister_calls"] == 0


def test_both_ends_agree_on_pulls_and_bytes(profiled_run: Profiled) -> None:
    for sync, timing in zip(profiled_run.syncs, profiled_run.timings, strict=True):
        consumers, producers = (
            [row["columns"] for row in sync[side]] for side in ("consumers", "producers")
        )
        for column in ("pulls", "bytes"):
            assert sum(one[column] for one in consumers) == sum(one[column] for one in producers)
        assert sync["bytes"] == timing.num_bytes
        for one in consumers:
            assert one["transfer_calls"] == one["pulls"] > 0
            assert 0 < one["rdma_s"] <= one["transfer_s"] <= one["receive_s"] <= one["pull_s"]
            stages = ("checksum_s", "materialize_s", "scatter_s", "post_load_s", "kernel_copy_s")
            assert sum(one[stage] for stage in stages) == pytest.approx(one["process_s"])
            assert one["pull_s"] + one["process_s"] <= timing.update_s


def test_spans_of_every_process_lie_within_the_sync(profiled_run: Profiled) -> None:
    for sync in profiled_run.syncs:
        processes = {span["process"] for span in sync["timeline"]}
        assert {"driver", "consumer 0", "consumer 1", "producer 0", "producer 1"} == processes
        wall_s = sync["critical_path"]["wall_s"]
        for span in sync["timeline"]:
            assert 0 <= span["start_s"] <= span["end_s"] <= wall_s


def test_the_reports_can_be_made_of_it(profiled_run: Profiled) -> None:
    from rdt_e2e.profiling.command import render

    text = " ".join(render(profiled_run.folder).split())
    assert "WALL (sum of the above)" in text
    # There is no NIC here, and the live fleets had their first sync before the profile began.
    for absent in ("floor of the NICs n/a", "in use: n/a", "first sync n/a"):
        text = text.replace(absent, "")
    assert "n/a" not in text
    for name in ("profile.txt", "trace.json", "report.html"):
        assert (profiled_run.folder / name).stat().st_size > 0


@needs_browser
def test_the_page_shows_the_profiles_numbers(profiled_run: Profiled, tmp_path: Path) -> None:
    from rdt_e2e.profiling.command import render

    render(profiled_run.folder)
    with browser(tmp_path) as driver:
        page = Page(driver, profiled_run.folder / "report.html")
        assert page.console == []
        assert page.fits()
        check_report(page, profiled_run.profile)


def test_hooks_and_files_are_gone_afterwards(live: Stack, profiled_run: Profiled) -> None:
    assert profiled_run.after == profiled_run.before
    assert not list((profiled_run.folder / "nodes").rglob("*.jsonl"))
    live.sync()
    live.expect("v1")


def test_a_summary_holds_the_same_figures_without_single_calls(
    live: Stack, profiled_run: Profiled, tmp_path: Path
) -> None:
    profiled_syncs(live, tmp_path, "summary", 1)
    (sync,) = json.loads((tmp_path / "profile.json").read_text())["iterations"]
    assert sync["problems"] == []
    assert sync["not_measured"] == {}
    assert sync["bytes"] == profiled_run.syncs[0]["bytes"]
    tracks = {span["track"] for span in sync["timeline"]}
    assert not [track for track in tracks if track.startswith("calls")]
    assert {"pulls", "transfer", "process", "gather"} <= tracks


def test_its_cost_can_be_measured_and_no_hook_stays(live: Stack, tmp_path: Path) -> None:
    from rdt_e2e.bench.overhead import CLOCKS, MIN_PAIRS, overhead_job
    from rdt_e2e.sync.job import LiveRun

    out = io.StringIO()
    record: Any = types.SimpleNamespace(folder=tmp_path, syncs=[], facts={})
    config = load_config("local", {"profiling.node_dir": str(tmp_path / "nodes")})
    run = LiveRun(config, Console(out), record, live.checkpoints["v1"], live.trainers, None)
    run.session = live.session
    before = hooked(live)
    live.wait(overhead_job(run, MIN_PAIRS, "summary"))
    assert hooked(live) == before
    assert len(record.syncs) == 2 * MIN_PAIRS
    for clock in CLOCKS:
        assert f"{clock} " in out.getvalue()
    assert not list((tmp_path / "nodes").rglob("*.jsonl"))
    live.expect("v1")

"""A sync's profile from what the nodes answered: complete, and with parts missing."""

import json

import pytest

from rdt_e2e.profiling.build import SCHEMA, build_iteration, build_profile
from rdt_e2e.profiling.reading import ClockOffset
from tests.profile_cases import (
    INFERENCE_NODE,
    NODES,
    TRAINER_NODE,
    Case,
    consumer_record,
    reading,
    record,
)

PORTS = {"mlx5_0:1": 400.0, "mlx5_1:1": 400.0}


def test_a_complete_sync():
    built = build_iteration(Case().material())
    assert json.loads(json.dumps(built, allow_nan=False))["iteration"] == 2
    assert built["problems"] == []
    assert built["clocks"] == {"rdma_only_s": 1.0, "update_call_s": 1.5, "end_to_end_s": 2.0}
    assert built["bytes"] == 2e9
    assert built["gb_per_s"]["end_to_end"] == 1.0
    buckets = {one["name"]: one["seconds"] for one in built["critical_path"]["buckets"]}
    assert sum(buckets.values()) == pytest.approx(2.0)
    assert buckets["driver_misc"] == pytest.approx(0.1)
    assert built["critical_path"]["sums_up"]
    assert [row["rank"] for row in built["producers"]] == [0, 1]
    assert built["registrations"] == {"consumers": 0.0, "producers": 0.0}
    assert {row["node"] for row in built["consumers"]} == {"10.0.0.2"}


def test_a_node_that_cannot_be_read_is_named_and_the_rest_is_reported():
    case = Case()
    after = [reading(TRAINER_NODE, case.producers), reading(INFERENCE_NODE, error="it is gone")]
    built = build_iteration(case.material(after=after))
    assert any("10.0.0.2 could not be read: it is gone" in one for one in built["problems"])
    assert any("nothing came from consumer 0, 1" in one for one in built["problems"])
    assert len(built["producers"]) == 2
    assert built["consumers"] == []
    assert built["critical_path"]["sums_up"]
    assert built["attribution"]["verdict"]["kind"] == "n/a"
    assert {node["address"]: node["error"] for node in built["nodes"]}["10.0.0.2"] == "it is gone"


def test_a_silent_rank_is_named_and_the_others_count():
    case = Case(consumers=[consumer_record(1)])
    built = build_iteration(case.material())
    assert built["problems"] == ["nothing came from consumer 0"]
    assert built["attribution"]["slowest_rank"] == 1


def test_ranks_that_a_lost_engine_took_along_are_not_missed():
    case = Case(consumers=[consumer_record(2), consumer_record(3)])
    assert build_iteration(case.material(consumers=(2, 3)))["problems"] == []


def test_damaged_lines_late_records_and_dropped_records_are_told():
    late = record("row", "consumer", 0, INFERENCE_NODE, iteration=1)
    dropping = consumer_record(1) | {"num_dropped": 7}
    case = Case(consumers=[consumer_record(0), dropping, '{"v":1,"iterat', late])
    problems = build_iteration(case.material())["problems"]
    assert problems == [
        "node 10.0.0.2: 1 damaged lines left out",
        "consumer 1: 7 records could not be written (disk full?)",
    ]


def test_registrations_are_a_problem_once_warm():
    case = Case(consumers=[consumer_record(0, register_calls=3.0), consumer_record(1)])
    built = build_iteration(case.material())
    assert built["problems"] == [
        "node 10.0.0.2, pid 100: 3 NIXL registrations in a warm sync; 0 is expected"
    ]
    assert built["registrations"]["consumers"] == 3
    assert build_iteration(case.material(cold=True))["problems"] == []


def test_columns_that_are_not_available_keep_their_reason():
    missing = record("missing", "consumer", 0, INFERENCE_NODE, column="control_s", reason="moved")
    case = Case(consumers=[consumer_record(0, control_s=None), consumer_record(1), missing])
    built = build_iteration(case.material())
    assert built["not_measured"] == {"consumer control_s": "moved"}


def test_serving_is_attributed_to_the_consumer_it_was_for():
    serves = [
        record("serve", "producer", 0, TRAINER_NODE, consumer=who, seq=seq, span=(1.0, 1.25))
        for seq, who in enumerate((0, 0, 1))
    ]
    case = Case(consumers=[consumer_record(0, pull_s=5.0), consumer_record(1)])
    case.producers += serves
    built = build_iteration(case.material())
    shares = {one["label"]: one["seconds"] for one in built["attribution"]["consumer"]}
    assert built["attribution"]["slowest_rank"] == 0
    assert (shares["serving"], shares["Ray dispatch and metadata"]) == (0.5, 0.0)


def test_times_of_different_clocks_are_laid_on_one_axis():
    """The inference node's clock is 1000 s ahead of the driver's, which read 100 at the start."""
    pull = record(
        "pull", "consumer", 0, INFERENCE_NODE, seq=4, producer=1, bytes=10,
        issue=(1100.5, 1100.75), get=(1100.75, 1101.5), receive=None, transfer=(1101.0, 1101.25),
    )  # fmt: skip
    serve = record("serve", "producer", 1, TRAINER_NODE, consumer=0, seq=4, span=(100.5, 101.0))
    case = Case(producers=[serve], consumers=[pull])
    offsets = {TRAINER_NODE: ClockOffset(0.0, 0.0), INFERENCE_NODE: ClockOffset(1000.0, 0.001)}
    built = build_iteration(case.material(offsets=offsets))
    spans = {(one["process"], one["track"]): one for one in built["timeline"]}
    assert spans["consumer 0", "transfer"]["start_s"] == 1.0
    assert spans["producer 1", "serve consumer 0"]["end_s"] == 1.0
    assert spans["consumer 0", "transfer"]["node"] == NODES[INFERENCE_NODE]
    steps = [one for one in built["timeline"] if one["process"] == "driver"]
    assert [one["name"] for one in steps] == ["pause", "start", "update", "finish"]
    clocks = {node["address"]: node["clock"] for node in built["nodes"]}
    assert clocks["10.0.0.2"] == {"seconds": 1000.0, "error_s": 0.001}
    without = build_iteration(case.material(offsets={TRAINER_NODE: ClockOffset(0.0, 0.0)}))
    assert {one["process"] for one in without["timeline"]} == {"driver", "producer 1"}


def nic_material(moved, *, boots=("boot-t", "boot-i"), nics=(None, None)):
    keys = [f"{port}:port_rcv_data" for port in PORTS]
    before = dict.fromkeys(keys, 1000)
    after = {key: 1000 + num for key, num in zip(keys, moved, strict=True)}
    case = Case()
    case.consumers = [one | {"nic": nic} for one, nic in zip(case.consumers, nics, strict=True)]
    both = tuple(zip((TRAINER_NODE, INFERENCE_NODE), boots, strict=True))
    records = {TRAINER_NODE: case.producers, INFERENCE_NODE: case.consumers}
    return case.material(
        before=[reading(node, boot_id=boot, nics=before, rates=PORTS) for node, boot in both],
        after=[
            reading(node, records[node], boot_id=boot, nics=after, rates=PORTS)
            for node, boot in both
        ],
    )


def test_nic_shares_and_the_busiest_against_the_least_busy():
    built = build_iteration(nic_material((3000, 1000), nics=("mlx5_0:1", "mlx5_1:1")))
    trainer, inference = built["nics"]["machines"]
    assert trainer["addresses"] == ["10.0.0.1"]
    assert [port["share"] for port in inference["ports"]] == [0.75, 0.25]
    assert inference["busiest_to_least"] == 3.0
    # 10^9 bytes at 400 Gb/s.
    assert built["floor_s"] == pytest.approx(0.02)


def test_a_nic_that_nobody_was_given_does_not_count_as_idle():
    built = build_iteration(nic_material((3000, 0), nics=("mlx5_0:1", "mlx5_0:1")))
    inference = built["nics"]["machines"][1]
    assert [port["in_use"] for port in inference["ports"]] == [True, False]
    assert inference["busiest_to_least"] is None


def test_two_nodes_on_one_machine_count_its_nics_once():
    built = build_iteration(nic_material((3000, 1000), boots=("same", "same")))
    (machine,) = built["nics"]["machines"]
    assert machine["addresses"] == ["10.0.0.1", "10.0.0.2"]
    assert sum(port["received_bytes"] for port in machine["ports"]) == 4000
    assert built["floor_s"] is None, "no rank says which NIC is its own"


def test_a_profile_keeps_cold_and_warm_apart():
    cold = build_iteration(Case(iteration=1, consumers=[], producers=[], wall_s=9.0).material())
    warm = [
        build_iteration(Case(wall_s=wall_s, iteration=iteration).material())
        for iteration, wall_s in ((2, 3.0), (3, 5.0), (4, 4.0))
    ]
    profile = build_profile("run", "summary", 1.25, [cold, *warm])
    assert profile["schema"] == SCHEMA
    assert profile["summary"]["cold"]["bake_s"] == 1.25
    assert profile["summary"]["cold"]["end_to_end_s"] == 9.0
    assert profile["summary"]["warm"]["end_to_end_s"] == 4.0
    assert profile["summary"]["warm"]["num_syncs"] == 3

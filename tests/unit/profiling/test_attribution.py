"""The arithmetic: known rows in, known conclusions out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_e2e.profiling.attribution import Row, attribute, judge, slow_to_fast, spread
from rdt_e2e.profiling.critical_path import MISC, critical_path

spent = st.dictionaries(st.text(min_size=1), st.floats(0, 1e4), max_size=8)


def row(rank, rdma_s=1.0, num_bytes=1e9, **columns):
    figures = {"rdma_s": rdma_s, "transfer_s": rdma_s, "bytes": num_bytes, **columns}
    return Row(rank, "node", "host", rank, None, figures)


@given(spent, st.floats(0, 100))
def test_the_buckets_sum_to_the_wall(seconds, between):
    path = critical_path(seconds, math.fsum(seconds.values()) + between)
    assert path.sums_up
    assert path.buckets[-1].name == MISC
    assert path.seconds_of(MISC) == pytest.approx(between, abs=1e-6)


def test_steps_longer_than_the_wall_do_not_sum_up():
    path = critical_path({"update": 2.0}, 1.0)
    assert path.seconds_of(MISC) == -1.0
    assert not path.sums_up


def test_empty_buckets_are_hidden_except_two():
    path = critical_path({"pause": 0.0, "update": 0.0, "finish": 1.0}, 1.0)
    assert [bucket.name for bucket in path.shown] == ["update", "finish", MISC]


@pytest.mark.parametrize(
    ("transfers", "sizes", "kind"),
    [
        ((1.0, 1.02, 1.0), (1e9, 1e9, 1e9), "balanced"),
        ((1.0, 1.02, 1.0), (1e9, 2e9, 1e9), "balanced"),
        ((1.0, 2.0, 1.0), (1e9, 2e9, 1e9), "byte imbalance"),
        ((1.0, 2.0, 1.0), (1e9, 1e9, 1e9), "transport straggler"),
        ((1.0, 2.0, 1.0), (1e9, 1.1e9, 1e9), "transport straggler"),
        ((1.0, None, 1.0), (1e9, 1e9, 1e9), "n/a"),
        ((), (), "n/a"),
    ],
)
def test_verdicts(transfers, sizes, kind):
    rows = [row(rank, *figures) for rank, figures in enumerate(zip(transfers, sizes, strict=True))]
    assert judge(rows, 2.0).kind == kind


def test_a_gap_that_the_update_call_does_not_feel_is_balanced():
    rows = [row(0, 0.001), row(1, 0.002)]
    assert judge(rows, 1.0).kind == "balanced"
    assert judge(rows, 0.004).kind == "transport straggler"


def test_spread():
    assert spread([1.0, 3.0]) == 1.0
    assert spread([2.0, 2.0]) == 0.0
    assert spread([0.0, 0.0]) is None
    assert spread([]) is None
    assert spread([1.0, None]) is None


def test_the_slowest_rank_explains_the_update_call():
    rows = [
        row(0, pull_s=1.0, process_s=0.25),
        row(1, pull_s=1.5, process_s=0.5, produce_wait_s=0.75, receive_s=0.5, rdma_s=0.375,
            transfer_s=0.375),
    ]  # fmt: skip
    found = attribute(2.5, rows, [row(0, wait_s=0.25), row(1, wait_s=0.5)], {1: 0.5})
    assert (found.slowest_rank, found.slowest_s, found.fan_out_s) == (1, 2.0, 0.5)
    consumer = {share.label: share.seconds for share in found.consumer}
    assert consumer["wait for the producer"] == 0.75
    assert consumer["serving"] == 0.5
    assert consumer["Ray dispatch and metadata"] == 0.25
    assert consumer["descriptors and peers"] == 0.125
    assert consumer["scatter"] is None, "not in the row: n/a, not 0"
    producer = {share.label: share.seconds for share in found.producer}
    assert producer["wait for the gather"] == 0.5, "the largest over ranks"
    assert producer["pack"] is None


def test_a_negative_fan_out_is_told_and_not_hidden():
    """On CUDA processing overlaps the pulls, so that their sum may exceed the update call."""
    found = attribute(1.0, [row(0, pull_s=0.75, process_s=0.5)], [], {})
    assert found.fan_out_s == -0.25
    assert found.producer == ()


def test_without_rows_nothing_is_claimed():
    found = attribute(1.0, [], [], {})
    assert (found.slowest_rank, found.fan_out_s, found.verdict.kind) == (None, None, "n/a")
    unmeasured = attribute(1.0, [row(0, pull_s=None, process_s=1.0)], [], {})
    assert unmeasured.slowest_rank is None


def test_rows_not_measured_come_last():
    rows = [row(0), row(1, pull_s=1.0, process_s=1.0), row(2, pull_s=2.0, process_s=1.0)]
    assert [one.rank for one in slow_to_fast(rows)] == [2, 1, 0]


def test_rates_are_over_the_time_in_which_something_was_under_way():
    assert row(0, 0.5, 1e9).gb_per_s == 2.0
    assert row(0, 0.0, 1e9).gb_per_s is None
    assert row(0, None, 1e9).gb_per_s is None

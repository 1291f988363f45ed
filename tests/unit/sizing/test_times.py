"""Seconds: the floors of the design, and expectations that never go below them."""

import itertools
from dataclasses import replace

import pytest

from rdt_e2e.sizing.deployment import Deployment
from rdt_e2e.sizing.memory import gathered_bytes
from rdt_e2e.sizing.times import served_bytes, slowest_flow, sync_times

EIGHT = Deployment(8, 8)


def times(planner, deployment, gbps=400):
    consumers = planner.consumers(deployment)
    gathered = gathered_bytes(planner.layout, deployment)
    return sync_times(consumers, deployment, gbps, gathered, 0)


@pytest.mark.parametrize(("gbps", "floor_s"), [(400, 2.82), (800, 1.41), (200, 5.64)])
def test_floor_of_kimi_k2(planner, gbps, floor_s):
    result = times(planner("kimi-k2"), EIGHT, gbps)
    assert {round(clock.floor_s, 2) for clock in result.clocks} == {floor_s}
    for clock in result.clocks:
        low, high = clock.expected_s
        assert clock.floor_s <= low <= high


def test_clocks_contain_one_another(planner):
    clocks = times(planner("glm-4.5-air"), EIGHT).clocks[:3]
    for inner, outer in itertools.pairwise(clocks):
        assert inner.expected_s[0] <= outer.expected_s[0]
        assert inner.expected_s[1] <= outer.expected_s[1]


def test_measured_sync_over_nvlink_is_within_the_range(planner):
    """26 pulls of 57.18 GB took 0.44 to 0.61 s on two H200s, whose copies run at 395.6 GB/s."""
    kimi = planner("kimi-k2")
    (plan, *_) = kimi.consumers(replace(EIGHT, gather="full"))
    share = replace(plan, chunks=plan.chunks[2:27])
    assert abs(share.num_bytes / 1e9 - 57.18) < 1
    result = sync_times([share], Deployment(1, 1), 395.6 * 8, [], 0)
    low, high = result.clocks[1].expected_s
    assert low < 0.44
    assert high > 0.5


def test_every_byte_received_was_sent(planner):
    for deployment in (EIGHT, Deployment(3, 2, 2), Deployment(4, 8, gather="full")):
        consumers = planner("mini-kimi").consumers(deployment)
        served = served_bytes(consumers, deployment.num_trainers)
        assert sum(served) == sum(plan.num_bytes for plan in consumers)


def test_a_trainer_that_serves_many_is_the_busiest(planner):
    result = times(planner("mini-kimi"), Deployment(1, 4))
    total = sum(plan.num_bytes for plan in planner("mini-kimi").consumers(Deployment(1, 4)))
    assert result.busiest == "trainer rank 0"
    assert result.busiest_bytes == total


def test_gathering_everything_bounds_the_update_over_a_fast_wire(planner):
    slow = times(planner("kimi-k2"), replace(EIGHT, gather="full"), 8000)
    assert slow.gather_s > slow.clocks[0].floor_s
    assert slow.clocks[1].expected_s[0] >= slow.gather_s
    assert times(planner("kimi-k2"), EIGHT).gather_s < 0.05


def test_slowest_flow_is_the_size_most_bytes_travel_in(planner):
    assert round(slowest_flow(planner("kimi-k2").consumers(EIGHT)) / 1e9, 2) == 2.11
    # Without owners a layer is one pull: its experts and the rest.
    full = planner("kimi-k2").consumers(replace(EIGHT, gather="full"))
    assert round(slowest_flow(full) / 1e9, 2) == 2.27
    assert [len(plan.chunks) for plan in full] == [63] * 8

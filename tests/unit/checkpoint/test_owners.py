"""Owners of names: every expert has exactly one, and vLLM's own router agrees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_e2e.checkpoint.layout import build_layout, shard_rows
from rdt_e2e.checkpoint.owners import assign_owners, gathered_groups
from tests.synthetic import Architecture, index_in_memory


def layout_with(num_experts):
    return build_layout(index_in_memory(Architecture(num_experts=num_experts)))


@given(num_experts=st.integers(1, 12), num_ranks=st.integers(1, 10))
def test_each_expert_is_owned_by_the_one_rank_that_holds_its_row(num_experts, num_ranks):
    layout = layout_with(num_experts)
    owners = assign_owners(layout, num_ranks, "owner")
    assert list(owners.class_of) == list(layout.names)
    for name, owner_class in owners.class_of.items():
        ranks = owners.owner_sets[owner_class]
        _, row = layout.locate[name]
        if row is None or num_ranks == 1:
            assert ranks == tuple(range(num_ranks))
            continue
        holding = [
            rank
            for rank in range(num_ranks)
            if row in range(*shard_rows(num_experts, num_ranks, rank))
        ]
        assert list(ranks) == holding
        assert len(ranks) == 1


def test_full_gather_makes_every_rank_an_owner():
    owners = assign_owners(layout_with(4), 3, "full")
    assert owners.owner_sets == ((0, 1, 2),)
    assert set(owners.class_of.values()) == {0}


@pytest.mark.parametrize("gather", ["owner", "full"])
@pytest.mark.parametrize(
    ("num_ranks", "num_consumers"), [(1, 1), (2, 1), (1, 2), (3, 2), (2, 4), (4, 2), (8, 8)]
)
def test_vllms_router_sends_every_pull_to_a_rank_that_serves_the_name(
    num_ranks, num_consumers, gather
):
    from vllm.distributed.weight_transfer.sharded_rdt_common import RdtRouter

    layout = layout_with(6)
    owners = assign_owners(layout, num_ranks, gather)
    router = RdtRouter(
        num_ranks,
        num_consumers,
        [list(ranks) for ranks in owners.owner_sets],
        [owners.class_of[name] for name in layout.names],
        list(layout.names),
        [len(group.names) for group in layout.groups],
    )
    router.validate()
    gathered = {name for group in gathered_groups(layout, gather) for name in group.names}
    for consumer in range(num_consumers):
        for name in layout.names:
            producer = router.producer_for(consumer, name)
            _, row = layout.locate[name]
            if name not in gathered:
                assert row in range(*shard_rows(6, num_ranks, producer))
    # The free barrier: a group is freed by the same ranks that gather it.
    for group in layout.groups:
        assert router.group_owners(group.index) == list(range(num_ranks))


def test_gathered_groups_keep_their_index_and_lose_the_experts_only():
    layout = layout_with(4)
    reduced = gathered_groups(layout, "owner")
    assert [group.index for group in reduced] == [group.index for group in layout.groups]
    lost = set(layout.names) - {name for group in reduced for name in group.names}
    assert lost
    assert all(".mlp.experts." in name for name in lost)
    assert gathered_groups(layout, "full") == layout.groups

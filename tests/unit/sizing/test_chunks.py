"""Pulls: the same chunks, from the same trainer ranks, of the same bytes, as vLLM's own planner."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rdt_e2e.checkpoint.described import describe
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.checkpoint.owners import assign_owners
from rdt_e2e.inference.plugin.chunk_split import split_scatters
from rdt_e2e.sizing.chunks import Planner, packed_end
from rdt_e2e.sizing.deployment import Deployment
from rdt_e2e.sizing.routing import Router, block
from rdt_e2e.trainer.packing import lay_out
from tests.synthetic import Architecture, index_in_memory

DEPLOYMENTS = [
    Deployment(1, 1),
    Deployment(2, 2),
    Deployment(3, 2),
    Deployment(2, 4),
    Deployment(4, 2, 2),
    Deployment(8, 1, 4),
    Deployment(5, 3, gather="full"),
    Deployment(3, 2, 2, expert_parallel=False),
    Deployment(4, 2, num_replicas=2),
    Deployment(2, 1, 2, num_replicas=3),
]


def planner_for(**sizes):
    index = index_in_memory(Architecture(**sizes))
    return Planner(build_layout(index), index.config)


def vllm_router(layout, deployment):
    from vllm.distributed.weight_transfer.sharded_rdt_common import RdtRouter

    owners = assign_owners(layout, deployment.num_trainers, deployment.gather)
    router = RdtRouter(
        deployment.num_trainers,
        deployment.num_consumers,
        [list(ranks) for ranks in owners.owner_sets],
        [owners.class_of[name] for name in layout.names],
        list(layout.names),
        [len(group.names) for group in layout.groups],
        deployment.ranks_per_replica,
    )
    router.validate()
    return router


def vllm_plan(layout, deployment, plan, split=None):
    """Hand one consumer's slices to the planner of the released engine, as its bake would.

    `split` cuts the copies of one chunk further.
    """
    import torch
    from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine
    from vllm.distributed.weight_transfer.sharded_rdt_fake import _Scatter

    class Engine(ShardedRDTWeightTransferEngine):  # type: ignore[misc]  # it carries no types
        def _chunk_module_scatters(self, modules):
            whole = super()._chunk_module_scatters(modules)
            if split is None:
                return whole
            return [(owner, run) for owner, scatters in whole for run in split(scatters)]

    engine = object.__new__(Engine)
    engine._router = vllm_router(layout, deployment)
    engine._router.consumer_id = plan.consumer
    modules: dict[str, list[Any]] = {}
    for group in plan.slices:
        for part in group:
            stride = torch.empty(part.shape, device="meta").stride()
            scatter = _Scatter(
                layer=part.module,
                param_name="weight",
                src=(part.name, ()),
                offset=0,
                shape=part.shape,
                stride=tuple(stride),
                dtype=getattr(torch, part.dtype),
            )
            modules.setdefault(part.module, []).append(scatter)
    engine._name_to_plan = {
        scatter.src[0]: copies for copies in modules.values() for scatter in copies
    }
    engine._live_names = set(engine._name_to_plan)
    group_lens = [len(group.names) for group in layout.groups]
    return engine._build_call_plan(list(layout.names), group_lens)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment.fleets)
def test_chunks_are_those_of_vllms_planner(deployment):
    planner = planner_for(num_experts=6, vocab=150)
    for plan in planner.consumers(deployment):
        theirs = vllm_plan(planner.layout, deployment, plan)
        assert [(c.producer, c.seq, c.num_slices, c.num_bytes) for c in plan.chunks] == [
            (chunk.owner, chunk.seq, len(chunk.keys), chunk.pack_bytes) for chunk in theirs.chunks
        ]
        names = [part.name for group in plan.slices for part in group]
        assert sorted(names) == sorted(key[0] for chunk in theirs.chunks for key in chunk.keys)
        largest: dict[int, int] = {}
        for chunk in theirs.chunks:
            largest[chunk.owner] = max(largest.get(chunk.owner, 0), chunk.pack_bytes)
        for producer in range(deployment.num_trainers):
            assert plan.largest_from(producer) == largest.get(producer, 0)


def test_chunks_of_a_grouped_attention_model_are_those_of_vllms_planner():
    config = {
        "model_type": "glm4_moe",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "n_routed_experts": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "intermediate_size": 56,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "attention_bias": True,
        "use_qk_norm": True,
        "vocab_size": 77,
    }
    index = describe(config, Path("small"))
    planner = Planner(build_layout(index), config)
    for deployment in (Deployment(2, 2), Deployment(2, 1, 4), Deployment(3, 1, 2)):
        for plan in planner.consumers(deployment):
            theirs = vllm_plan(planner.layout, deployment, plan)
            assert [(c.producer, c.seq, c.num_bytes) for c in plan.chunks] == [
                (chunk.owner, chunk.seq, chunk.pack_bytes) for chunk in theirs.chunks
            ]


@given(
    trainers=st.integers(1, 9),
    consumers=st.integers(1, 9),
    replicas=st.integers(1, 3),
    experts=st.integers(1, 10),
    gather=st.sampled_from(["owner", "full"]),
)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_routing_is_vllms_router(trainers, consumers, replicas, experts, gather):
    deployment = Deployment(trainers, consumers, gather=gather, num_replicas=replicas)
    planner = planner_for(num_experts=experts, num_layers=2)
    theirs = vllm_router(planner.layout, deployment)
    owners = assign_owners(planner.layout, trainers, gather)
    ours = Router(owners, consumers)
    for consumer in range(deployment.num_consumers):
        for group in planner.layout.groups:
            for name in group.names:
                rank = ours.producer(consumer, owners.class_of[name], group.index)
                assert rank == theirs.producer_for(consumer, name)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 20))
def test_blocks_cover_all_owners(owners, consumers):
    from vllm.distributed.weight_transfer.sharded_rdt_common import assign_producer_indices

    blocks = [block(owners, consumers, consumer) for consumer in range(consumers)]
    assert [list(b) for b in blocks] == [
        assign_producer_indices(owners, consumers, consumer) for consumer in range(consumers)
    ]
    if owners >= consumers:
        assert [rank for b in blocks for rank in b] == list(range(owners))


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1))
def test_packed_end_is_the_producers_layout(sizes):
    import torch

    end = 0
    for size in sizes:
        end = packed_end(end, size)
    pieces = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    assert end == lay_out(pieces)[1]


@pytest.mark.parametrize("limit", [300, 10_000, 100_000])
def test_limit_holds_and_loses_nothing(limit):
    planner = planner_for(num_experts=6)
    whole = planner.consumers(Deployment(2, 2))[1]
    cut = planner.consumers(Deployment(2, 2, max_chunk_bytes=limit))[1]
    assert len(cut.chunks) > len(whole.chunks)
    assert cut.slices == whole.slices
    rows = [p.num_bytes // p.shape[0] for group in cut.slices for p in group if p.shape]
    assert all(chunk.num_bytes <= max(limit, max(rows)) for chunk in cut.chunks)
    slices = sum(part.num_bytes for group in cut.slices for part in group)
    pieces = sum(chunk.num_slices for chunk in cut.chunks)
    assert slices <= cut.num_bytes < slices + 16 * pieces
    for producer in (0, 1):
        assert [c.seq for c in cut.chunks if c.producer == producer] == list(
            range(sum(c.producer == producer for c in cut.chunks))
        )


@pytest.mark.parametrize("limit", [300, 5_000, 100_000])
@pytest.mark.parametrize("deployment", DEPLOYMENTS[1:6], ids=lambda deployment: deployment.fleets)
def test_limited_pulls_are_those_of_our_consumer(deployment, limit):
    """Cut vLLM's own chunks as the consumer does, and let vLLM's planner lay them out."""
    planner = planner_for(num_experts=5)
    limited = replace(deployment, max_chunk_bytes=limit)
    for plan in planner.consumers(limited):
        theirs = vllm_plan(planner.layout, limited, plan, lambda run: split_scatters(run, limit))
        assert [(c.producer, c.seq, c.num_slices, c.num_bytes) for c in plan.chunks] == [
            (chunk.owner, chunk.seq, len(chunk.keys), chunk.pack_bytes) for chunk in theirs.chunks
        ]


def test_a_wide_limit_changes_nothing():
    planner = planner_for()
    deployment = Deployment(2, 2)
    wide = replace(deployment, max_chunk_bytes=10**9)
    assert planner.consumers(wide) == planner.consumers(deployment)


def test_plans_are_shared_where_only_the_rings_differ():
    planner = planner_for()
    first = planner.consumers(Deployment(2, 2))
    assert planner.consumers(Deployment(2, 2, num_buffers=3, lookahead=5)) is first


def test_every_expert_reaches_exactly_one_rank_and_the_rest_all():
    planner = planner_for(num_experts=7)
    plans = planner.consumers(Deployment(3, 3))
    for name in planner.layout.names:
        takers = sum(
            any(part.name == name for group in plan.slices for part in group) for plan in plans
        )
        assert takers == (1 if ".experts." in name else 3)

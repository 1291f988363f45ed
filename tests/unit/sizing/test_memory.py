"""Predicted memory against the objects that take it: shards, gathers, rings."""

import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from rdt_e2e.checkpoint.described import describe
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.checkpoint.owners import gathered_groups
from rdt_e2e.config import load_config
from rdt_e2e.sizing.catalog import CATALOG
from rdt_e2e.sizing.chunks import Planner
from rdt_e2e.sizing.deployment import Deployment
from rdt_e2e.sizing.memory import (
    gathered_bytes,
    inference_items,
    kv_bytes_per_token,
    predict,
    predict_memory,
    resident_group_bytes,
    shard_bytes,
    slot_bytes,
)
from rdt_e2e.trainer import serve_ring
from rdt_e2e.trainer.gather_cache import GatherCache
from rdt_e2e.trainer.shards import ShardedCheckpoint
from tests.synthetic import Architecture, index_in_memory

MIB = 2**20


def layout_for(**sizes):
    return build_layout(index_in_memory(Architecture(**sizes)))


@pytest.mark.parametrize("gather", ["owner", "full"])
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 1), (3, 0), (3, 2), (7, 6)])
def test_shards_and_gathered_groups_are_what_torch_allocates(ranks, rank, gather):
    """Neither experts nor rows divide by 3 or 7: shards are uneven and gathers are padded."""
    layout = layout_for(num_experts=5, num_layers=2)
    deployment = Deployment(ranks, 1, gather=gather)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        shards = ShardedCheckpoint(layout, mesh, torch.device("cpu"))
        assert shard_bytes(layout, ranks, rank) == shards.num_bytes
        held = {shards.local(key).untyped_storage().data_ptr() for key in layout.held}
        for group, expected in zip(
            gathered_groups(layout, gather), gathered_bytes(layout, deployment), strict=True
        ):
            tensors = shards.gather_group(group)
            storages = {
                t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values()
            }
            new = [storages[place] for place in storages.keys() - held]
            assert sum(storage.nbytes() for storage in new) == expected
    finally:
        dist.destroy_process_group()


class TrackedShards:
    """Hands out gathered groups of the predicted sizes, and notes how many bytes live at a time."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.live = self.peak = 0

    def gather_group(self, group):
        tensor = torch.empty(self.sizes[group.index], dtype=torch.uint8)
        self.live += tensor.numel()
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self.drop, tensor.numel())
        return dict.fromkeys(group.names, tensor)

    def drop(self, num_bytes):
        self.live -= num_bytes


@pytest.mark.parametrize("gather", ["owner", "full"])
@pytest.mark.parametrize("lookahead", [0, 1, 2, 9])
def test_resident_groups_peak_where_the_gather_cache_lets_them(lookahead, gather):
    layout = layout_for(num_layers=4)
    deployment = Deployment(2, 1, gather=gather, lookahead=lookahead)
    groups = gathered_groups(layout, gather)
    shards = TrackedShards(gathered_bytes(layout, deployment))
    cache = GatherCache(groups, lookahead, 60, 0)
    cache.begin([0])

    def consume():
        for group in groups:
            # As late as possible: only once the gather loop can go no further.
            resident = min(group.index + lookahead + 1, len(groups))
            with cache._changed:
                while len(cache._published) < resident:
                    assert cache._changed.wait(60)
            cache.signal_free(group.index)

    consumer = threading.Thread(target=consume)
    consumer.start()
    # The loop of `ProducerMixin.run_gathers`.
    for group in groups:
        cache.wait_for_room(group)
        tensors = shards.gather_group(group)
        cache.publish(group, tensors)
        del tensors
    cache.wait_all_freed()
    consumer.join()
    assert shards.peak == resident_group_bytes(layout, deployment)


@pytest.mark.parametrize("chunk", [1, 256 * MIB, 256 * MIB + 1, 2_348_824_576])
@pytest.mark.parametrize("presize", [0, 5, 3 * 2**30])
def test_slots_are_those_of_producer_and_consumer(chunk, presize):
    from vllm.distributed.weight_transfer.sharded_rdt_common import buffer_alloc_bytes

    assert slot_bytes(chunk, presize) == serve_ring.slot_bytes(chunk, presize)
    assert slot_bytes(chunk, presize) == buffer_alloc_bytes(chunk, presize)


@pytest.mark.parametrize(
    "deployment",
    [Deployment(2, 2), Deployment(2, 4, num_buffers=3), Deployment(3, 1, presize_bytes=300 * MIB)],
    ids=lambda deployment: deployment.fleets,
)
def test_rings_are_what_the_consumers_reserve(deployment):
    index = index_in_memory(Architecture(num_experts=5))
    planner = Planner(build_layout(index), index.config)
    consumers = planner.consumers(deployment)
    prediction = predict(planner.layout, deployment, consumers)
    for memory in prediction.trainers:
        expected = 0
        for plan in consumers:
            here = [c.num_bytes for c in plan.chunks if c.producer == memory.rank]
            if here:  # Consumers that pull nothing here reserve nothing.
                slot = serve_ring.slot_bytes(max(here), deployment.presize_bytes)
                expected += deployment.num_buffers * slot
        assert memory.serve_ring_bytes == expected
    for receiver, plan in zip(prediction.inference, consumers, strict=True):
        largest = max(chunk.num_bytes for chunk in plan.chunks)
        expected = deployment.num_buffers * serve_ring.slot_bytes(largest, deployment.presize_bytes)
        assert receiver.receive_ring_bytes == expected


def test_prediction_of_a_run_takes_its_configuration():
    """Mini-kimi as `rdt-e2e sync` runs it: two ranks of each, two slots of 256 MiB."""
    config = load_config("local", {"trainer.lookahead": 1})
    model = CATALOG["mini-kimi"].config
    layout = build_layout(describe(model, Path("mini-kimi")))
    prediction = predict_memory(layout, model, config)
    assert [memory.serve_ring_bytes for memory in prediction.trainers] == [512 * MIB] * 2
    assert [memory.receive_ring_bytes for memory in prediction.inference] == [512 * MIB] * 2
    total = sum(held.num_bytes for held in layout.held.values())
    assert sum(memory.shard_bytes for memory in prediction.trainers) == total
    presized = load_config("local", {"sync.buffer_presize_gib": 0.5, "sync.num_buffers": 3})
    bigger = predict_memory(layout, model, presized)
    assert bigger.trainers[0].serve_ring_bytes == 3 * 512 * MIB
    twice = load_config("local", {"inference.num_replicas": 2})
    engines = predict_memory(layout, model, twice)
    assert [memory.serve_ring_bytes for memory in engines.trainers] == [1024 * MIB] * 2
    assert len(engines.inference) == 4


def test_kimi_k2_is_the_design(planner):
    """Figures derived by hand from K2's public configuration (design, section 8)."""
    deployment = Deployment(8, 8)
    kimi = planner("kimi-k2")
    consumers = kimi.consumers(deployment)
    prediction = predict(kimi.layout, deployment, consumers)
    assert {round(memory.shard_bytes / 1e9, 1) for memory in prediction.trainers} == {128.6}
    # Two slots for the embedding or the head, 2240 MiB and a norm.
    assert {memory.serve_ring_bytes for memory in prediction.trainers} == {2 * 2304 * MIB}
    assert {memory.receive_ring_bytes for memory in prediction.inference} == {2 * 2304 * MIB}
    items = {
        item.name: item.num_bytes
        for item in inference_items(consumers[0], prediction.inference[0], kimi.config, deployment)
    }
    assert round(items["weights, kernel format"] / 1e9, 1) == 141.1
    assert round(items["absorbed attention"] / 2**30, 2) == 0.95
    assert items["KV cache, least"] == 4 * 2048 * 61 * 576 * 2
    resident = resident_group_bytes(kimi.layout, Deployment(8, 8, gather="full"))
    assert 33 < resident / 1e9 < 35, "two mixture-of-experts layers"


def test_kv_cache_of_a_token():
    qwen = CATALOG["qwen3-235b"].config
    assert kv_bytes_per_token(qwen, Deployment(8, 8)) == 94 * 2 * 4 * 128 * 2
    assert kv_bytes_per_token(qwen, Deployment(8, 1, 2)) == 94 * 2 * 2 * 128 * 2
    # Fewer key heads than ranks: one each.
    assert kv_bytes_per_token(qwen, Deployment(8, 1, 8, kv_item_bytes=1)) == 94 * 2 * 1 * 128
    kimi = CATALOG["kimi-k2"].config
    assert kv_bytes_per_token(kimi, Deployment(8, 1, 8)) == 61 * 576 * 2

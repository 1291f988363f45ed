"""Fused stacks, gather groups and rows per rank."""

import math
import pickle
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from rdt_e2e.checkpoint.checks import check_index
from rdt_e2e.checkpoint.index import CheckpointIndex, TensorEntry
from rdt_e2e.checkpoint.layout import CheckpointLayout, build_layout, shard_rows
from rdt_e2e.errors import CheckpointError, MissingTensorError, PlanError
from tests import synthetic


def index_of(names: Iterable[str], shape: tuple[int, ...] = (2, 2)) -> CheckpointIndex:
    num_bytes = 2 * math.prod(shape)
    entries = {name: TensorEntry(name, "bfloat16", shape, "a", 0, num_bytes) for name in names}
    return CheckpointIndex(Path("in-memory"), entries, {}, {})


@pytest.fixture(scope="module")
def small():
    return synthetic.index_in_memory(synthetic.Architecture())


def test_groups_are_embedding_layers_and_the_rest(small):
    groups = build_layout(small).groups
    assert [group.label for group in groups] == [
        "before layers",
        "layers.0",
        "layers.1",
        "layers.2",
        "after layers",
    ]
    assert [group.index for group in groups] == list(range(5))
    assert groups[0].names == ("model.embed_tokens.weight",)
    assert groups[-1].names == ("lm_head.weight", "model.norm.weight")


def test_experts_are_fused_by_layer_projection_and_kind(small):
    layout = build_layout(small)
    stacks = {key: held for key, held in layout.held.items() if held.stacked}
    assert set(stacks) == {
        f"model.layers.{layer}.mlp.experts.*.{projection}_proj.{kind}"
        for layer in (1, 2)
        for projection in ("gate", "up", "down")
        for kind in ("weight", "weight_scale_inv")
    }
    down = stacks["model.layers.2.mlp.experts.*.down_proj.weight"]
    assert down.shape == (4, 256, 128)
    assert down.dtype == "float8_e4m3fn"
    assert down.num_bytes == 4 * 256 * 128
    assert down.names == tuple(
        f"model.layers.2.mlp.experts.{expert}.down_proj.weight" for expert in range(4)
    )
    scale = stacks["model.layers.2.mlp.experts.*.down_proj.weight_scale_inv"]
    assert (scale.shape, scale.dtype, scale.num_bytes) == ((4, 2, 1), "float32", 32)


def test_everything_else_is_held_under_its_own_name(small):
    layout = build_layout(small)
    shared = "model.layers.1.mlp.shared_experts.up_proj.weight"
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert layout.locate[shared] == (shared, None)
    assert layout.held[bias].names == (bias,)
    assert layout.held[bias].shape == (4,)
    assert not layout.held[bias].stacked


def test_experts_count_as_numbers():
    names = [f"model.layers.0.mlp.experts.{expert}.w" for expert in range(12)]
    layout = build_layout(index_of(sorted(names)))
    assert layout.groups[0].names == tuple(names)
    assert layout.locate[names[10]] == ("model.layers.0.mlp.experts.*.w", 10)


def test_zero_dimensional_tensor_is_held_as_one_row():
    layout = build_layout(index_of(["model.layers.0.scale"], shape=()))
    held = layout.held["model.layers.0.scale"]
    assert (held.shape, held.num_bytes) == ((1,), 2)
    assert layout.entries["model.layers.0.scale"].shape == ()


def test_checkpoint_without_embedding_has_no_empty_group():
    layout = build_layout(index_of(["model.layers.0.w", "model.norm.weight"]))
    assert [(group.index, group.label) for group in layout.groups] == [
        (0, "layers.0"),
        (1, "after layers"),
    ]


def test_layout_survives_pickling(small):
    layout = build_layout(small)
    assert pickle.loads(pickle.dumps(layout)) == layout  # noqa: S301


def test_expert_hole_is_found_without_the_checks():
    names = [f"model.layers.0.mlp.experts.{expert}.w" for expert in (0, 2)]
    with pytest.raises(MissingTensorError, match=r"experts\.\*\.w has experts up to 2 but not 1"):
        build_layout(index_of(names))


def test_second_list_of_layers():
    with pytest.raises(CheckpointError, match=r"vision\.layers\.0\.w"):
        build_layout(index_of(["model.layers.0.w", "vision.layers.0.w"]))


def test_kimi_k2_sizes():
    index = synthetic.index_in_memory(synthetic.KIMI_K2)
    check_index(index)
    layout = build_layout(index)
    assert len(layout.names) == 139_583
    assert len(layout.groups) == 63
    assert round(index.num_bytes / 1e9, 2) == 1029.17
    assert sum(held.num_bytes for held in layout.held.values()) == index.num_bytes
    routed = sum(held.num_bytes for held in layout.held.values() if held.stacked)
    assert round(routed / 1e9, 1) == 1014.9
    assert sum(len(held.names) for held in layout.held.values() if held.stacked) == 138_240
    # The embedding and the output head must not meet in one group: 2.35 GB each.
    largest_outside = max(
        sum(layout.held[key].num_bytes for key in group.keys)
        for group in (layout.groups[0], layout.groups[-1])
    )
    assert round(largest_outside / 1e9, 2) == 2.35


# A busy machine is no fault of the code.
slow_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

architectures = st.builds(
    synthetic.Architecture,
    num_layers=st.integers(1, 12),
    num_experts=st.integers(1, 13),
    first_k_dense=st.integers(0, 2),
)


@slow_machine
@given(architectures, st.randoms(use_true_random=False))
def test_each_name_is_laid_out_exactly_once_whatever_the_order(architecture, rng):
    index = synthetic.index_in_memory(architecture)
    layout = build_layout(index)
    assert sorted(layout.names) == sorted(index.entries)
    assert list(layout.entries) == list(layout.names) == list(layout.locate)
    assert layout.names == tuple(name for group in layout.groups for name in group.names)
    assert list(layout.held) == [key for group in layout.groups for key in group.keys]
    served = [name for held in layout.held.values() for name in held.names]
    assert sorted(served) == sorted(index.entries)
    for name, (key, row) in layout.locate.items():
        held = layout.held[key]
        entry = index.entries[name]
        assert held.dtype == entry.dtype
        if row is None:
            assert (held.names, held.shape, held.stacked) == ((name,), entry.shape, False)
        else:
            assert held.names[row] == name
            assert held.shape == (architecture.num_experts, *entry.shape)
    assert sum(held.num_bytes for held in layout.held.values()) == index.num_bytes
    assert_modules_are_whole(layout)

    shuffled = list(index.entries.items())
    rng.shuffle(shuffled)
    other = build_layout(CheckpointIndex(index.root, dict(shuffled), {}, index.config))
    assert other == layout
    assert other.names == layout.names


def assert_modules_are_whole(layout: CheckpointLayout) -> None:
    group_of_module: dict[str, int] = {}
    for group in layout.groups:
        names = set(group.names)
        for key in group.keys:
            assert names.issuperset(layout.held[key].names)
        for name in group.names:
            module = name.rpartition(".")[0]
            assert group_of_module.setdefault(module, group.index) == group.index


@slow_machine
@given(st.integers(0, 2000), st.integers(1, 40))
def test_shard_rows_is_torch_chunk(num_rows, world):
    chunks = [chunk.tolist() for chunk in torch.arange(num_rows).chunk(world)]
    expected = [*chunks, *([[]] * (world - len(chunks)))]
    ranges = [range(*shard_rows(num_rows, world, rank)) for rank in range(world)]
    assert [list(rows) for rows in ranges] == expected


@slow_machine
@given(st.integers(0, 500), st.integers(1, 40))
def test_shard_rows_covers_each_row_exactly_once_in_order(num_rows, world):
    rows = [row for rank in range(world) for row in range(*shard_rows(num_rows, world, rank))]
    assert rows == list(range(num_rows))


@pytest.mark.parametrize(
    ("num_rows", "world", "rank"), [(-1, 2, 0), (4, 2, 2), (4, 2, -1), (4, 0, 0)]
)
def test_shard_rows_refuses_what_cannot_be(num_rows, world, rank):
    with pytest.raises(PlanError, match=f"{num_rows} rows for rank {rank} of {world}"):
        shard_rows(num_rows, world, rank)


def fully_sharded(world: int, rank: int, sizes: list[int]) -> list[tuple[int, int, int]]:
    """Shard parameters of these row counts with FSDP2 as one rank of a group that is pretended.

    Gives (rows, local rows, first row) for each.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        module = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(rows, 2, device="meta")) for rows in sizes
        )
        fully_shard(module, mesh=mesh)
        results = []
        for rows, parameter in zip(sizes, module.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            _, offset = compute_local_shape_and_global_offset(
                parameter.shape, mesh, parameter.placements
            )
            results.append((rows, parameter.to_local().shape[0], offset[0]))
        return results
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shard_rows_is_what_fully_shard_gives(world):
    rng = random.Random(world)  # noqa: S311
    sizes = [1, 5, 8, 384, 576, *(rng.randrange(1, 100) for _ in range(8))]
    for rank in range(world):
        for num_rows, local_rows, offset in fully_sharded(world, rank, sizes):
            start, stop = shard_rows(num_rows, world, rank)
            assert local_rows == stop - start
            # A rank without rows has no meaningful offset.
            assert start == stop or offset == start

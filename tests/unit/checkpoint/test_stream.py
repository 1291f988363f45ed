"""Rows of held tensors, read byte for byte."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rdt_e2e.checkpoint import stream
from rdt_e2e.checkpoint.headers import DTYPES, read_header
from rdt_e2e.checkpoint.index import CheckpointIndex, read_index
from rdt_e2e.checkpoint.layout import HeldTensor, build_layout, shard_rows
from rdt_e2e.checkpoint.stream import Rows, ShardReader
from rdt_e2e.errors import CheckpointError, PlanError
from tests import synthetic

STACK = "model.layers.1.mlp.experts.*.up_proj.weight"
KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return synthetic.write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def index(checkpoint):
    return read_index(checkpoint.root)


@pytest.fixture(scope="module")
def layout(index):
    return build_layout(index)


def read_rows(
    index: CheckpointIndex, held: HeldTensor, start: int, stop: int, out: torch.Tensor
) -> int:
    """One read, with a reader of its own."""
    with ShardReader(index) as reader:
        return reader.read_rows(held, start, stop, out)


def empty_rows(held: HeldTensor, num_rows: int) -> torch.Tensor:
    return torch.zeros((num_rows, *held.shape[1:]), dtype=getattr(torch, held.dtype))


def read_by_rank(reader: ShardReader, held: HeldTensor, world: int) -> bytes:
    parts = []
    for rank in range(world):
        start, stop = shard_rows(held.shape[0], world, rank)
        out = empty_rows(held, stop - start)
        num_bytes = reader.read_rows(held, start, stop, out)
        raw = synthetic.raw_bytes(out)
        assert num_bytes == len(raw)
        parts.append(raw)
    return b"".join(parts)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_together_have_the_whole_checkpoint(checkpoint, index, layout, world):
    total = 0
    with ShardReader(index) as reader:
        for held in layout.held.values():
            raw = read_by_rank(reader, held, world)
            truth = b"".join(synthetic.raw_bytes(checkpoint.tensors[name]) for name in held.names)
            assert raw == truth
            total += len(raw)
    assert total == index.num_bytes


raw_tensors = st.tuples(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(1, 9), max_size=3),
    st.integers(1, 7),
    st.integers(0, 2**32),
)


@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(raw_tensors, st.booleans(), st.integers(1, 9))
def test_any_dtype_shape_and_world_reassembles_byte_for_byte(tmp_path, case, stacked, world):
    code, shape, num_experts, seed = case
    names = (
        [f"model.layers.0.mlp.experts.{expert}.w" for expert in range(num_experts)]
        if stacked
        else ["model.layers.0.w"]
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: any_bytes(code, shape, generator) for name in names}
    synthetic.save_checkpoint(tmp_path, tensors, {}, num_shards=1)
    entries = read_header(tmp_path, "model-00001-of-00001.safetensors")
    index = CheckpointIndex(tmp_path, entries, {}, {})
    (held,) = build_layout(index).held.values()
    with ShardReader(index) as reader:
        raw = read_by_rank(reader, held, world)
    assert raw == b"".join(synthetic.raw_bytes(tensors[name]) for name in names)


def any_bytes(code: str, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """A tensor of arbitrary bytes, NaNs with their payload included."""
    name, itemsize = DTYPES[code]
    high = 2 if code == "BOOL" else 256
    num_bytes = int(torch.Size(shape).numel()) * itemsize
    raw = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(getattr(torch, name)).reshape(shape)


def test_read_rows_reads_one_range(checkpoint, index, layout):
    held = layout.held[KV_A]
    out = empty_rows(held, 70)
    assert read_rows(index, held, 500, 570, out) == 70 * 256
    assert synthetic.raw_bytes(out) == synthetic.raw_bytes(checkpoint.tensors[KV_A][500:570])


def test_out_may_be_a_strided_view(checkpoint, index, layout):
    held = layout.held[KV_A]
    buffer = torch.zeros((576, 512), dtype=torch.float8_e4m3fn)
    read_rows(index, held, 0, 576, buffer[:, ::2])
    assert synthetic.raw_bytes(buffer[:, ::2]) == synthetic.raw_bytes(checkpoint.tensors[KV_A])
    assert not buffer[:, 1::2].view(torch.uint8).any()


@pytest.fixture
def reads(monkeypatch):
    """What was read, as (file, offset, bytes), in order."""
    log: list[tuple[str, int, int]] = []
    preadv = os.preadv

    def spy(descriptor, buffers, offset):
        count = preadv(descriptor, buffers, offset)
        log.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, offset, count))
        return count

    monkeypatch.setattr(os, "preadv", spy)
    return log


def where(index, name, first=0, stop=None):
    """File, offset and bytes of rows of a tensor."""
    entry = index.entries[name]
    row_bytes = entry.num_bytes // entry.shape[0]
    num_rows = (entry.shape[0] if stop is None else stop) - first
    return entry.file, entry.begin + first * row_bytes, num_rows * row_bytes


def test_only_the_rows_of_a_rank_are_read(index, layout, reads):
    stack, single = layout.held[STACK], layout.held[KV_A]
    with ShardReader(index) as reader:
        reader.read_rows(stack, 1, 3, empty_rows(stack, 2))
        reader.read_rows(single, 0, 10, empty_rows(single, 10))
    experts = [where(index, stack.names[row]) for row in (1, 2)]
    assert reads == [*sorted(experts), where(index, KV_A, 0, 10)]


def test_files_are_read_front_to_back(index, layout, reads):
    wanted = [
        Rows(held, 0, held.shape[0], empty_rows(held, held.shape[0]))
        for held in layout.held.values()
    ]
    with ShardReader(index) as reader:
        assert reader.read_all(reversed(wanted)) == index.num_bytes
    assert reads == sorted(reads)
    assert len(reads) == len(index.entries)


def test_large_rows_go_through_the_stage_in_parts(checkpoint, index, layout, monkeypatch, reads):
    held = layout.held[KV_A]
    monkeypatch.setattr(stream, "STAGE_BYTES", 100 * 256)
    buffer = torch.zeros((576, 512), dtype=torch.float8_e4m3fn)
    read_rows(index, held, 0, 576, buffer[:, ::2])
    assert [count for _, _, count in reads] == [100 * 256] * 5 + [76 * 256]
    assert synthetic.raw_bytes(buffer[:, ::2]) == synthetic.raw_bytes(checkpoint.tensors[KV_A])


def test_rank_without_rows_opens_nothing(index, layout, reads):
    held = layout.held[STACK]
    assert read_rows(index, held, 4, 4, empty_rows(held, 0)) == 0
    assert reads == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (3, 5)])
def test_rows_that_are_not_there(index, layout, start, stop):
    held = layout.held[STACK]
    with pytest.raises(PlanError, match=rf"rows {start} to {stop} of .* which has 4"):
        read_rows(index, held, start, stop, empty_rows(held, 1))


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros((1, 128, 256), dtype=torch.float8_e4m3fn),
        torch.zeros((2, 128, 1), dtype=torch.float8_e4m3fn),
        torch.zeros((2, 128, 256), dtype=torch.uint8),
    ],
)
def test_out_that_does_not_fit(index, layout, out):
    with pytest.raises(PlanError, match=r"\[2, 128, 256\] of float8_e4m3fn"):
        read_rows(index, layout.held[STACK], 0, 2, out)


@pytest.fixture
def damaged(tmp_path):
    """A checkpoint that has been indexed and may now be changed."""
    checkpoint = synthetic.write_checkpoint(tmp_path)
    index = read_index(tmp_path)
    return checkpoint, index, build_layout(index).held[KV_A]


def test_shard_gone_since_it_was_indexed(damaged):
    checkpoint, index, held = damaged
    checkpoint.path_of(KV_A).unlink()
    with pytest.raises(CheckpointError, match=rf"{checkpoint.files[KV_A]}: {KV_A} cannot be read"):
        read_rows(index, held, 0, 576, empty_rows(held, 576))


def test_shard_truncated_since_it_was_indexed(damaged):
    checkpoint, index, held = damaged
    synthetic.truncate(checkpoint.path_of(KV_A), 1)
    with pytest.raises(CheckpointError, match=rf"{KV_A} cannot be read"):
        read_rows(index, held, 0, 576, empty_rows(held, 576))


@pytest.mark.parametrize(
    "new", [torch.zeros((1, 256)).to(torch.float8_e4m3fn), torch.zeros((576, 256))]
)
def test_tensor_changed_since_it_was_indexed(damaged, new):
    checkpoint, index, held = damaged
    synthetic.edit_shard(
        checkpoint.path_of(KV_A), lambda tensors: tensors.update({KV_A: new.clone()})
    )
    with pytest.raises(CheckpointError, match=f"{KV_A} is .* no longer"):
        read_rows(index, held, 0, 576, empty_rows(held, 576))


def test_tensor_lost_since_it_was_indexed(damaged):
    checkpoint, index, held = damaged
    synthetic.edit_shard(checkpoint.path_of(KV_A), lambda tensors: tensors.__delitem__(KV_A))
    with pytest.raises(CheckpointError, match=f"{KV_A} cannot be read"):
        read_rows(index, held, 0, 576, empty_rows(held, 576))


def test_reader_opens_again_after_close(index, layout):
    held = layout.held[STACK]
    reader = ShardReader(index)
    first, second = empty_rows(held, 4), empty_rows(held, 4)
    reader.read_rows(held, 0, 4, first)
    reader.close()
    reader.read_rows(held, 0, 4, second)
    reader.close()
    assert synthetic.raw_bytes(first) == synthetic.raw_bytes(second)


def test_held_tensor_is_immutable(layout):
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.held[STACK].dtype = "float32"

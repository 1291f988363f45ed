"""Sharded on three real ranks, gathered again: the checkpoint's own bytes, and never more held."""

import socket

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn

from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.layout import build_layout, shard_rows
from rdt_e2e.errors import CheckpointError
from tests import synthetic

NUM_RANKS = 3  # Neither the experts nor the rows of most tensors divide by it.


def join(rank, port):
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS
    )
    return torch.distributed.device_mesh.init_device_mesh("cpu", (NUM_RANKS,))


def check_rank(rank, port, root, next_root, other_root):
    from rdt_e2e.trainer.shards import ShardedCheckpoint

    index = read_index(root)
    layout = build_layout(index)
    shards = ShardedCheckpoint(layout, join(rank, port), torch.device("cpu"))
    for folder in (root, next_root):
        assert shards.load(read_index(folder)) == shards.num_bytes
        expected = {}
        for path in folder.glob("*.safetensors"):
            expected.update(load_file(path))
        for group in layout.groups:
            gathered = shards.gather_group(group)
            assert list(gathered) == list(group.names)
            for name, tensor in gathered.items():
                assert tensor.shape == expected[name].shape
                assert tensor.dtype == expected[name].dtype
                assert synthetic.raw_bytes(tensor) == synthetic.raw_bytes(expected[name])
    held = sum(
        held.num_bytes * (stop - start) // held.shape[0]
        for held in layout.held.values()
        for start, stop in [shard_rows(held.shape[0], NUM_RANKS, rank)]
    )
    assert shards.num_bytes == held
    with pytest.raises(CheckpointError, match="must have the same tensors"):
        shards.load(read_index(other_root))


def test_three_ranks_hold_a_third_and_gather_the_whole(tmp_path):
    small = synthetic.Architecture()
    taller = synthetic.Architecture(num_layers=4)
    roots = []
    for name, architecture, seed in (("a", small, 1), ("b", small, 2), ("c", taller, 1)):
        folder = tmp_path / name
        folder.mkdir()
        roots.append(synthetic.write_checkpoint(folder, architecture, seed=seed).root)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    spawn(check_rank, args=(port, *roots), nprocs=NUM_RANKS)

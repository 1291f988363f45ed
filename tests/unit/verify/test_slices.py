"""The per-name check: what landed, against the checkpoint on disk."""

import pytest
import torch

from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.stream import ShardReader
from rdt_e2e.errors import WeightMismatchError
from rdt_e2e.fabric.checksum import checksum
from rdt_e2e.trainer.replay import replay
from rdt_e2e.verify.slices import check_slices
from tests import synthetic


@pytest.fixture
def index(tmp_path):
    synthetic.write_checkpoint(tmp_path)
    return read_index(tmp_path)


def landed(index):
    """Every name in two slices, as a loader that splits on dim 0 would ask for it."""
    sums = {}
    with ShardReader(index) as reader:
        for name in index.entries:
            whole = reader.read_whole(name)
            half = whole.shape[0] // 2 if whole.dim() else 0
            for start, length in ((0, half), (half, whole.shape[0] - half)) if half else ((0, 0),):
                chain = (("narrow", (0, start, length), ()),) if length else ()
                piece = replay(name, whole, chain).contiguous()
                sums[name, chain] = int(checksum(piece.reshape(-1).view(torch.uint8)))
    return sums


def test_what_the_checkpoint_gives_passes(index):
    sums = landed(index)
    assert check_slices(sums, set(index.entries), index, "inference rank 0") == len(sums)


def test_one_wrong_slice_is_named(index):
    sums = landed(index)
    key = next(key for key in sums if "down_proj.weight" in key[0])
    sums[key] += 1
    with pytest.raises(WeightMismatchError, match=rf"inference rank 0: bytes of {key[0]}"):
        check_slices(sums, set(index.entries), index, "inference rank 0")


def test_a_skipped_name_is_named(index):
    skipped = "model.layers.1.mlp.gate.e_score_correction_bias"
    names = set(index.entries) - {skipped}
    with pytest.raises(WeightMismatchError, match=rf"not synced: {skipped}"):
        check_slices({}, names, index, "inference rank 0")

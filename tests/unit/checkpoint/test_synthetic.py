import pytest
import torch

from rdt_e2e.bench.k2_slice import TINY, write_slice
from rdt_e2e.checkpoint import synthetic
from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.checkpoint.synthetic import SyntheticRows, fill, named_tensors, open_rows
from rdt_e2e.errors import CheckpointError, PlanError
from tests.synthetic import raw_bytes, write_checkpoint


@pytest.fixture
def index(tmp_path):
    write_slice(tmp_path, TINY, 2, seed=1)
    return read_index(tmp_path)


def test_rows_of_any_range_are_those_of_the_whole_tensor(index):
    whole = dict(named_tensors(index, "cpu"))
    with open_rows(index) as reader:
        for held in build_layout(index).held.values():
            rows = held.shape[0]
            for start, stop in ((0, rows), (rows // 3, rows), (0, rows // 3), (rows, rows)):
                out = torch.empty((stop - start, *held.shape[1:]), dtype=getattr(torch, held.dtype))
                assert reader.read_rows(held, start, stop, out) == out.nbytes
                for row in range(start, stop):
                    expected = whole[held.names[row]] if held.stacked else whole[held.key][row]
                    assert raw_bytes(out[row - start]) == raw_bytes(expected)


def test_windows_do_not_show(index, monkeypatch):
    name, entry = next(iter(index.entries.items()))
    whole = torch.empty(entry.shape, dtype=torch.bfloat16)
    fill(1, name, entry.dtype, 0, whole)
    monkeypatch.setattr(synthetic, "WINDOW_WORDS", 7)
    in_windows = torch.empty_like(whole)
    fill(1, name, entry.dtype, 0, in_windows)
    assert raw_bytes(in_windows) == raw_bytes(whole)


def test_bytes_are_these_and_no_others():
    # A changed generator would make two builds of this package disagree about one checkpoint.
    out = torch.empty(4, dtype=torch.float8_e4m3fn)
    fill(1, "model.norm.weight", "float8_e4m3fn", 0, out)
    later = torch.empty(2, dtype=torch.float8_e4m3fn)
    fill(1, "model.norm.weight", "float8_e4m3fn", 2, later)
    assert raw_bytes(out).hex() == "1da70a16"
    assert raw_bytes(later) == raw_bytes(out)[2:]


def test_every_tensor_is_finite_varied_and_its_own(index, tmp_path):
    seen = set()
    for name, tensor in named_tensors(index, "cpu"):
        values = tensor.float()
        assert torch.isfinite(values).all()
        assert values.unique().numel() > 1
        assert not name.endswith("scale_inv") or (values > 0).all()
        seen.add(raw_bytes(tensor))
    assert len(seen) == len(index.entries)
    other = tmp_path / "other"
    write_slice(other, TINY, 2, seed=2)
    again = {raw_bytes(tensor) for _, tensor in named_tensors(read_index(other), "cpu")}
    assert not seen & again


def test_stored_checkpoints_are_read_from_their_shards(tmp_path):
    stored = write_checkpoint(tmp_path)
    index = read_index(stored.root)
    held = build_layout(index).held["model.norm.weight"]
    out = torch.empty(held.shape, dtype=torch.bfloat16)
    with open_rows(index) as reader:
        reader.read_rows(held, 0, held.shape[0], out)
    assert torch.equal(out, stored.tensors["model.norm.weight"])


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(3, dtype=torch.bfloat16),
        torch.empty(4, dtype=torch.float16),
        torch.empty(8, dtype=torch.bfloat16)[::2],
    ],
    ids=["shape", "dtype", "strides"],
)
def test_memory_that_does_not_fit_is_refused(index, out):
    held = build_layout(index).held["model.norm.weight"]
    with pytest.raises(PlanError, match=r"model\.norm\.weight"):
        SyntheticRows(index).read_rows(held, 0, 4, out)


@pytest.mark.parametrize("content", ["", "[]", '{"seed": "one"}', "{}"])
def test_damaged_marker_is_named(index, content):
    (index.root / synthetic.MARKER_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"synthetic\.json"):
        open_rows(index)


def test_unknown_dtype_is_refused():
    with pytest.raises(CheckpointError, match="int64"):
        fill(1, "a.weight", "int64", 0, torch.empty(2, dtype=torch.int64))

"""Which snapshot of a local hub cache is meant."""

import pytest
from huggingface_hub import constants

from rdt_e2e.checkpoint.hub import choose_snapshot, repository_folder
from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.source import find_checkpoint, find_folder
from rdt_e2e.config import load_config
from rdt_e2e.console import Console
from rdt_e2e.errors import CheckpointError
from tests import synthetic

OLD = "a" * 40
NEW = "ab" * 20


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache with one repository of two snapshots; `refs/main` is the newer."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--a-model"
    for commit in (OLD, NEW):
        (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(NEW)
    (folder / "refs" / "v1").write_text(f"{OLD}\n")
    return folder


@pytest.mark.parametrize("source", ["someone/a-model", "FOLDER"])
@pytest.mark.parametrize(
    ("revision", "commit"), [("main", NEW), ("v1", OLD), (OLD, OLD), ("aba", NEW), ("aaa", OLD)]
)
def test_revision(cache, source, revision, commit):
    found = find_folder(str(cache) if source == "FOLDER" else source, revision)
    assert found == cache / "snapshots" / commit


def test_main_without_a_ref_is_the_only_snapshot(cache):
    (cache / "refs" / "main").unlink()
    (cache / "snapshots" / OLD).rmdir()
    assert choose_snapshot(cache) == cache / "snapshots" / NEW


@pytest.mark.parametrize(
    ("revision", "part"),
    [
        ("main", "no snapshot is of revision"),
        ("a", "2 snapshots begin with"),
        ("v2", "no snapshot"),
    ],
)
def test_unclear_revision_asks(cache, revision, part):
    (cache / "refs" / "main").unlink()
    with pytest.raises(CheckpointError, match=part) as caught:
        choose_snapshot(cache, revision)
    assert OLD in str(caught.value)
    assert NEW in str(caught.value)
    assert "model.revision" in str(caught.value)


def test_ref_to_a_snapshot_that_is_gone(cache):
    (cache / "snapshots" / NEW).rmdir()
    with pytest.raises(CheckpointError, match=NEW):
        find_folder("someone/a-model", "main")


def test_empty_ref(cache):
    (cache / "refs" / "main").write_text("")
    with pytest.raises(CheckpointError, match="no snapshot"):
        choose_snapshot(cache)


@pytest.mark.parametrize("source", ["someone/other", "/nowhere/at/all", "./nowhere", "a/b/c"])
def test_neither_folder_nor_snapshot(cache, source):
    assert repository_folder(source) is None
    with pytest.raises(CheckpointError, match="neither a folder nor a snapshot"):
        find_folder(source, "main")


def test_folder_of_that_name_comes_first(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "a-model").mkdir(parents=True)
    assert find_folder("someone/a-model", "main") == tmp_path / "someone" / "a-model"


def test_checkpoint_of_a_run_is_read_out_of_a_snapshot(cache, tmp_path):
    """Files are links into the cache's blobs, as downloads leave them."""
    made = synthetic.write_checkpoint(tmp_path / "made")
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted((tmp_path / "made").iterdir())):
        blob = cache / "blobs" / str(number)
        path.rename(blob)
        (cache / "snapshots" / NEW / path.name).symlink_to(f"../../blobs/{number}")
    config = load_config("local", {"model.source": "someone/a-model"})
    root = find_checkpoint(config, Console())
    assert root == cache / "snapshots" / NEW
    assert set(read_index(root).entries) == set(made.tensors)

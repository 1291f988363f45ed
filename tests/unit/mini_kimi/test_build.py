"""The cache: one rename, one build for racing processes, nothing left by a failed build."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rdt_e2e.errors import CheckpointError, ConfigError
from rdt_e2e.mini_kimi import build, recipe


class FakeBuild:
    """Stands for the training: writes one file and counts how often it was asked to."""

    def __init__(self, failure: BaseException | None = None):
        self.calls = 0
        self.failure = failure

    def __call__(self, work: Path, variant: str, report: Callable[[str], None]) -> None:
        self.calls += 1
        (work / "config.json").write_text("{}")
        if self.failure is not None:
            raise self.failure
        files = {"config.json": 2}
        (work / build.MANIFEST).write_text(json.dumps({"files": files}))


@pytest.fixture
def fake_build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    fake = FakeBuild()
    monkeypatch.setattr(build, "_build", fake)
    return fake


def test_builds_once_then_returns_the_cached_folder(tmp_path: Path, fake_build: FakeBuild):
    folder = build.ensure_mini_kimi(tmp_path)
    assert folder == tmp_path / "mini-kimi" / f"v1-{recipe.recipe_hash('v1')}"
    assert build.ensure_mini_kimi(tmp_path) == folder
    assert fake_build.calls == 1


def test_variants_have_folders_of_their_own(tmp_path: Path, fake_build: FakeBuild):
    assert build.ensure_mini_kimi(tmp_path, "v1") != build.ensure_mini_kimi(tmp_path, "v2")
    assert fake_build.calls == 2


def test_a_truncated_file_is_built_again(tmp_path: Path, fake_build: FakeBuild):
    folder = build.ensure_mini_kimi(tmp_path)
    (folder / "config.json").write_text("")
    lines: list[str] = []
    assert build.ensure_mini_kimi(tmp_path, report=lines.append) == folder
    assert (folder / "config.json").read_text() == "{}"
    assert fake_build.calls == 2
    assert any("cut short" in line for line in lines)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), CheckpointError("no luck")])
def test_an_interrupted_build_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, fake_build: FakeBuild, failure: BaseException
):
    fake_build.failure = failure
    with pytest.raises(type(failure)):
        build.ensure_mini_kimi(tmp_path)
    assert [path.name for path in (tmp_path / "mini-kimi").iterdir() if path.is_dir()] == []
    fake_build.failure = None
    assert build.ensure_mini_kimi(tmp_path).is_dir()


def test_leftovers_of_a_killed_build_are_removed(tmp_path: Path, fake_build: FakeBuild):
    leftover = tmp_path / "mini-kimi" / f".v1-{recipe.recipe_hash('v1')}.tmp-abc"
    leftover.mkdir(parents=True)
    build.ensure_mini_kimi(tmp_path)
    assert not leftover.exists()


def test_racing_callers_share_one_build(tmp_path: Path, fake_build: FakeBuild):
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(build.ensure_mini_kimi(tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert fake_build.calls == 1


def test_unknown_variant_touches_nothing(tmp_path: Path):
    with pytest.raises(ConfigError, match="v9"):
        build.ensure_mini_kimi(tmp_path, "v9")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path: Path):
    (tmp_path / "mini-kimi").write_text("a file in the way")
    with pytest.raises(CheckpointError, match=r"paths\.cache_dir"):
        build.ensure_mini_kimi(tmp_path)

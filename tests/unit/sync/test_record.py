"""The run directory."""

import json
from pathlib import Path

import pytest

from rdt_e2e.config import load_config
from rdt_e2e.errors import EnvironmentCheckError
from rdt_e2e.sync.record import SyncTiming, open_run


def config(folder):
    return load_config("local", {"paths.runs_dir": str(folder)})


def timing(iteration, update):
    producers = [{"num_bytes": 1_000_000}, {"num_bytes": 2_000_000}]
    return SyncTiming(iteration, {"pause": 0.1, "update": update, "finish": 0.2}, producers)


def filled(folder):
    run = open_run(config(folder))
    run.bake_s = 1.5
    run.facts["checkpoint"] = {
        "source": "mini-kimi", "num_names": 5, "num_groups": 3, "num_bytes": 4_000_000
    }  # fmt: skip
    run.syncs = [timing(1, 3.0), timing(2, 1.0), timing(3, 2.0)]
    run.texts = {"before": [{"prompt": "p", "token_ids": [1], "text": "x"}]}
    run.verdict = "PASS"
    return run


def test_json_holds_config_versions_texts_and_timings(tmp_path):
    run = filled(tmp_path)
    run.write()
    written = json.loads((run.folder / "run.json").read_text())
    assert written["config"]["trainer"]["num_ranks"] == 2
    assert written["versions"]["ray"]
    assert written["hardware"]["cores"] >= 1
    assert written["bake_s"] == 1.5
    assert [one["end_to_end_s"] for one in written["syncs"]] == pytest.approx([3.3, 1.3, 2.3])
    assert written["syncs"][0]["num_bytes"] == 3_000_000
    assert written["texts"]["before"][0]["text"] == "x"
    assert written["verdict"] == "PASS"


def test_summary_keeps_cold_and_warm_apart(tmp_path):
    lines = filled(tmp_path).summary().splitlines()
    assert any(line.startswith("cold sync 3.30 s") for line in lines)
    assert any(line.startswith("warm sync 1.80 s") and "median of 2" in line for line in lines)
    assert lines[-1] == "verdict   PASS"


def test_a_step_that_only_some_syncs_have_is_told_of_those(tmp_path):
    run = filled(tmp_path)
    run.syncs[2].seconds["check"] = 0.5
    (warm,) = [line for line in run.summary().splitlines() if line.startswith("warm sync")]
    assert "check 0.50" in warm


def test_a_failed_run_is_written_too(tmp_path):
    run = open_run(config(tmp_path))
    run.error = "no node has 9 GPUs"
    run.write()
    assert (
        (run.folder / "summary.txt").read_text().endswith("verdict   ERROR: no node has 9 GPUs\n")
    )


def test_two_runs_in_one_second_get_two_folders(tmp_path):
    folders = {open_run(config(tmp_path)).folder for _ in range(3)}
    assert len(folders) == 3


def test_a_runs_dir_that_cannot_be_made_names_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentCheckError, match=r"paths\.runs_dir"):
        open_run(config(tmp_path / "file" / "runs"))


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    run = filled(tmp_path)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(EnvironmentCheckError, match="No space left on device"):
        run.write()

import contextlib
import io
import json
from typing import Any

import psutil
import pytest

from rdt_e2e.bench import process, run
from rdt_e2e.bench.result import END_TO_END, RowResult
from rdt_e2e.bench.run import BenchOptions, run_bench
from rdt_e2e.console import Console
from rdt_e2e.errors import ConfigError, EnvironmentCheckError


def options(**changes: Any) -> BenchOptions:
    base: dict[str, Any] = {
        "profile": "local",
        "settings": {"sync.num_buffers": 3},
        "layers": 2,
        "repeats": 1,
        "rounds": 1,
        "rows": ("ours", "peer-rdt"),
        "row_timeout_s": 20.0,
    }
    return BenchOptions(**(base | changes))


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Replace the row's process by a script; returns where to write it."""
    script = tmp_path / "child.py"
    monkeypatch.setattr(run, "CHILD", (str(script),))
    monkeypatch.setattr(process, "INTERRUPT_WAIT_S", 0.2)
    return script


WRITE = """
import json, os, sys
task = json.loads(open(sys.argv[1]).read())
row = dict(row=task["row"], num_bytes=8, seconds={"end to end": [2.0]}, checks={"cold": CHECK},
           facts=dict(task=task, state=os.environ["XDG_STATE_HOME"]))
open(task["output"], "w").write(json.dumps([row]))
"""


def bench(tmp_path, **changes):
    out = io.StringIO()
    status = run_bench(options(**changes), Console(out), tmp_path / "report.json")
    return status, out.getvalue(), json.loads((tmp_path / "report.json").read_text())


def test_rows_take_turns_and_are_pooled(child, tmp_path):
    child.write_text(WRITE.replace("CHECK", "''"))
    status, text, report = bench(tmp_path, rounds=2)
    assert status == 0
    steps = [line.split()[1] for line in text.splitlines() if line.endswith("...")]
    assert steps == ["ours,", "peer-rdt,"] * 2
    ours, peer = (RowResult(**row) for row in report["rows"])
    assert ours.seconds[END_TO_END] == peer.seconds[END_TO_END] == [2.0, 2.0]
    task = ours.facts["task"]
    assert task["overrides"]["sync.num_buffers"] == 3
    assert task["versions"][0] != task["versions"][1]
    assert ours.facts["state"] != peer.facts["state"]


def test_wrong_weights_of_ours_are_exit_status_3_and_those_of_a_peer_are_shown(child, tmp_path):
    child.write_text(WRITE.replace("CHECK", "'w13 differs' if task['row'] == 'ours' else ''"))
    assert bench(tmp_path)[0] == 3
    child.write_text(WRITE.replace("CHECK", "'w13 differs' if task['row'] != 'ours' else ''"))
    status, text, _ = bench(tmp_path)
    assert status == 0
    assert "peer-rdt, weights after cold: WRONG: w13 differs" in text


def test_a_row_that_fails_is_shown_and_the_others_run(child, tmp_path):
    fail = "if task['row'] == 'peer-rdt': sys.exit('no such thing')\n"
    child.write_text(WRITE.replace("CHECK", "''").replace("row = dict", fail + "row = dict"))
    status, text, report = bench(tmp_path, rows=("peer-rdt", "ours"))
    assert status == 0
    assert report["rows"][0]["reason"] == "ended with status 1: no such thing"
    assert "n/a: ended with status 1: no such thing" in text
    assert report["rows"][1]["seconds"]


def test_ours_without_figures_is_exit_status_1(child, tmp_path):
    child.write_text("raise SystemExit(4)")
    assert bench(tmp_path)[0] == 1


def test_a_row_out_of_time_is_ended_with_all_it_started(child, tmp_path):
    pids = tmp_path / "pids"
    child.write_text(
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{inner.pid}}')\n"
        "inner.wait()\n"
    )
    status, text, _ = bench(tmp_path, rows=("ours",), row_timeout_s=3.0)
    assert status == 1
    assert "not done within 3 s" in text
    for pid in map(int, pids.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_what_a_crashed_row_leaves_behind_is_ended(child, tmp_path):
    pids = tmp_path / "pids"
    child.write_text(
        "import os, subprocess, sys\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        f"open({str(pids)!r}, 'w').write(str(inner.pid))\n"
        "os._exit(9)\n"
    )
    status, text, _ = bench(tmp_path, rows=("ours",))
    assert status == 1
    assert "ended with status 9" in text
    # Killed, and reaped by whoever adopted it.
    inner = int(pids.read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(inner).wait(timeout=10)
    assert not psutil.pid_exists(inner) or psutil.Process(inner).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "changes",
    [{"rows": ("ours", "peer-http")}, {"rows": ()}, {"repeats": 0}, {"rounds": 0}, {"layers": 1}],
)
def test_options_that_cannot_be_run_are_refused(tmp_path, changes):
    with pytest.raises(ConfigError, match="command line"):
        run_bench(options(**changes), Console(io.StringIO()), None)


def test_report_that_cannot_be_written_is_named(child, tmp_path):
    child.write_text(WRITE.replace("CHECK", "''"))
    (tmp_path / "report.json").mkdir()
    with pytest.raises(EnvironmentCheckError, match=r"report\.json"):
        bench(tmp_path)

"""The bench `wire`, tiny: syncs between two namespaces give figures, right weights, and leave nothing."""

import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rdt_e2e.bench.result import END_TO_END, RowResult
from rdt_e2e.bench.wire import WireOptions, run_wire
from rdt_e2e.console import Console

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None,
    reason="needs root, `ip` and `tc`, to make network namespaces and limit their link",
)


def test_small_wire(tmp_path: Path) -> None:
    out, report = io.StringIO(), tmp_path / "wire.json"
    options = WireOptions(
        rates=(None, 1e8),
        gathers=("owner",),
        settings={},
        widths="tiny",
        layers=3,
        repeats=1,
        row_timeout_s=500,
    )
    status = run_wire(options, Console(out), report)
    assert status == 0, out.getvalue()
    free, limited = (RowResult(**row) for row in json.loads(report.read_text())["rows"])
    assert limited.checks == {"the last sync": ""}
    assert free.num_bytes == limited.num_bytes > 0
    assert len(limited.seconds[END_TO_END]) == options.repeats
    # A plain stream cannot be faster than the link: the limit was really set.
    assert limited.facts["stream_bytes_per_s"] < 1.1e8
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert f"rdt-e2e-{os.getpid():x}-" not in left

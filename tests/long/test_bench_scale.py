"""The bench `scale`, tiny: fleets of two shapes sync right weights, and the table has a line for each."""

import io
import json
from pathlib import Path

from rdt_e2e.bench.scale import ScaleOptions, Shape, run_scale
from rdt_e2e.console import Console


def test_two_shapes(tmp_path: Path) -> None:
    out, report = io.StringIO(), tmp_path / "scale.json"
    options = ScaleOptions(
        profile="local",
        settings={},
        shapes=(Shape(1, 1), Shape(2, 2)),
        gathers=("owner",),
        layers=2,
        repeats=1,
        row_timeout_s=300,
    )
    status = run_scale(options, Console(out), report)
    # 0 says that every tensor of every rank was checked after every sync, and right.
    assert status == 0, out.getvalue()
    alone, pair = json.loads(report.read_text())["rows"]
    assert (alone["reason"], pair["reason"]) == (None, None)
    # Equal bytes for each inference rank is what makes the shapes comparable.
    assert abs(pair["rank_bytes"] / alone["rank_bytes"] - 1) < 0.05
    assert alone["skew"] is None
    assert pair["skew"] >= 0
    for row in (alone, pair):
        assert 0 < row["update_s"] < row["end_to_end_s"]
        assert row["found_bytes"] <= row["predicted_bytes"]
    assert "2 to 2" in out.getvalue()

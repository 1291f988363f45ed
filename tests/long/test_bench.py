"""The benchmark on CPU: every row gives figures or a reason, and the synced weights are the right ones."""

import io
import json
from pathlib import Path

from rdt_e2e.bench.result import CLOCKS, RowResult
from rdt_e2e.bench.run import BenchOptions, run_bench
from rdt_e2e.bench.table import LIMIT_COPY, OURS
from rdt_e2e.console import Console


def test_small_bench(tmp_path: Path) -> None:
    out, report = io.StringIO(), tmp_path / "bench.json"
    options = BenchOptions(
        profile="local",
        settings={},
        layers=3,
        repeats=2,
        rounds=1,
        rows=("limit", "ours", "peer-nccl"),
        row_timeout_s=420,
    )
    status = run_bench(options, Console(out), report)
    assert status == 0, out.getvalue()
    rows = {row["row"]: RowResult(**row) for row in json.loads(report.read_text())["rows"]}
    ours = rows[OURS]
    assert ours.checks == {"the cold sync": "", "the last warm sync": ""}
    assert set(ours.seconds) == set(CLOCKS)
    assert len(ours.seconds["end to end"]) == options.repeats
    # Two consumers, which share the experts and each take the rest whole.
    assert ours.num_bytes > rows[LIMIT_COPY].num_bytes
    assert any(part.startswith("one pull of") for part in ours.parts)
    assert ours.facts["traced_sync"]["consumer_totals"]["complete_pull"][0] > 0
    assert rows["peer-nccl"].reason == "vLLM's trainer engines need CUDA"
    assert "n/a" in out.getvalue()

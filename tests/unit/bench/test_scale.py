"""How a sync grows: shapes as they are given, figures as runs write them, and what becomes of failures."""

import contextlib
import io
import json
import types

import pytest

from rdt_e2e.bench import scale as module
from rdt_e2e.bench.scale import ScaleOptions, ScaleRow, Shape, read_row, read_shapes, run_scale
from rdt_e2e.bench.scale_table import format_scale
from rdt_e2e.cli.program import read_overrides
from rdt_e2e.config import load_config
from rdt_e2e.console import Console
from rdt_e2e.errors import ConfigError


def test_shapes_are_read():
    assert read_shapes("1to1, 4to2") == (Shape(1, 1), Shape(4, 2))


@pytest.mark.parametrize("text", ["", "4", "0to1", "2to0", "1to1,", "1x1"])
def test_a_malformed_shape_is_named(text):
    with pytest.raises(ConfigError, match="such as 4to4"):
        read_shapes(text)


def iteration(end_s, pulls, num_bytes=400.0):
    return {
        "clocks": {"end_to_end_s": end_s, "update_call_s": end_s / 2},
        "bytes": num_bytes,
        "consumers": [{"columns": {"pull_s": seconds}} for seconds in pulls],
    }


RUN = {
    "memory": {
        "trainer": [
            {"shard_bytes": 100, "serve_ring_bytes": 50},
            {"shard_bytes": 90, "serve_ring_bytes": 50},
        ]
    },
    "predicted": {
        "trainers": [{"shard_bytes": 100, "serve_ring_bytes": 50, "resident_group_bytes": 10}] * 2
    },
    "syncs": [
        {"producers": [{"gather_s": 9.0, "max_resident_bytes": 14}] * 2},
        {
            "producers": [
                {"gather_s": 0.1, "max_resident_bytes": 14},
                {"gather_s": 0.3, "max_resident_bytes": 30},
            ]
        },
    ],
}


def test_a_row_is_read_from_what_a_run_wrote():
    warm = [iteration(2.0, [1.0, 1.1]), iteration(4.0, [1.0, 1.3])]
    profile = {"iterations": [iteration(5.0, [1.0, 9.0]), *warm]}
    row = read_row(Shape(2, 2), "owner", RUN, profile)
    assert row.rank_bytes == 200
    assert (row.end_to_end_s, row.cold_s, row.update_s) == (3.0, 5.0, 1.5)
    assert row.gather_s == 0.3, "of the slowest rank, cold sync left out"
    assert row.skew == pytest.approx(0.2)
    assert (row.found_bytes, row.predicted_bytes) == (170, 160)


@pytest.mark.parametrize("pulls", [[1.0], [1.0, None]])
def test_nobody_to_be_slower_than_has_no_skew(pulls):
    profile = {"iterations": [iteration(1.0, pulls), iteration(1.0, pulls)]}
    assert read_row(Shape(2, 2), "owner", RUN, profile).skew is None


def test_growth_is_against_the_first_shape_of_the_same_mode():
    def row(shape, gather, end_s, reason=None):
        return ScaleRow(
            shape,
            gather,
            reason,
            rank_bytes=1e9,
            end_to_end_s=end_s,
            found_bytes=101,
            predicted_bytes=100,
        )

    lines = format_scale(
        [
            row(Shape(1, 1), "owner", 1.0),
            row(Shape(1, 1), "full", 2.0),
            row(Shape(4, 4), "owner", 1.1),
            row(Shape(4, 4), "full", 3.0),
            row(Shape(4, 2), "full", 0.0, "ended with status 1: no GPU"),
        ]
    )
    assert "+0%" in lines[1]
    assert "+0%" in lines[2]
    assert "+10%" in lines[3]
    # Four inference ranks of 1 GB each.
    assert "3.6" in lines[3]
    assert "+50%" in lines[4]
    assert lines[5] == "4 to 2   full   n/a: ended with status 1: no GPU"
    assert "+1.0%" in lines[1]
    assert "every tensor" in lines[6]


@pytest.mark.parametrize(
    ("ended", "status", "says"),
    [(1, 1, "n/a: ended with status 1: "), (3, 3, "n/a: WRONG WEIGHTS: ")],
)
def test_a_run_that_fails_is_a_row_that_says_so(monkeypatch, tmp_path, ended, status, says):
    commands = []

    @contextlib.contextmanager
    def process(command, environment, log):
        commands.append((command, environment))
        log.write_text("rdt-e2e: error: a reason\n")
        yield types.SimpleNamespace(wait=lambda _limit: ended)

    monkeypatch.setattr(module, "task_process", process)
    out = io.StringIO()
    options = ScaleOptions("local", {}, (Shape(1, 2), Shape(2, 2)), ("owner",), 2, 1, 10)
    report = tmp_path / "scale.json"
    assert run_scale(options, Console(out), report) == status
    assert out.getvalue().count(f"{says}rdt-e2e: error: a reason") == 2
    assert "every tensor" not in out.getvalue()
    assert len(json.loads(report.read_text())["rows"]) == 2
    (first, place), (second, other) = commands
    assert "trainer.num_ranks=1" in first
    assert "trainer.num_ranks=2" in second
    assert place["XDG_STATE_HOME"] != other["XDG_STATE_HOME"]
    # The program takes them as they are given.
    given = [word for word in second[second.index("--set") :] if word != "--set"]
    config = load_config("local", read_overrides(given))
    assert (config.trainer.num_ranks, config.inference.data_parallel) == (2, 2)
    assert (config.trainer.gather, config.verify.weights) == ("owner", "disk")

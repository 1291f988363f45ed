import io
from typing import Any

import pytest

from rdt_e2e.bench import wire
from rdt_e2e.bench.result import END_TO_END, UPDATE, RowResult
from rdt_e2e.bench.wire import WireOptions, read_rates, run_wire
from rdt_e2e.bench.wire_table import format_wire_table, unhidden_ms_per_group
from rdt_e2e.console import Console
from rdt_e2e.errors import ConfigError, EnvironmentCheckError


def options(**changes: Any) -> WireOptions:
    base: dict[str, Any] = {
        "rates": (None, 1e8),
        "gathers": ("owner", "full"),
        "settings": {},
        "widths": "tiny",
        "layers": 3,
        "repeats": 1,
        "row_timeout_s": 10.0,
    }
    return WireOptions(**(base | changes))


def row(rate, seconds, **changes):
    facts = {
        "bytes_per_s": rate,
        "num_groups": 10,
        "stream_bytes_per_s": 99e6,
        "busy_cores": [1.5],
    }
    clocks = {END_TO_END: seconds, UPDATE: [one - 0.1 for one in seconds]}
    return RowResult("owner, 100 MB/s", 100_000_000, clocks, facts=facts, **changes)


def test_rates_are_read():
    assert read_rates("none, 400,100") == (None, 4e8, 1e8)
    with pytest.raises(ConfigError, match="give MB/s"):
        read_rates("fast")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": (0.0,)}, "--rates"),
        ({"gathers": ("half",)}, "--gather"),
        ({"layers": 1}, "--layers"),
        ({"repeats": 0}, "--repeats"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_made(change, message):
    with pytest.raises(ConfigError, match=message):
        run_wire(options(**change), Console(io.StringIO()), None)


def test_what_the_wire_does_not_explain_is_counted_per_group():
    # A second of wire, 1.05 s of sync, ten groups.
    assert unhidden_ms_per_group(row(1e8, [1.0, 1.05, 1.3])) == pytest.approx(5.0)
    # Without a limit all of it is overhead.
    assert unhidden_ms_per_group(row(None, [0.4])) == pytest.approx(40.0)


def test_the_table_holds_a_sync_against_its_bytes():
    line = format_wire_table([row(1e8, [1.0, 1.05, 1.3])])[1]
    assert "1.05" in line
    assert "1.00 - 1.30" in line
    assert "+5.0%" in line
    assert "-5.0%" in line  # The update call alone.


def test_wrong_weights_and_a_mode_without_figures_show_and_set_the_status(monkeypatch):
    monkeypatch.setattr(wire, "check_privileges", lambda: None)
    answers = {
        "owner": [row(1e8, [1.0], checks={"the last sync": "w13 differs"})],
        "full": [RowResult("full", reason="not done within 10 s")],
    }
    monkeypatch.setattr(wire, "_run", lambda gather, *_rest: answers[gather])
    out = io.StringIO()
    assert run_wire(options(), Console(out), None) == 3
    assert "WRONG: w13 differs" in out.getvalue()
    assert run_wire(options(gathers=("full",)), Console(out), None) == 1
    assert "n/a: not done within 10 s" in out.getvalue()


def test_a_machine_without_the_tools_is_refused(monkeypatch):
    def refuse():
        raise EnvironmentCheckError("needs root")

    monkeypatch.setattr(wire, "check_privileges", refuse)
    with pytest.raises(EnvironmentCheckError, match="needs root"):
        run_wire(options(), Console(io.StringIO()), None)

"""The reports of a run: every figure on them is the JSON's, and the page needs nothing but itself."""

import io
import json
from html.parser import HTMLParser
from typing import Any

import pytest
from typer.testing import CliRunner

from rdt_e2e.cli import app
from rdt_e2e.console import Console
from rdt_e2e.errors import ConfigError
from rdt_e2e.profiling import figures
from rdt_e2e.profiling.build import build_profile
from rdt_e2e.profiling.command import read_profile, render, report, write_reports
from rdt_e2e.profiling.compare import change, comparison
from rdt_e2e.profiling.html import html_report, path_bar, timeline
from rdt_e2e.profiling.text import WIDTH, text_report
from rdt_e2e.profiling.trace import trace_json
from tests.profile_cases import RUN, profile_of, written


class Page(HTMLParser):
    """Tags with their attributes, cells of the tables by name, and whether every tag is closed."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, text):
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.open: list[str] = []
        self.tables: dict[Any, list[list[str]]] = {}
        self._table: list[list[str]] | None = None
        self._cell = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self._table = self.tables.setdefault(dict(attrs).get("data-table"), [])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in {"td", "th"}:
            self._cell = ""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in {"td", "th"} and self._table is not None:
            self._table[-1].append(" ".join(self._cell.split()))
        elif tag == "table":
            self._table = None

    def handle_data(self, data):
        self._cell += data


def test_the_page_is_whole_and_needs_nothing_else():
    text = html_report(profile_of(), RUN)
    page = Page(text)
    assert not [
        tag for tag, _ in page.tags if tag in {"script", "img", "iframe", "object", "embed"}
    ]
    for _, attributes in page.tags:
        for key in ("src", "href"):
            assert attributes.get(key, "data:,") == "data:,"
    assert "http" not in text.replace("http-equiv", "")
    assert "@import" not in text
    assert "url(" not in text
    assert "The &lt;b&gt;capital&lt;/b&gt;" in text, "generated text is not markup"
    assert "10.0.0.2 could not be read: it is gone" in text
    assert ">PASS<" in text


def test_the_numbers_on_the_page_are_those_of_the_json():
    profile = profile_of()
    page = Page(html_report(profile, RUN))
    warm = profile["iterations"][1]
    rows = {cells[0]: cells[1] for cells in page.tables["path"]}
    for bucket in warm["critical_path"]["buckets"]:
        assert rows[bucket["name"]] == f"{figures.seconds(bucket['seconds'])} s"
    assert rows["wall (the sum of the above)"] == "2.00 s"
    consumers = page.tables["consumers"][1:]
    assert [cells[0] for cells in consumers] == [str(one["rank"]) for one in warm["consumers"]]
    for cells, row in zip(consumers, warm["consumers"], strict=True):
        assert cells[4] == figures.size(row["columns"]["bytes"])
        assert cells[5] == figures.seconds(row["columns"]["rdma_s"])
        assert cells[6] == figures.gb_per_s(row["gb_per_s"])


def test_a_page_without_run_json_has_no_verdict():
    text = html_report(profile_of(), {})
    Page(text)
    assert 'id="verdict"' not in text


@pytest.mark.parametrize("verdict", ["PASS", "FAIL", "NOT VERIFIED", "ERROR"])
def test_a_run_that_ended_early_has_a_page(verdict):
    run = RUN | {"verdict": verdict, "error": "it broke", "texts": {}}
    del run["checkpoint"]
    text = html_report(build_profile("run", "full", None, []), run)
    Page(text)
    assert "it broke" in text


def test_bars_fill_the_width_and_spans_lie_below_their_axis():
    warm = profile_of()["iterations"][1]
    pieces = path_bar(warm["critical_path"])
    assert sum(piece["share"] for piece in pieces) == pytest.approx(1.0)
    assert pieces[-1]["x"] + pieces[-1]["width"] == pytest.approx(1000.0)
    drawn = timeline(warm)
    assert len(drawn["rects"]) == len(warm["timeline"])
    assert all(rect["x"] >= 0 and rect["x"] + rect["width"] <= 1001 for rect in drawn["rects"])
    assert drawn["rows"][0]["label"] == "driver"
    assert drawn["ticks"][0]["text"] == "0.000"


def test_the_text_can_be_pasted_and_says_what_is_not_known():
    profile = profile_of(process_s=None)
    text = text_report(profile)
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert all(line == line.rstrip() for line in lines)
    assert "\x1b" not in text
    assert "== sync 1 (cold)" in text
    assert "! node 10.0.0.2 could not be read: it is gone" in text
    assert "WALL (sum of the above)" in text
    assert "n/a" in text
    assert "verdict: balanced" in text
    assert "end to end 2.00 s (warm, median of 1; pause to resume)" in text
    assert "no figures came back from the inference ranks" in text


def test_the_trace_has_a_process_for_everybody_and_complete_events():
    trace = json.loads(trace_json(profile_of()))
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    assert sorted(names.values()) == ["consumer 0 on 10.0.0.2", "driver"]
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)
    threads = {
        (event["pid"], event["tid"])
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert {(event["pid"], event["tid"]) for event in events} == threads
    first, second = ([e["ts"] for e in events if e["args"]["sync"] == n] for n in (1, 2))
    assert max(first) < min(second), "syncs follow each other"
    transfer = next(event for event in events if event["cat"] == "transfer")
    assert transfer["dur"] == 250_000


def test_spans_of_a_thread_follow_or_nest_and_never_overlap():
    """Perfetto drops those that do."""
    profile = profile_of()
    sync = profile["iterations"][1]
    ends = [(0.1, 0.3), (0.2, 0.4), (0.25, 0.35), (0.3, 0.5), (1 / 3, 0.34), (0.5, 0.5 + 1e-10)]
    spans = [
        {"node": "10.0.0.2", "process": "consumer 0", "track": "transfer", "name": f"{number}",
         "start_s": start, "end_s": end, "details": {}}
        for number, (start, end) in enumerate(ends)
    ]  # fmt: skip
    # Ends and starts that are the same time, with rounding errors in between.
    spans += [
        spans[0] | {"track": "process", "start_s": 1 + step / 7e6, "end_s": 1 + (step + 1) / 7e6}
        for step in range(1000)
    ]
    sync["timeline"] = spans
    events = json.loads(trace_json(profile))["traceEvents"]
    names = {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in events
        if one["name"] == "thread_name"
    }
    found: dict[str, list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X" and event["args"]["sync"] == 2:
            started = round(event["ts"] * 1000)
            ended = started + round(event["dur"] * 1000)
            found.setdefault(names[event["pid"], event["tid"]], []).append((started, ended))
    assert found.keys() == {"transfer", "transfer (2)", "process"}
    assert sum(map(len, found.values())) == len(spans)
    for lane in found.values():
        around: list[int] = []
        for started, ended in sorted(lane, key=lambda one: (one[0], -one[1])):
            while around and around[-1] <= started:
                around.pop()
            assert not around or ended <= around[-1]
            around.append(ended)


def test_runs_side_by_side():
    profiles = [profile_of(2.0), profile_of(3.0)]
    rows = {(label, kind): values for label, kind, values in comparison(profiles)}
    assert rows["end to end", "s"] == [2.0, 3.0]
    assert rows["end to end", "GB/s"] == [1.0, pytest.approx(2 / 3)]
    assert rows["cold: end to end", "s"] == [8.0, 8.0]
    assert rows["driver: update", "s"] == [1.5, 1.5]
    assert ("consumer: transfer", "s") in rows
    assert change(2.0, 3.0) == "+50.0 %"
    assert change(None, 3.0) == change(0.0, 3.0) == "n/a"


def test_reports_of_one_run_and_of_two(tmp_path):
    first, second = written(tmp_path / "a"), written(tmp_path / "b", 3.0)
    out = CliRunner().invoke(app, ["report", str(first)])
    assert out.exit_code == 0
    assert "WALL" in out.stdout
    for name in ("profile.txt", "trace.json", "report.html"):
        assert (first / name).stat().st_size > 0
    shown = io.StringIO()
    assert report([first, second], Console(shown)) == 0
    assert "+50.0 %" in shown.getvalue()
    page = (second / "comparison.html").read_text()
    Page(page)
    assert "+50.0 %" in page


def test_the_last_sync_is_printed_and_the_file_has_all(tmp_path):
    folder = written(tmp_path / "run")
    printed, kept = render(folder), (folder / "profile.txt").read_text()
    assert ("== sync 1" in printed, "== sync 2" in printed) == (False, True)
    assert ("== sync 1" in kept, "== sync 2" in kept) == (True, True)
    for name in ("profile.txt", "report.html", "trace.json"):
        assert str(folder / name) in printed


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ('{"schema": 99}', "schema 99"),
        ("[]", "schema None"),
    ],
)
def test_a_profile_that_cannot_be_read_is_refused_by_name(content, said, tmp_path):
    if content is not None:
        (tmp_path / "profile.json").write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_profile(tmp_path)
    assert str(tmp_path / "profile.json") in str(caught.value)


def test_a_run_without_a_profile_ends_without_reports(tmp_path, caplog):
    shown = io.StringIO()
    write_reports(tmp_path, Console(shown))
    (tmp_path / "profile.json").write_text("{}")
    write_reports(tmp_path, Console(shown))
    assert shown.getvalue() == ""
    assert "no reports" in caplog.text


def test_figures():
    assert [figures.seconds(one) for one in (None, 0, 2.345, 0.0444, 0.00012)] == [
        "n/a", "0.000", "2.35", "0.044", "0.0001"
    ]  # fmt: skip
    assert [figures.size(one) for one in (None, 12, 2.27e9)] == ["n/a", "12 B", "2.3 GB"]

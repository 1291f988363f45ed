"""The pages in a real browser: they load without a word in its console, fit, and show the JSON's numbers."""

import json

import pytest

from rdt_e2e.console import Console
from rdt_e2e.profiling import figures
from rdt_e2e.profiling.build import build_iteration, build_profile
from rdt_e2e.profiling.command import render, report
from rdt_e2e.profiling.compare import change, comparison, figure
from tests.browser import Page, browser, check_report, needs_browser
from tests.profile_cases import (
    INFERENCE_NODE,
    RUN,
    TRAINER_NODE,
    Case,
    profile_of,
    reading,
    written,
)

pytestmark = needs_browser
WIDTHS = (1280, 380)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("user-data")) as found:
        yield found


def opened(driver, file, width=1280):
    page = Page(driver, file, width)
    assert page.console == []
    assert page.fits()
    return page


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run(driver, width, tmp_path):
    folder = written(tmp_path / "run")
    render(folder)
    page = opened(driver, folder / "report.html", width)
    check_report(page, json.loads((folder / "profile.json").read_text()))
    assert page.shown("#verdict") == ["PASS"]
    assert page.shown("blockquote") == ["noise & more"]
    assert page.ask("document.querySelectorAll('svg.timeline rect').length") > 5
    # The cold sync is closed; a click opens it.
    assert "node 10.0.0.2 could not be read: it is gone" not in page.shown(".note")
    page.ask("document.querySelector('summary').click()")
    assert "node 10.0.0.2 could not be read: it is gone" in page.shown(".note")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_with_a_missing_node(driver, width, tmp_path):
    case = Case()
    material = case.material(
        after=[reading(TRAINER_NODE, case.producers), reading(INFERENCE_NODE, error="no answer")]
    )
    profile = build_profile("some-run", "summary", None, [build_iteration(material)])
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    (tmp_path / "run.json").write_text(json.dumps(RUN | {"verdict": "ERROR", "error": "it broke"}))
    render(tmp_path)
    page = opened(driver, tmp_path / "report.html", width)
    check_report(page, profile)
    notes = page.shown(".note")
    assert notes[:3] == [
        "it broke", "node 10.0.0.2 could not be read: no answer", "nothing came from consumer 0, 1",
    ]  # fmt: skip
    assert "No figures came back from the inference ranks." in notes
    assert page.table("producer")[1][:2] == ["serving", "0.250"], "the other node counts"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_comparison(driver, width, tmp_path):
    folders = [written(tmp_path / "a", 2.0), written(tmp_path / "b", 3.0)]
    report(folders, Console())
    page = opened(driver, folders[1] / "comparison.html", width)
    shown = [tuple(row[:5]) for row in page.table("comparison") if len(row) > 1][1:]
    profiles = [profile_of(2.0), profile_of(3.0)]
    wanted = [
        (
            label.partition(": ")[2] or label,
            "" if kind == "bytes" else kind,
            *(figure(kind, value) for value in values),
            change(*values),
        )
        for label, kind, values in comparison(profiles)
        if any(values)
    ]
    assert sorted(shown) == sorted(wanted)
    assert ("end to end", "s", "2.00", "3.00", "+50.0 %") in shown
    assert "+50.0 %" in page.shown("td.bad"), "slower is bad"
    assert "-33.3 %" in page.shown("td.bad"), "and so are fewer GB/s"


def test_a_console_error_would_be_seen(driver, tmp_path):
    (tmp_path / "page.html").write_text(
        "<link rel='icon' href='data:,'><script>nothing.there</script>"
        "<p style='width: 3000px'>wide</p>"
    )
    page = Page(driver, tmp_path / "page.html")
    assert [one["level"] for one in page.console] == ["SEVERE"]
    assert not page.fits()


def test_figures_with_a_unit():
    assert (figures.with_unit(1.5), figures.with_unit(None)) == ("1.50 s", "n/a")

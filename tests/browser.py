"""A headless Chromium for the pages that this package writes, and what a test asks of a page."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from rdt_e2e.profiling import figures

PROGRAMS = ("chromium", "chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
"""No window, no sandbox (CI is root), and nothing that looks for a network."""
PAGE_TIMEOUT_S = 60

needs_browser = pytest.mark.skipif(
    any(shutil.which(program) is None for program in PROGRAMS),
    reason=f"needs {' and '.join(PROGRAMS)} (Debian: chromium, chromium-driver)",
)


@contextlib.contextmanager
def browser(user_data: Path) -> Iterator[webdriver.Chrome]:
    """A browser with an empty profile for the length of a block."""
    chromium, driver = (str(shutil.which(program)) for program in PROGRAMS)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={user_data}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options, Service(driver))
    try:
        found.set_page_load_timeout(PAGE_TIMEOUT_S)
        yield found
    finally:
        found.quit()


class Page:
    """A page, loaded from disk at a width.

    Attributes:
        console: What the browser's console says: errors, warnings, anything.
    """

    def __init__(self, driver: webdriver.Chrome, file: Path, width: int = 1280) -> None:
        self._driver = driver
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(file.as_uri())
        self.console = driver.get_log("browser")

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return self._driver.execute_script(f"return {script}")

    def table(self, name: str) -> list[list[str]]:
        """Text of the cells of the last table of that name that is shown, row by row."""
        return [
            [" ".join(cell.split()) for cell in row]
            for row in self.ask(
                f"""Array.from(Array.from(document.querySelectorAll('[data-table="{name}"]'))
                .filter(table => table.checkVisibility()).at(-1).rows)
                .map(row => Array.from(row.cells).map(cell => cell.innerText))"""
            )
        ]

    def shown(self, selector: str) -> list[str]:
        """Text of what matches and is shown."""
        found: list[str] = self.ask(
            f"""Array.from(document.querySelectorAll('{selector}'))
            .filter(one => one.checkVisibility()).map(one => one.innerText)"""
        )
        return found

    def fits(self) -> bool:
        """Whether nothing reaches beyond the window's right edge, except what scrolls in itself."""
        root = "document.documentElement"
        return bool(self.ask(f"{root}.scrollWidth <= {root}.clientWidth"))


def check_report(page: Page, profile: dict[str, Any]) -> None:
    """The numbers of the open sync, which is the last one, are those of `profile.json`."""
    sync = profile["iterations"][-1]
    shown = {row[0]: row[1:] for row in page.table("path")}
    for bucket in sync["critical_path"]["buckets"]:
        assert shown[bucket["name"]][0] == figures.with_unit(bucket["seconds"])
    assert shown["wall (the sum of the above)"][0] == figures.with_unit(
        sync["critical_path"]["wall_s"]
    )
    clocks = {row[0]: row[1:3] for row in page.table("clocks")}
    assert clocks["floor, at the rate of the NICs"][0] == figures.seconds(sync["floor_s"])
    for clock in ("rdma_only", "update_call", "end_to_end"):
        label = clock.replace("_", " ").replace("rdma", "RDMA")
        assert clocks[label] == [
            figures.seconds(sync["clocks"][f"{clock}_s"]),
            figures.gb_per_s(sync["gb_per_s"][clock]),
        ]
    warm = [
        profile["summary"]["warm"][f"{clock}_s"]
        for clock in ("rdma_only", "update_call", "end_to_end")
    ]
    cards = page.shown("#clocks b")
    assert cards[:3] == [figures.with_unit(value) for value in warm]
    for side in ("consumer", "producer"):
        split = sync["attribution"][side]
        if not split:
            continue
        rows = page.table(side)[1:]
        assert [row[:2] for row in rows] == [
            [share["label"], figures.seconds(share["seconds"])] for share in split
        ]
    if sync["consumers"]:
        columns = [
            (4, "bytes", figures.size), (5, "rdma_s", figures.seconds),
            (7, "pull_s", figures.seconds), (8, "process_s", figures.seconds),
        ]  # fmt: skip
        for cells, row in zip(page.table("consumers")[1:], sync["consumers"], strict=True):
            assert cells[0] == str(row["rank"])
            assert cells[6] == figures.gb_per_s(row["gb_per_s"])
            for place, column, written in columns:
                assert cells[place] == written(row["columns"][column])

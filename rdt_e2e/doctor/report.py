"""How findings are shown: grouped and aligned for people, one object for programs."""

import json
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rdt_e2e.doctor.finding import Check, Finding, Status, Theme

MARKS = {
    Status.PASS: "ok",
    Status.SKIPPED: "skip",
    Status.WARN: "WARN",
    Status.FAIL: "FAIL",
}
STYLES = {Status.PASS: "32", Status.SKIPPED: "2", Status.WARN: "33", Status.FAIL: "31"}
"""Colours of the marks on a terminal (SGR codes): green, dim, yellow, red."""

MIN_WIDTH = 60
MAX_WIDTH = 120
DEFAULT_WIDTH = 100
"""Columns where there is no terminal."""
_INDENT = 4


@dataclass(frozen=True)
class Result:
    """A check with what it found."""

    theme: Theme
    check: Check
    finding: Finding


@dataclass(frozen=True)
class Printer:
    """Prints results for people, theme by theme.

    Attributes:
        write: Takes one line.
        width: Columns of the terminal.
        colour: Whether it shows colours.
        verbose: Print also what passed and what was skipped.
    """

    write: Callable[[str], object]
    width: int
    colour: bool
    verbose: bool

    def show_theme(self, rows: Sequence[Result]) -> None:
        """Print the results of one theme, of which there is at least one."""
        counts = Counter(row.finding.status for row in rows)
        self.write(f"{rows[0].theme.title}: {_summary(counts)}")
        for row in rows:
            if self.verbose or row.finding.status in (Status.WARN, Status.FAIL):
                self._show_row(row)

    def show_total(self, results: Sequence[Result]) -> None:
        """Print how many there were of each kind, and where to read more."""
        of = {s: [r.check.id for r in results if r.finding.status is s] for s in Status}
        counts = Counter({status: len(ids) for status, ids in of.items()})
        self.write("")
        self.write(f"{len(results)} checks: {_summary(counts)}")
        bad = of[Status.FAIL] + of[Status.WARN]
        if bad:
            self.write(f"why and where from: rdt-e2e doctor --explain {bad[0]}")
        elif not self.verbose:
            self.write("what was looked at: rdt-e2e doctor --verbose")

    def _show_row(self, row: Result) -> None:
        finding, width = row.finding, max(MIN_WIDTH, min(self.width, MAX_WIDTH))
        mark = f"{MARKS[finding.status]:4}"
        if self.colour:
            mark = f"\033[{STYLES[finding.status]}m{mark}\033[0m"
        self.write(f"  {mark}  {row.check.title} ({row.check.id})")
        for part in finding.found.splitlines():
            for line in _wrap(part, width):
                self.write(line)
        label = "fix: "
        for alternative in finding.fix.splitlines():
            command, _, note = alternative.partition("  # ")
            # On a line of its own and unbroken, so that it can be copied.
            self.write(f"{' ' * (_INDENT * 2)}{label}{command}")
            label = " " * len(label)
            if note:
                for line in _wrap(f"({note})", width, indent=_INDENT * 2 + len(label)):
                    self.write(line)


def _wrap(text: str, width: int, indent: int = _INDENT * 2) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=space,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(counts: Counter[Status]) -> str:
    words = {
        Status.FAIL: "failed",
        Status.WARN: "with a warning",
        Status.PASS: "passed",
        Status.SKIPPED: "skipped",
    }
    return ", ".join(f"{counts[status]} {word}" for status, word in words.items() if counts[status])


def as_json(results: Sequence[Result]) -> str:
    """The results as one JSON object: `ok`, `counts` and `checks`."""
    counts = Counter(result.finding.status.value for result in results)
    checks = [
        {
            "id": result.check.id,
            "group": result.check.group,
            "title": result.check.title,
            "status": result.finding.status.value,
            "looked_at": result.check.looks_at,
            "found": result.finding.found,
            "fix": result.finding.fix,
            "sources": list(result.check.sources),
        }
        for result in results
    ]
    content = {
        "ok": counts[Status.FAIL] == 0,
        "counts": {status.value: counts[status.value] for status in Status},
        "checks": checks,
    }
    return json.dumps(content, indent=2)


def explain(check: Check, width: int) -> str:
    """A check in full, for `--explain`."""
    width = max(MIN_WIDTH, min(width, MAX_WIDTH))
    lines = [f"{check.id}: {check.title}"]
    for heading, text in (
        ("looks at", check.looks_at),
        ("why", check.why),
        ("known from", ", ".join(check.sources)),
    ):
        lines += ["", f"{heading}:", *_wrap(text, width, indent=_INDENT)]
    return "\n".join(lines)

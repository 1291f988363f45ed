"""The tables of faults in a document, written by the tests that inject them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PROCESSES = ("fault table: written by `make test-long`", "end of fault table")
NETWORK = ("network fault table: written by `make test-network`", "end of network fault table")
"""What the comments before and after a table say."""


@dataclass(frozen=True)
class Fault:
    """One row.

    Attributes:
        what: What was done.
        seconds: From the fault to the named error, or None where there must be no error.
        outcome: The error's class and who it names, or that the sync went well.
        after: What the next sync needed.
    """

    what: str
    seconds: float | None
    outcome: str
    after: str


class FaultTable:
    """Collects rows in the order of the tests.

    Args:
        marks: What the comments before and after the table say.
    """

    def __init__(self, marks: tuple[str, str]) -> None:
        self._begin, self._end = (f"<!-- {mark} -->" for mark in marks)
        self.rows: list[Fault] = []

    def add(self, what: str, seconds: float | None, outcome: str, after: str) -> None:
        """Add a row."""
        self.rows.append(Fault(what, seconds, outcome, after))

    def render(self) -> str:
        """The rows as Markdown."""
        lines = ["| fault | seconds to the error | outcome | the next sync |", "|---|---|---|---|"]
        for row in self.rows:
            seconds = "none" if row.seconds is None else f"{row.seconds:.1f}"
            lines.append(f"| {row.what} | {seconds} | {row.outcome} | {row.after} |")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Put the table between its marks in a document."""
        before, found, rest = path.read_text().partition(self._begin)
        assert found, f"{path} has no {self._begin}"
        _, _, after = rest.partition(self._end)
        path.write_text(f"{before}{self._begin}\n\n{self.render()}\n\n{self._end}{after}")


@pytest.fixture(scope="session")
def fault_table(request: pytest.FixtureRequest) -> Iterator[FaultTable]:
    """The table of faults of processes; see `_collected`."""
    yield from _collected(request, PROCESSES)


@pytest.fixture(scope="session")
def network_table(request: pytest.FixtureRequest) -> Iterator[FaultTable]:
    """The table of faults of the network; see `_collected`."""
    yield from _collected(request, NETWORK)


def _collected(request: pytest.FixtureRequest, marks: tuple[str, str]) -> Iterator[FaultTable]:
    """A table; written at the end if `--fault-table` names a document and every test passed."""
    table = FaultTable(marks)
    yield table
    target = request.config.getoption("--fault-table")
    if target and not request.session.testsfailed:
        table.write(Path(target))

"""The table of faults in a document, written by the tests that inject them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

BEGIN = "<!-- fault table: written by `make test-long` -->"
END = "<!-- end of fault table -->"


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
    """Collects rows in the order of the tests."""

    def __init__(self) -> None:
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
        before, _, rest = path.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        path.write_text(f"{before}{BEGIN}\n\n{self.render()}\n\n{END}{after}")


@pytest.fixture(scope="session")
def fault_table(request: pytest.FixtureRequest) -> Iterator[FaultTable]:
    """The table; written at the end if `--fault-table` names a document and every test passed."""
    table = FaultTable()
    yield table
    target = request.config.getoption("--fault-table")
    if target and not request.session.testsfailed:
        table.write(Path(target))

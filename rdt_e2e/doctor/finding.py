"""What a check is, and what it may find."""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdt_e2e.doctor.context import Context


class Status(enum.StrEnum):
    """How a check came out, from harmless to severe."""

    PASS = "pass"  # noqa: S105 - no password
    SKIPPED = "skipped"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What one check found on one machine.

    Attributes:
        status: How it came out.
        found: What was found, in one line or a short list of lines; for a skipped check, why.
        fix: What to type or set, one alternative a line, each with a note after `  # `; empty for a
            check that passed or was skipped.
    """

    status: Status
    found: str
    fix: str = ""


def ok(found: str) -> Finding:
    """The check passed."""
    return Finding(Status.PASS, found)


def skip(because: str) -> Finding:
    """The check has nothing to look at here."""
    return Finding(Status.SKIPPED, because)


def warn(found: str, fix: str) -> Finding:
    """A run can work, but slower or less safely than it should."""
    return Finding(Status.WARN, found, fix)


def fail(found: str, fix: str) -> Finding:
    """A run would fail, hang, or sync wrong weights."""
    return Finding(Status.FAIL, found, fix)


@dataclass(frozen=True)
class Check:
    """One question to a machine.

    Attributes:
        id: `group.name`, stable; what `--explain` takes.
        title: The question, in a few words.
        looks_at: What is read to answer it.
        why: What goes wrong without it.
        sources: Public issues and documents that it comes from.
        at_build: Whether an image build can answer it, without GPU, RDMA device or cluster.
        run: Asks the question.
    """

    id: str
    title: str
    looks_at: str
    why: str
    sources: tuple[str, ...]
    at_build: bool
    run: "Callable[[Context], Finding]"

    @property
    def group(self) -> str:
        """The theme it is listed under."""
        return self.id.partition(".")[0]


class Theme:
    """The checks of one group, in the order in which a module declares them.

    Args:
        group: Name of the group, the first part of every id.
        title: Its heading.
    """

    def __init__(self, group: str, title: str) -> None:
        self.group = group
        self.title = title
        self.checks: list[Check] = []

    def check(
        self,
        name: str,
        title: str,
        *,
        looks_at: str,
        why: str,
        sources: tuple[str, ...],
        at_build: bool = False,
    ) -> "Callable[[Callable[[Context], Finding]], Callable[[Context], Finding]]":
        """Declare the decorated function as a check of this theme; see `Check` for the arguments."""

        def declare(run: "Callable[[Context], Finding]") -> "Callable[[Context], Finding]":
            found = Check(f"{self.group}.{name}", title, looks_at, why, sources, at_build, run)
            self.checks.append(found)
            return run

        return declare

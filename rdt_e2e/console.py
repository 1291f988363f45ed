"""What the program tells the person who runs it: numbered steps, progress and single lines.

On a terminal the running step and its progress are live; anywhere else every event is one plain line,
so that logs and pipes stay readable.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TextIO

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

PLAIN_INTERVAL_S = 10.0
"""Least time between two plain progress lines, in seconds."""


class Advance(Protocol):
    """A running progress display."""

    def advance(self, num_done: int = 1) -> None:
        """Count `num_done` more items as done."""


class Meter(Protocol):
    """A row of a live display whose numbers come from elsewhere."""

    def show(self, num_done: int, total: int, text: str) -> None:
        """Set how many of how many are done, and what stands beside it."""


class Console:
    """Prints steps, progress and lines to one stream.

    Args:
        stream: Where to write; standard output when none.
        num_steps: Number of steps to come, for "[3/9]"; see `expect_steps`.
        clock: Seconds from any fixed point.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        num_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._num_steps = num_steps
        self._clock = clock
        self._step = 0
        self._live: Progress | None = None
        self._rich: RichConsole | None = None
        if self._stream.isatty():
            self._rich = RichConsole(file=self._stream, highlight=False)

    def expect_steps(self, num_steps: int) -> None:
        """Start counting steps anew, towards `num_steps`."""
        self._num_steps = num_steps
        self._step = 0

    def info(self, line: str) -> None:
        """Print one line; a running step or progress bar stays below it."""
        if self._rich is None:
            self._stream.write(f"{line}\n")
            # Steps take minutes; a reader of a pipe must not wait for a full buffer.
            self._stream.flush()
        else:
            # Square brackets in a path or in generated text are not markup.
            self._rich.print(line, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Announce a step, and say how long it took when it ends or fails."""
        self._step += 1
        total = "" if self._num_steps is None else f"/{self._num_steps}"
        label = f"[{self._step}{total}] {title}"
        start = self._clock()
        try:
            if self._rich is None:
                self.info(f"{label} ...")
                yield
            else:
                with self._task(f"{label} ...", None):
                    yield
        except BaseException:
            self.info(f"{label}: stopped after {self._clock() - start:.1f} s")
            raise
        self.info(f"{label}: {self._clock() - start:.1f} s")

    @contextlib.contextmanager
    def progress(self, total: int, label: str) -> Iterator[Advance]:
        """Show how many of `total` items are done.

        Args:
            total: Number of items.
            label: What is counted.
        """
        if self._rich is None:
            plain = _PlainProgress(self.info, total, label, self._clock)
            yield plain
            plain.finish()
        else:
            with self._task(label, total) as task:
                yield task

    @property
    def is_live(self) -> bool:
        """Whether somebody looks: a terminal, where rows can change."""
        return self._rich is not None

    @contextlib.contextmanager
    def meter(self, label: str) -> Iterator[Meter]:
        """Show a row that appears with its first numbers; off a terminal, nothing.

        Args:
            label: What is counted.
        """
        if self._rich is None:
            yield _NoMeter()
        else:
            with self._task(label, None, visible=False) as row:
                yield row

    @contextlib.contextmanager
    def _task(
        self, label: str, total: int | None, *, visible: bool = True
    ) -> Iterator["_LiveProgress"]:
        """One row of the live display, which exists while it has rows."""
        live = self._live
        if live is None:
            # One display holds every row: a second one beside it would overwrite the first.
            live = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._rich,
                transient=True,
            )
            self._live = live
            live.start()
        row = live.add_task(label, total=total, visible=visible)
        try:
            yield _LiveProgress(live, row, label)
        finally:
            live.remove_task(row)
            if not live.tasks:
                live.stop()
                self._live = None


class _LiveProgress:
    """Progress as one row of a live display."""

    def __init__(self, live: Progress, row: TaskID, label: str) -> None:
        self._live = live
        self._row = row
        self._label = label

    def advance(self, num_done: int = 1) -> None:
        self._live.advance(self._row, num_done)

    def show(self, num_done: int, total: int, text: str) -> None:
        self._live.update(
            self._row,
            completed=num_done,
            total=total,
            description=f"  {self._label}: {text}",
            visible=True,
            refresh=True,
        )


class _NoMeter:
    """Where nobody looks."""

    def show(self, num_done: int, total: int, text: str) -> None:
        pass


class _PlainProgress:
    """Progress as a line every `PLAIN_INTERVAL_S`, and one at the end."""

    def __init__(
        self, write: Callable[[str], None], total: int, label: str, clock: Callable[[], float]
    ) -> None:
        self._write = write
        self._total = total
        self._label = label
        self._clock = clock
        self._num_done = 0
        self._start = self._last = clock()

    def advance(self, num_done: int = 1) -> None:
        self._num_done += num_done
        now = self._clock()
        if now - self._last >= PLAIN_INTERVAL_S:
            self._last = now
            self._write(f"  {self._label}: {self._num_done}/{self._total}")

    def finish(self) -> None:
        elapsed = self._clock() - self._start
        self._write(f"  {self._label}: {self._num_done}/{self._total} in {elapsed:.1f} s")

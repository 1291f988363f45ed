"""Wraps methods of live objects to see when they run, and gives the objects back as they were.

A hook must never break what it watches. A method that is not there, one that the watched code no
longer calls, and an observer that fails all have the same effect: the columns they feed become
"n/a", and one warning says why.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

MAX_EVENTS = 20_000
"""Calls kept for the timeline per process and sync; the sums count all of them."""


@dataclass(frozen=True)
class Call:
    """One finished call of a wrapped method.

    Attributes:
        stage: What the hook is called.
        started: Seconds of the machine's monotonic clock.
        ended: The same.
        own_s: Its seconds without those of hooks called inside it.
        inside: Own seconds of the hooks called inside it, by stage, at any depth.
        args: Positional arguments, without the object itself.
        result: What it returned; None when it raised.
        failed: Whether it raised.
    """

    stage: str
    started: float
    ended: float
    own_s: float
    inside: Mapping[str, float]
    args: tuple[Any, ...]
    result: Any
    failed: bool

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.ended - self.started


@dataclass
class _Frame:
    """A call under way, on one thread's stack."""

    children_s: float = 0.0
    inside: dict[str, float] = field(default_factory=lambda: defaultdict(float))


Observer = Callable[[Call], None]


class HookSet:
    """The hooks of one process; safe from several threads.

    Attributes:
        counters: Sums by column since `reset`.
        events: (stage, thread, start, end) of calls since `reset`, when they are kept.
    """

    def __init__(self, *, keep_events: bool = False) -> None:
        self._keep_events = keep_events
        self._lock = threading.Lock()
        self._local = threading.local()
        self._undo: list[Callable[[], None]] = []
        self._missing: dict[str, str] = {}
        self._expected: dict[str, tuple[str, ...]] = {}
        self._calls: dict[str, int] = defaultdict(int)
        self.counters: dict[str, float] = defaultdict(float)
        self.events: list[tuple[str, str, float, float]] = []

    def wrap(
        self,
        target: Any,
        method: str,
        observe: Observer | None = None,
        *,
        stage: str | None = None,
        columns: Sequence[str] = (),
        before: Callable[..., None] | None = None,
        settle: Callable[[], None] | None = None,
        expected: bool = False,
    ) -> bool:
        """Watch one method of an object, or one function of a module.

        Args:
            target: The object or module; it keeps the wrapper until `uninstall`.
            method: Name of the method.
            observe: Called with each finished call.
            stage: What to call it; the method's own name when none.
            columns: Columns that are "n/a" without this hook.
            before: Called with the arguments when a call begins.
            settle: Called before the clock stops, such as to wait for a stream.
            expected: Whether every sync with pulls has to call it; if none does, Ray or vLLM has
                moved on to another method and the columns are "n/a".

        Returns:
            Whether the method is there.
        """
        name = method.lstrip("_") if stage is None else stage
        original = None if target is None else getattr(target, method, None)
        if not callable(original):
            self.give_up(columns, f"{_describe(target)} has no method {method}")
            return False
        if expected:
            self._expected[name] = tuple(columns)
        try:
            self._undo.append(_replace(target, method, self._wrapper(
                original, name, observe, tuple(columns), before, settle
            )))  # fmt: skip
        except (AttributeError, TypeError) as error:
            self.give_up(columns, f"{_describe(target)}.{method} cannot be wrapped: {error}")
            return False
        return True

    def give_up(self, columns: Sequence[str], reason: str) -> None:
        """Make columns "n/a" from now on, with one warning for each reason."""
        with self._lock:
            known = reason in self._missing.values()
            for column in columns:
                self._missing.setdefault(column, reason)
        if columns and not known:
            logger.warning("profile: %s is not measured: %s", ", ".join(columns), reason)

    def add(self, column: str, value: float) -> None:
        """Add to a column."""
        with self._lock:
            self.counters[column] += value

    def raise_to(self, column: str, value: float) -> None:
        """Keep the largest value of a column."""
        with self._lock:
            self.counters[column] = max(self.counters[column], value)

    def reset(self) -> None:
        """Begin a new sync: every sum is 0 again."""
        with self._lock:
            self.counters.clear()
            self._calls.clear()
            self.events = []

    def values(self, columns: Sequence[str], *, busy: bool) -> dict[str, float | None]:
        """Sums since `reset`, in the order of `columns`; None for what could not be measured.

        Args:
            columns: Columns wanted.
            busy: Whether this process took part, so that expected hooks must have been called.
        """
        if busy:
            for stage, fed in self._expected.items():
                if not self._calls[stage]:
                    self.give_up(fed, f"{stage} was never called in a sync with pulls")
        with self._lock:
            return {
                column: None if column in self._missing else self.counters[column]
                for column in columns
            }

    @property
    def missing(self) -> dict[str, str]:
        """Columns that are "n/a", with the reason."""
        with self._lock:
            return dict(self._missing)

    def uninstall(self) -> None:
        """Put every method back."""
        while self._undo:
            self._undo.pop()()

    def _wrapper(
        self,
        original: Callable[..., Any],
        stage: str,
        observe: Observer | None,
        columns: tuple[str, ...],
        before: Callable[..., None] | None,
        settle: Callable[[], None] | None,
    ) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            stack: list[_Frame] = self._local.__dict__.setdefault("stack", [])
            frame = _Frame()
            if before is not None:
                self._guarded(stage, columns, before, *args)
            stack.append(frame)
            result, failed = None, True
            started = time.monotonic()
            try:
                result = original(*args, **kwargs)
                failed = False
                if settle is not None:
                    self._guarded(stage, columns, settle)
                return result
            finally:
                ended = time.monotonic()
                stack.pop()
                call = Call(
                    stage, started, ended, ended - started - frame.children_s,
                    frame.inside, args, result, failed,
                )  # fmt: skip
                if stack:
                    stack[-1].children_s += call.seconds
                    for name, seconds in (*frame.inside.items(), (stage, call.own_s)):
                        stack[-1].inside[name] += seconds
                self._count(call)
                if observe is not None:
                    self._guarded(stage, columns, observe, call)

        return watched

    def _count(self, call: Call) -> None:
        with self._lock:
            self._calls[call.stage] += 1
            if self._keep_events and len(self.events) < MAX_EVENTS:
                thread = threading.current_thread().name
                self.events.append((call.stage, thread, call.started, call.ended))

    def _guarded(
        self, stage: str, columns: tuple[str, ...], function: Callable[..., None], *args: Any
    ) -> None:
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - what is measured must not fail by measuring it
            reason = f"the observer of {stage} failed: {type(error).__name__}: {error}"
            self.give_up(columns, reason)


def _replace(target: Any, method: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Put a wrapper in place; returns what undoes it."""
    held = vars(target).get(method)
    setattr(target, method, wrapper)

    def undo() -> None:
        if held is None:
            delattr(target, method)
        else:
            setattr(target, method, held)

    return undo


def _describe(target: Any) -> str:
    if target is None:
        return "an object that is not there"
    return getattr(target, "__name__", None) or type(target).__name__

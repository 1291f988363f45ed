"""The live line: what it says, that it asks one question at a time, and nothing when nobody looks."""

import asyncio
import contextlib
import io
from concurrent.futures import Future

import pytest

from rdt_e2e.console import Console
from rdt_e2e.profiling import progress as module
from rdt_e2e.profiling.progress import show, shown_progress
from rdt_e2e.trainer.progress import SyncProgress


class Row(Console):
    """A console that somebody looks at, and its one row."""

    def __init__(self):
        super().__init__(io.StringIO())
        self.shown = []
        self.seen = asyncio.Event()

    @property
    def is_live(self):
        return True

    @contextlib.contextmanager
    def meter(self, label):
        yield self

    def show(self, *numbers):
        self.shown.append(numbers)
        self.seen.set()


class Trainers:
    """Two ranks that answer, fail, or keep the driver waiting."""

    def __init__(self, *, answers=True, error=None):
        self.answers, self.error = answers, error
        self.asked = asyncio.Event()
        self.open: list[Future[SyncProgress | None]] = []
        self.most_open = 0

    def submit(self, method):
        assert method == "sync_progress"
        self.asked.set()
        self.open = [one for one in self.open if not one.done()]
        futures: list[Future[SyncProgress | None]] = [Future(), Future()]
        self.open += futures
        self.most_open = max(self.most_open, len(self.open))
        for future in futures:
            if self.error is not None:
                future.set_exception(self.error)
            elif self.answers:
                future.set_result(SyncProgress(3, 12, 2_000_000_000, 2.0))
        return [Reference(future) for future in futures]


class Reference:
    """What `submit` returns: Ray's reference, as far as it is used."""

    def __init__(self, future):
        self._future = future

    def future(self):
        return self._future


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 0.001)


def numbers(*ranks):
    row = Row()
    show(row, ranks)
    return row.shown


def test_the_slowest_rank_counts_and_bytes_add_up():
    first, second = SyncProgress(3, 12, 2_000_000_000, 2.0), SyncProgress(4, 12, 1_000_000_000, 1.5)
    assert numbers(first, second) == [(3, 12, "1.5 GB/s, 6 s left")]


def test_before_the_first_group_there_is_no_estimate():
    assert numbers(SyncProgress(0, 12, 0, 0.0), None) == [(0, 12, "n/a GB/s, ...")]


def test_between_syncs_nothing_is_shown():
    assert numbers(None, None) == []


def test_it_is_shown_until_the_sync_ends():
    async def run():
        row, trainers = Row(), Trainers()
        async with shown_progress(trainers, row):
            await asyncio.wait_for(row.seen.wait(), 20)
        return row, trainers

    row, trainers = asyncio.run(run())
    assert set(row.shown) == {(3, 12, "2.0 GB/s, 6 s left")}
    assert trainers.most_open == 2


def test_a_rank_that_does_not_answer_is_not_asked_again_and_holds_nobody_up():
    async def run():
        row, trainers = Row(), Trainers(answers=False)
        async with shown_progress(trainers, row):
            await asyncio.wait_for(trainers.asked.wait(), 20)
            trainers.asked.clear()
            for _ in range(20):
                await asyncio.sleep(0.002)
        return row, trainers

    row, trainers = asyncio.run(run())
    assert row.shown == []
    assert trainers.most_open == 2
    assert not any(future.cancelled() for future in trainers.open), "they are Ray's"


@pytest.mark.parametrize("fails", ["answer", "sync"])
def test_a_failure_is_the_syncs_own_or_nobodys(fails):
    error = RuntimeError("the rank is gone") if fails == "answer" else None

    async def run():
        row, trainers = Row(), Trainers(error=error)
        async with shown_progress(trainers, row):
            await asyncio.wait_for(trainers.asked.wait(), 20)
            if fails == "sync":
                raise KeyError("lost")

    with contextlib.nullcontext() if fails == "answer" else pytest.raises(KeyError):
        asyncio.run(run())


def test_where_nobody_looks_nobody_is_asked():
    async def run():
        trainers = Trainers()
        async with shown_progress(trainers, Console(io.StringIO())):
            await asyncio.sleep(0.01)
        return trainers.asked.is_set()

    assert not asyncio.run(run())

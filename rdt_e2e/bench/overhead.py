"""What an extra costs a sync: pairs of syncs on the same live fleets, one of them with it.

The two of a pair follow each other, and every second pair begins with the one that has the extra, so
that what else the machine does falls on both. Between them every trace of it is taken out again.
"""

import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from rdt_e2e.profiling.recorder import recorder_of
from rdt_e2e.sync.job import LiveRun
from rdt_e2e.sync.record import SyncTiming

NUM_WARM_UPS = 3
CONFIDENCE = 1.96
"""Standard deviations on each side of 95 % of a normal distribution."""
MIN_PAIRS = 10
"""Fewer pairs than this have no interval worth the name."""

CLOCKS: Mapping[str, Callable[[SyncTiming], float]] = {
    "update call": lambda timing: timing.update_s,
    "start to finish": lambda timing: sum(
        seconds for step, seconds in timing.seconds.items() if step not in ("pause", "resume")
    ),
    "pause to resume": lambda timing: timing.end_to_end_s,
}
"""What is compared: the second leaves out vLLM's pause, whose own spread is larger than any cost."""


@dataclass(frozen=True)
class Comparison:
    """One clock of all pairs; seconds, and shares of the median without.

    Attributes:
        clock: Key of `CLOCKS`.
        without_s: Median of the syncs without the extra.
        with_s: Median of those that were.
        change: Median over pairs of (with - without), as a share of `without_s`.
        low: Lower end of the 95 % interval of `change`.
        high: Its upper end.
        quartiles: First and third quartile of the pairs' changes.
    """

    clock: str
    without_s: float
    with_s: float
    change: float
    low: float
    high: float
    quartiles: tuple[float, float]


Kind = Callable[[LiveRun], Awaitable[SyncTiming]]
"""Makes one sync of a kind."""


async def overhead_job(run: LiveRun, num_pairs: int, extra: str) -> None:
    """Sync in pairs, and print what the one with the extra of each took longer.

    Args:
        run: The run with its fleets.
        num_pairs: Number of pairs, at least `MIN_PAIRS`.
        extra: A level of profiling, `summary` or `full`, or `checksums` of every pull.

    Raises:
        RdtE2EError: A sync failed.
    """
    without, with_extra = _kinds(extra)
    pairs: list[tuple[SyncTiming, SyncTiming]] = []
    with run.console.step("warm-up"):
        for _ in range(NUM_WARM_UPS):
            await without(run)
            await with_extra(run)
    label = f"{num_pairs} pairs of syncs"
    with run.console.step(label), run.console.progress(num_pairs, "pairs") as bar:
        for number in range(num_pairs):
            if number % 2:
                full = await with_extra(run)
                pairs.append((await without(run), full))
            else:
                bare = await without(run)
                pairs.append((bare, await with_extra(run)))
            bar.advance()
    compared = [compare(clock, pairs) for clock in CLOCKS]
    run.record.syncs += [timing for pair in pairs for timing in pair]
    run.record.facts["overhead"] = {
        "extra": extra,
        "pairs": [[dict(timing.seconds) for timing in pair] for pair in pairs],
    }
    for line in lines(compared, extra, num_pairs):
        run.console.info(line)


def _kinds(extra: str) -> tuple[Kind, Kind]:
    """How to sync without an extra, and with it."""
    if extra == "checksums":
        return lambda run: _summed(run, on=False), lambda run: _summed(run, on=True)
    return lambda run: run.session.sync(), lambda run: _watched(run, extra)


async def _watched(run: LiveRun, level: str) -> SyncTiming:
    recorder = recorder_of(run, level)
    try:
        return await recorder.sync(run.session.sync)
    finally:
        await recorder.stop()


async def _summed(run: LiveRun, *, on: bool) -> SyncTiming:
    await run.session.sum_pulls(on=on)
    try:
        return await run.session.sync()
    finally:
        await run.session.sum_pulls(on=run.config.verify.pulls)


def compare(clock: str, pairs: Sequence[tuple[SyncTiming, SyncTiming]]) -> Comparison:
    """One clock of pairs (without, with)."""
    read = CLOCKS[clock]
    without = [read(bare) for bare, _ in pairs]
    base_s = statistics.median(without)
    changes = sorted((read(watched) - read(bare)) / base_s for bare, watched in pairs)
    first, middle, third = statistics.quantiles(changes, n=4)
    # The median's interval by order statistics: it needs no assumption on the distribution, and the
    # normal approximation of the binomial is exact enough from ten pairs on.
    num = len(changes)
    cut = max(0, math.floor((num - CONFIDENCE * math.sqrt(num)) / 2))
    return Comparison(
        clock,
        base_s,
        statistics.median(read(watched) for _, watched in pairs),
        middle,
        changes[cut],
        changes[num - 1 - cut],
        (first, third),
    )


def lines(compared: Sequence[Comparison], extra: str, num_pairs: int) -> list[str]:
    """The table to print."""
    setting = "verify.pulls" if extra == "checksums" else f"profiling.level={extra}"
    found = [
        f"{setting} against off, medians of {num_pairs} pairs",
        f"{'clock':<17} {'off':>9} {extra:>9} {'change':>8}   95 % interval      quartiles of a pair",
    ]
    found += [
        f"{one.clock:<17} {one.without_s:>7.4f} s {one.with_s:>7.4f} s {_percent(one.change):>8}   "
        f"{_percent(one.low)} to {_percent(one.high):<9} "
        f"{_percent(one.quartiles[0])} to {_percent(one.quartiles[1])}"
        for one in compared
    ]
    return found


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"

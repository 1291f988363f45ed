"""The live line under a running sync: groups done, rate, and the seconds it still needs.

The trainer ranks know all of it without asking anybody. On a terminal the driver asks each of them
once in `INTERVAL_S`, never twice at the same time; where nobody looks, it asks nothing.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rdt_e2e.console import Console, Meter
from rdt_e2e.profiling.figures import gb_per_s
from rdt_e2e.trainer.progress import SyncProgress

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5


@contextlib.asynccontextmanager
async def shown_progress(trainers: Any, console: Console) -> AsyncIterator[None]:
    """Show how far the sync of the block is, if somebody looks.

    Args:
        trainers: The trainer fleet (`TrainerFleet`).
        console: Where to show it.
    """
    if not console.is_live:
        yield
        return
    with console.meter("groups") as meter:
        asking = asyncio.create_task(_keep_asking(trainers, meter))
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.wait([asking])


async def _keep_asking(trainers: Any, meter: Meter) -> None:
    try:
        while True:
            await asyncio.sleep(INTERVAL_S)
            answers = [
                asyncio.wrap_future(ref.future()) for ref in trainers.submit("sync_progress")
            ]
            for answer in answers:
                # One that fails after the last look has nobody to say so to.
                answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            # Not gather: a cancelled wait must leave Ray's futures alone.
            await asyncio.wait(answers)
            show(meter, [answer.result() for answer in answers])
    except Exception as error:  # noqa: BLE001 - the sync says itself what is wrong with it
        logger.debug("no more progress: %s", error)


def show(meter: Meter, ranks: Sequence[SyncProgress | None]) -> None:
    """Put the answers of all ranks on the line; ranks between two syncs have none.

    The estimate takes the groups that are left to be as large as those done, which decoder layers are.

    Args:
        meter: The line.
        ranks: Answers by rank.
    """
    under_way = [one for one in ranks if one is not None]
    if not under_way:
        return
    elapsed_s = max(one.elapsed_s for one in under_way)
    # A group is done when every rank has been told so by every consumer.
    num_done = min(one.num_done for one in under_way)
    num_groups = under_way[0].num_groups
    rate = sum(one.num_bytes for one in under_way) / 1e9 / elapsed_s if elapsed_s else None
    left = f"{elapsed_s * (num_groups - num_done) / num_done:.0f} s left" if num_done else "..."
    meter.show(num_done, num_groups, f"{gb_per_s(rate)} GB/s, {left}")

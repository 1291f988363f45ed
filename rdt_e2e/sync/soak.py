"""Many syncs, each of them checked, and what they leave behind: memory, files, registrations."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rdt_e2e.checkpoint.source import find_checkpoint
from rdt_e2e.config import MINI_KIMI
from rdt_e2e.sync.job import LiveRun, check_text, check_weights, memory, sync_live
from rdt_e2e.verify.text import read_reference

NUM_SAMPLES = 25
"""Times that memory is looked at, at least, spread over the syncs."""
WARM_UP = 0.2
"""Share of the samples left out of the slopes: caches fill up first."""
WATCHED = ("rss_bytes", "num_fds", "num_shm", "num_registered")


async def soak_job(run: LiveRun, num_syncs: int) -> None:
    """Sync again and again, generate in between, and check every rung each time.

    Mini-kimi changes its version with every sync, so that a weight which is not written shows.

    Args:
        run: The run.
        num_syncs: Number of syncs.

    Raises:
        VerificationError: A text or a weight is wrong.
        RdtE2EError: A sync failed.
    """
    versions = _versions(run)
    every = max(1, num_syncs // NUM_SAMPLES)
    samples: list[tuple[int, dict[str, list[dict[str, Any]]]]] = []
    load_timeout_s = run.config.trainer.load_timeout_s
    with run.console.step(f"{num_syncs} syncs"), run.console.progress(num_syncs, "syncs") as bar:
        for number in range(1, num_syncs + 1):
            root, reference = versions[number % len(versions)]
            if len(versions) > 1:
                run.trainers.call("load_version", root, timeout_s=load_timeout_s)
            run.reference = reference
            run.record.syncs.append(await sync_live(run))
            with run.metrics.verification():
                await check_text(run, "after the last sync", quiet=True)
                await check_weights(run, root, quiet=True)
            if number % every == 0:
                samples.append((number, await memory(run)))
            bar.advance()
    slopes = {
        side: [_slopes(samples, side, rank) for rank in range(len(samples[-1][1][side]))]
        for side in ("trainer", "inference")
    }
    run.record.facts["soak"] = {"num_syncs": num_syncs, "samples": samples, "slopes": slopes}
    for side, ranks in slopes.items():
        for rank, slope in enumerate(ranks):
            run.console.info(f"  {side} rank {rank} per 100 syncs: {_describe(slope)}")


def _versions(run: LiveRun) -> list[tuple[Path, Any]]:
    config = run.config
    if config.model.source != MINI_KIMI:
        return [(run.root, run.reference)]
    found = []
    for variant in ("v1", "v2"):
        model = config.model.model_copy(update={"variant": variant})
        root = find_checkpoint(config.model_copy(update={"model": model}), run.console)
        reference = None
        if run.reference is not None:
            reference = read_reference(root, config.verify.prompts, config.verify.max_tokens)
        found.append((root, reference))
    return found


def _slopes(
    samples: Sequence[tuple[int, dict[str, list[dict[str, Any]]]]], side: str, rank: int
) -> dict[str, float]:
    """Least-squares growth per 100 syncs of each watched figure, after the warm-up."""
    kept = [(n, sides[side][rank]) for n, sides in samples[int(len(samples) * WARM_UP) :]]
    slopes: dict[str, float] = {}
    for figure in WATCHED:
        points = [(n, one[figure]) for n, one in kept if one.get(figure) is not None]
        if len(points) > 1:
            numbers, values = zip(*points, strict=True)
            slopes[figure] = 100 * statistics.linear_regression(numbers, values).slope
    return slopes


def _describe(slope: dict[str, float]) -> str:
    parts = []
    if "rss_bytes" in slope:
        parts.append(f"memory {slope['rss_bytes'] / 1e6:+.2f} MB")
    names = {
        "num_fds": "open files",
        "num_shm": "shared memory segments",
        "num_registered": "registrations",
    }
    parts += [f"{name} {slope[key]:+.2f}" for key, name in names.items() if key in slope]
    return ", ".join(parts)

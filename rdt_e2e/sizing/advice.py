"""What to change: when it does not fit, the smallest change that does; else the depth of the ring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rdt_e2e.sizing.blocks import refused_cuts
from rdt_e2e.sizing.gpus import Gpu, larger_than
from rdt_e2e.sizing.memory import gathered_bytes
from rdt_e2e.sizing.times import GATHER_BYTES_PER_S, REACH_BYTES, slowest_flow
from rdt_e2e.sizing.verdict import Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rdt_e2e.checkpoint.layout import CheckpointLayout
    from rdt_e2e.sizing.chunks import ConsumerPlan, Planner
    from rdt_e2e.sizing.deployment import Deployment

CHUNK_STEP_BYTES = 256 << 20
"""Chunk limits are proposed in steps of a slot's own rounding."""
MAX_GROWTH = 8
"""Most times that more ranks are proposed."""
NUM_ALTERNATIVES = 4
"""Most changes that are listed."""
TENSOR_PARALLEL = (1, 2, 4, 8, 16)
"""Tensor-parallel sizes that are tried."""


@dataclass(frozen=True)
class Change:
    """One change under which the sync fits.

    Attributes:
        what: The change, in the words of the configuration.
        spare_bytes: What the fuller side then has left.
    """

    what: str
    spare_bytes: int


def fitting_changes(
    planner: Planner, deployment: Deployment, gpu: Gpu, verdict: Verdict
) -> tuple[Change, ...]:
    """Find changes under which a deployment that does not fit does.

    Args:
        planner: Plans of the checkpoint.
        deployment: Both fleets.
        gpu: The GPU class.
        verdict: The verdict on it.

    Returns:
        Changes that vLLM accepts. Smallest change first: settings, then the same GPUs in another parallelism, then other GPUs, then
        more of them. Each fits by itself. Empty when nothing tried does.
    """
    found: list[Change] = []
    for what, changed in _candidates(deployment, verdict):
        if refused_cuts(planner.layout, planner.config, changed):
            continue
        outcome = judge(planner, changed, gpu.usable_bytes)
        if outcome.fits:
            found.append(Change(what, _spare(outcome)))
            if len(found) == NUM_ALTERNATIVES - 2:
                break
    free = replace(deployment, gpu_memory_utilization=None)
    if verdict.fits or refused_cuts(planner.layout, planner.config, free):
        # No other GPU makes the engine accept a cut that it refuses.
        return tuple(found)
    larger = _first_larger(planner, free, gpu)
    if larger is not None:
        found.append(larger)
    grown = _first_grown(planner, free, gpu, verdict)
    if grown is not None and len(found) < NUM_ALTERNATIVES:
        found.append(grown)
    return tuple(found)


def ring_advice(consumers: Sequence[ConsumerPlan], deployment: Deployment) -> tuple[str, ...]:
    """Say whether ring depth and chunk size suit the fabric's translation cache.

    Args:
        consumers: Every consumer's plan.
        deployment: Both fleets.
    """
    lines = []
    chunk, depth = slowest_flow(consumers), deployment.num_buffers
    largest = max(plan.largest_chunk_bytes for plan in consumers)
    in_flight = depth * chunk
    span = f"{REACH_BYTES[0] / 1e9:.0f} to {REACH_BYTES[1] / 1e9:.0f} GB"
    if in_flight > REACH_BYTES[1]:
        limit = REACH_BYTES[1] // depth // CHUNK_STEP_BYTES * CHUNK_STEP_BYTES
        lines.append(
            f"{depth} slots x {_size(chunk)} = {_size(in_flight)} per flow is above the "
            f"{span} that a RoCE translation cache was seen to cover: set "
            f"sync.max_chunk_bytes={limit} ({depth} x {_size(limit)})"
        )
    else:
        lines.append(
            f"{depth} slots x {_size(chunk)} = {_size(in_flight)} per flow is within the "
            f"{span} that a RoCE translation cache was seen to cover"
        )
    if depth > 2:
        lines.append(
            "sync.num_buffers=3 made syncs a third faster over NVLink; over RoCE more than 2 was "
            "seen to slow the released engine down: measure it"
        )
    if deployment.presize_bytes and deployment.presize_bytes < largest:
        lines.append(
            f"slots are sized for the largest pull ({_size(largest)}) anyway: "
            "sync.buffer_presize_gib may be 0"
        )
    elif deployment.presize_bytes > 2 * largest:
        lines.append(
            f"sync.buffer_presize_gib is {deployment.presize_bytes / 2**30:.2f}, the largest pull only "
            f"{_size(largest)}: 0 sizes slots to it"
        )
    return tuple(lines)


def lookahead_advice(
    layout: CheckpointLayout,
    deployment: Deployment,
    consumers: Sequence[ConsumerPlan],
    nic_bytes_per_s: float,
) -> str:
    """Say whether the gathers hide behind the pulls.

    Args:
        layout: The served checkpoint.
        deployment: Both fleets.
        consumers: Every consumer's plan.
        nic_bytes_per_s: Rate of one NIC.
    """
    ranks = deployment.num_trainers
    gathers = [
        size * (ranks - 1) / ranks / GATHER_BYTES_PER_S
        for size in gathered_bytes(layout, deployment)
    ]
    pulls = [0.0] * len(gathers)
    for chunk in consumers[0].chunks:
        pulls[chunk.group] += chunk.num_bytes / nic_bytes_per_s
    late = [i for i in range(1, len(gathers)) if gathers[i] > pulls[i - 1]]
    if not late:
        return (
            "every gather is shorter than the pulls before it: lookahead 1 hides it"
            if deployment.lookahead
            else "lookahead 0 gathers only when a group is freed: 1 would hide every gather"
        )
    worst = max(late, key=lambda i: gathers[i] - pulls[i - 1])
    hint = (
        "sync cannot be faster than its gathers"
        if sum(gathers) > sum(pulls)
        else "lookahead 2 hides more"
    )
    return (
        f"{len(late)} of {len(gathers)} gathers are longer than the pulls before them "
        f"({layout.groups[worst].label}: {gathers[worst] * 1e3:.0f} ms against "
        f"{pulls[worst - 1] * 1e3:.0f} ms); {hint}"
    )


def _candidates(deployment: Deployment, verdict: Verdict) -> Iterator[tuple[str, Deployment]]:
    """Changes of settings, one at a time and then together; then other parallelism."""
    bounds = verdict.utilization
    base = deployment
    if bounds.chosen is not None and not bounds.fits and bounds.least <= bounds.most:
        yield (
            f"inference.gpu_memory_utilization={bounds.advised:g}",
            replace(base, gpu_memory_utilization=bounds.advised),
        )
    # From here on the share is whatever the change needs.
    base = replace(base, gpu_memory_utilization=None)
    settings: list[tuple[str, dict[str, Any]]] = []
    if base.presize_bytes:
        settings.append(("sync.buffer_presize_gib=0", {"presize_bytes": 0}))
    if base.gather == "full":
        settings.append(("trainer.gather=owner", {"gather": "owner"}))
    if base.lookahead > 1:
        settings.append(("trainer.lookahead=1", {"lookahead": 1}))
    limit = 4 * CHUNK_STEP_BYTES
    if base.max_chunk_bytes is None or base.max_chunk_bytes > limit:
        settings.append((f"sync.max_chunk_bytes={limit}", {"max_chunk_bytes": limit}))
    if base.num_buffers > 1:
        settings.append(("sync.num_buffers=1 (no overlap)", {"num_buffers": 1}))
    yield from _combined(base, settings)
    yield from _parallelism(base)
    free = [setting for setting in settings if "num_buffers" not in setting[1]]
    if free:
        what = ", ".join(name for name, _ in free)
        freed = replace(base, **{key: value for _, change in free for key, value in change.items()})
        for other, changed in _parallelism(freed):
            yield f"{what}, {other}", changed


def _combined(
    base: Deployment, settings: Sequence[tuple[str, dict[str, Any]]]
) -> Iterator[tuple[str, Deployment]]:
    """Each setting alone, then the first two, three and so on together."""
    for what, change in settings:
        yield what, replace(base, **change)
    for count in range(2, len(settings) + 1):
        together = {key: value for _, change in settings[:count] for key, value in change.items()}
        yield ", ".join(what for what, _ in settings[:count]), replace(base, **together)


def _parallelism(base: Deployment) -> Iterator[tuple[str, Deployment]]:
    """The same inference GPUs, used otherwise."""
    if not base.expert_parallel:
        yield "inference.expert_parallel=true", replace(base, expert_parallel=True)
    for ways in TENSOR_PARALLEL:
        if base.ranks_per_replica % ways == 0 and ways != base.tensor_parallel:
            data = base.ranks_per_replica // ways
            yield (
                f"inference.tensor_parallel={ways}, inference.data_parallel={data}: same GPUs",
                replace(base, tensor_parallel=ways, data_parallel=data),
            )


def _first_larger(planner: Planner, deployment: Deployment, gpu: Gpu) -> Change | None:
    for other in larger_than(gpu):
        outcome = judge(planner, deployment, other.usable_bytes)
        if outcome.fits:
            classes = ", ".join(more.name for more in larger_than(other))
            also = f" (or {classes})" if classes else ""
            return Change(f"GPUs of class {other.name}{also}, same settings", _spare(outcome))
    return None


def _first_grown(
    planner: Planner, deployment: Deployment, gpu: Gpu, verdict: Verdict
) -> Change | None:
    grow_trainers = not verdict.trainer.fits
    grow_inference = not (verdict.inference.fits and verdict.utilization.fits)
    factor = 2
    while factor <= MAX_GROWTH:
        changed = deployment
        parts = []
        if grow_trainers:
            changed = replace(changed, num_trainers=deployment.num_trainers * factor)
            parts.append(f"{changed.num_trainers} trainer ranks")
        if grow_inference:
            changed = replace(changed, data_parallel=deployment.data_parallel * factor)
            parts.append(f"{changed.num_consumers} inference ranks ({changed.parallelism})")
        outcome = judge(planner, changed, gpu.usable_bytes)
        if outcome.fits:
            return Change(f"{' and '.join(parts)} of {gpu.name}", _spare(outcome))
        factor *= 2
    return None


def _spare(verdict: Verdict) -> int:
    return min(verdict.trainer.spare_bytes, verdict.inference.spare_bytes)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.2f} MB"

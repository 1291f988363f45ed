"""The plan of one deployment: everything `rdt-e2e plan` says, as values."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.sizing.advice import Change, fitting_changes, lookahead_advice, ring_advice
from rdt_e2e.sizing.blocks import BrokenCut, refused_cuts, straddled_blocks
from rdt_e2e.sizing.chunks import Chunk, Planner
from rdt_e2e.sizing.memory import MemoryPrediction, gathered_bytes, kv_bytes_per_token, predict
from rdt_e2e.sizing.times import SyncTimes, sync_times
from rdt_e2e.sizing.totals import (
    ConsumerTotal,
    GroupTotal,
    KindTotal,
    TrainerTotal,
    consumer_totals,
    group_totals,
    kind_totals,
    trainer_totals,
)
from rdt_e2e.sizing.verdict import Ledger, Verdict, judge

if TYPE_CHECKING:
    from rdt_e2e.checkpoint.index import CheckpointIndex
    from rdt_e2e.sizing.deployment import Deployment
    from rdt_e2e.sizing.gpus import Gpu


@dataclass(frozen=True)
class ModelFacts:
    """The checkpoint.

    Attributes:
        name: What the user called it.
        origin: Where its tensors were read from.
        num_tensors: Tensors to sync.
        num_bytes: Their size in bytes.
        kinds: The same by kind.
        left_out: Reasons for which tensors are not synced, with how many each.
    """

    name: str
    origin: str
    num_tensors: int
    num_bytes: int
    kinds: tuple[KindTotal, ...]
    left_out: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """The whole plan.

    Attributes:
        model: The checkpoint.
        deployment: Both fleets.
        gpu: GPU class of both sides.
        nic_gbps: Rate of the one NIC of each GPU, in Gbit/s.
        groups: Gather groups in order.
        trainers: Trainer ranks.
        consumers: Inference ranks.
        chunks: Pulls of each inference rank, in order.
        memory: Exact memory of every rank.
        verdict: The fullest rank of each side against the GPU.
        changes: When it does not fit, changes under which it does; the smallest first.
        times: Seconds on each clock.
        advice: Ring depth and lookahead.
        refused: Cuts with which the engine does not start, bake or load.
        kv_bytes_per_token: KV cache of one token on one inference rank.
        straddled: Blocks that lie on two trainer ranks.
    """

    model: ModelFacts
    deployment: Deployment
    gpu: Gpu
    nic_gbps: float
    groups: tuple[GroupTotal, ...]
    trainers: tuple[TrainerTotal, ...]
    consumers: tuple[ConsumerTotal, ...]
    chunks: tuple[tuple[Chunk, ...], ...]
    memory: MemoryPrediction
    verdict: Verdict
    changes: tuple[Change, ...]
    times: SyncTimes
    advice: tuple[str, ...]
    refused: tuple[BrokenCut, ...]
    kv_bytes_per_token: int
    straddled: tuple[BrokenCut, ...]

    @property
    def fits(self) -> bool:
        """Whether memory suffices and the engine accepts the parallelism."""
        return self.verdict.fits and not self.refused


def make_plan(
    name: str,
    origin: str,
    index: CheckpointIndex,
    deployment: Deployment,
    gpu: Gpu,
    nic_gbps: float,
    planner: Planner | None = None,
) -> Plan:
    """Work out a plan.

    Args:
        name: What the user called the model.
        origin: Where its tensors were read from.
        index: The checkpoint.
        deployment: Both fleets.
        gpu: GPU class of both sides.
        nic_gbps: Rate of the one NIC of each GPU, in Gbit/s.
        planner: Plans of this checkpoint, where some were made already.

    Raises:
        CheckpointError: The checkpoint cannot be laid out.
    """
    if planner is None:
        planner = Planner(build_layout(index), index.config)
    layout = planner.layout
    consumers = planner.consumers(deployment)
    memory = predict(layout, deployment, consumers)
    verdict = judge(planner, deployment, gpu.usable_bytes)
    refused = refused_cuts(layout, index.config, deployment)
    changes: tuple[Change, ...] = ()
    if refused or not verdict.fits:
        changes = fitting_changes(planner, deployment, gpu, verdict)
    registered = max(
        *(trainer.serve_ring_bytes for trainer in memory.trainers),
        *(rank.receive_ring_bytes for rank in memory.inference),
    )
    gathered = gathered_bytes(layout, deployment)
    times = sync_times(consumers, deployment, nic_gbps, gathered, registered)
    lookahead = lookahead_advice(layout, deployment, consumers, times.nic_bytes_per_s)
    return Plan(
        model=ModelFacts(
            name,
            origin,
            len(layout.names),
            index.num_bytes,
            kind_totals(layout),
            dict(Counter(index.excluded.values())),
        ),
        deployment=deployment,
        gpu=gpu,
        nic_gbps=nic_gbps,
        groups=group_totals(layout, deployment),
        trainers=trainer_totals(layout, deployment, consumers),
        consumers=consumer_totals(consumers),
        chunks=tuple(plan.chunks for plan in consumers),
        memory=memory,
        verdict=verdict,
        changes=changes,
        times=times,
        advice=(*ring_advice(consumers, deployment), lookahead),
        refused=refused,
        kv_bytes_per_token=kv_bytes_per_token(index.config, deployment),
        straddled=straddled_blocks(layout, index.config, deployment),
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values: every field, and what the verdict comes to.

    Sizes are in bytes and times in seconds.
    """
    content = asdict(plan)
    content["fits"] = plan.fits
    verdict = plan.verdict
    content["verdict"] = {
        "fits": verdict.fits,
        "trainer": _ledger(verdict.trainer),
        "inference": _ledger(verdict.inference),
        "gpu_memory_utilization": {
            "least": verdict.utilization.least,
            "most": verdict.utilization.most,
            "chosen": verdict.utilization.chosen,
            "fits": verdict.utilization.fits,
        },
    }
    return content


def _ledger(ledger: Ledger) -> dict[str, Any]:
    content = asdict(ledger)
    content["needed_bytes"] = ledger.needed_bytes
    content["spare_bytes"] = ledger.spare_bytes
    content["fits"] = ledger.fits
    return content

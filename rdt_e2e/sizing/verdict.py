"""Does it fit: both sides' memory against one GPU class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rdt_e2e.sizing.memory import MemoryItem, inference_items, predict, trainer_items

if TYPE_CHECKING:
    from rdt_e2e.sizing.chunks import Planner
    from rdt_e2e.sizing.deployment import Deployment

OUTSIDE_UTILIZATION = ("largest group in reload", "receive ring")
"""Items that vLLM does not count when it sizes its KV cache: they come on top of its share."""


@dataclass(frozen=True)
class Ledger:
    """The fullest rank of one side against a GPU.

    Attributes:
        side: `trainer` or `inference`.
        rank: The fullest rank.
        items: Its memory, line by line.
        usable_bytes: What the GPU gives.
    """

    side: str
    rank: int
    items: tuple[MemoryItem, ...]
    usable_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Sum of all lines."""
        return sum(item.num_bytes for item in self.items)

    @property
    def spare_bytes(self) -> int:
        """What is left; negative when it does not fit."""
        return self.usable_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        """Whether all lines go into the GPU."""
        return self.spare_bytes >= 0


@dataclass(frozen=True)
class Utilization:
    """Bounds on vLLM's `gpu_memory_utilization`.

    Attributes:
        least: Below it the weights and the least KV cache find no place.
        most: Above it the KV cache takes what rings and reload need.
        chosen: What is configured, or none.
    """

    least: float
    most: float
    chosen: float | None

    @property
    def fits(self) -> bool:
        """Whether the configured value, or any at all, is within the bounds."""
        if self.chosen is None:
            return self.least <= self.most
        return self.least <= self.chosen <= self.most

    @property
    def advised(self) -> float:
        """A value inside the bounds when there is one, rounded down to hundredths where possible."""
        rounded = int(self.most * 100) / 100
        return rounded if rounded >= self.least else round(self.most, 4)


@dataclass(frozen=True)
class Verdict:
    """Both sides of one deployment on one GPU class.

    Attributes:
        trainer: The fullest trainer rank.
        inference: The fullest inference rank.
        utilization: Bounds on vLLM's share of the GPU.
    """

    trainer: Ledger
    inference: Ledger
    utilization: Utilization

    @property
    def fits(self) -> bool:
        """Whether the sync can run."""
        return self.trainer.fits and self.inference.fits and self.utilization.fits


def judge(planner: Planner, deployment: Deployment, usable_bytes: int) -> Verdict:
    """Compare the memory of both sides with a GPU.

    Args:
        planner: Plans of the checkpoint.
        deployment: Both fleets.
        usable_bytes: What the GPU gives to a process.
    """
    consumers = planner.consumers(deployment)
    prediction = predict(planner.layout, deployment, consumers)
    trainers = [
        Ledger("trainer", memory.rank, trainer_items(memory, deployment), usable_bytes)
        for memory in prediction.trainers
    ]
    inference = [
        Ledger(
            "inference",
            memory.rank,
            inference_items(plan, memory, planner.config, deployment),
            usable_bytes,
        )
        for plan, memory in zip(consumers, prediction.inference, strict=True)
    ]
    fullest = max(inference, key=lambda ledger: ledger.needed_bytes)
    outside = sum(item.num_bytes for item in fullest.items if item.name in OUTSIDE_UTILIZATION)
    bounds = Utilization(
        (fullest.needed_bytes - outside) / usable_bytes,
        1 - outside / usable_bytes,
        deployment.gpu_memory_utilization,
    )
    return Verdict(max(trainers, key=lambda ledger: ledger.needed_bytes), fullest, bounds)

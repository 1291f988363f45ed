"""What each consumer pulls: slices, packed into chunks, each from one trainer rank.

The rules are those of the engine's planner and of its packed layout, so that the bytes come out the
same to the byte: one chunk for each gather group and owner class, slices in the order in which the
engine's loader copies them, each at the next 16-byte boundary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rdt_e2e.checkpoint.described import ITEM_BYTES
from rdt_e2e.checkpoint.owners import assign_owners
from rdt_e2e.sizing.routing import Router
from rdt_e2e.sizing.splits import cutter_for, leaf_module

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from rdt_e2e.checkpoint.headers import TensorEntry
    from rdt_e2e.checkpoint.layout import CheckpointLayout, HeldTensor
    from rdt_e2e.sizing.deployment import Deployment
    from rdt_e2e.sizing.splits import Cutter

ALIGNMENT_BYTES = 16


class Slice(NamedTuple):
    """The part of one tensor that a consumer pulls.

    Attributes:
        name: Checkpoint name.
        shape: Shape of the part.
        dtype: Torch name of the dtype.
        module: The engine's module it goes into.
        num_bytes: Size of the part in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    module: str
    num_bytes: int


@dataclass(frozen=True)
class Chunk:
    """One pull.

    Attributes:
        group: Gather group.
        owner_class: Row of the owner table that its names share.
        producer: Trainer rank that serves it.
        seq: Its number among this consumer's pulls from that rank; selects the slot.
        num_slices: Slices in it, or pieces of one.
        num_bytes: Length of the packed blob in bytes.
    """

    group: int
    owner_class: int
    producer: int
    seq: int
    num_slices: int
    num_bytes: int


@dataclass(frozen=True)
class ConsumerPlan:
    """All that one inference rank pulls in a sync.

    Attributes:
        consumer: Inference rank over the whole fleet.
        slices: Slices by gather group, in the engine's order.
        chunks: Pulls in order.
    """

    consumer: int
    slices: tuple[tuple[Slice, ...], ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes over the wire to this rank in one sync."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def largest_chunk_bytes(self) -> int:
        """Size of the largest pull in bytes; 0 without any."""
        return max((chunk.num_bytes for chunk in self.chunks), default=0)

    def largest_from(self, producer: int) -> int:
        """Size of the largest pull from one trainer rank in bytes; 0 without any."""
        return max((c.num_bytes for c in self.chunks if c.producer == producer), default=0)


def packed_end(end: int, num_bytes: int) -> int:
    """End of a blob of `end` bytes after one more slice.

    Source: the packed layout of `sharded_rdt_engine.py` (vLLM 0.32.0), and `trainer/packing.py`.
    """
    return -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + num_bytes


def consumer_slices(
    layout: CheckpointLayout, config: Mapping[str, Any], deployment: Deployment, consumer: int
) -> tuple[tuple[Slice, ...], ...]:
    """Work out the slices of one consumer.

    Args:
        layout: The served checkpoint.
        config: The content of its `config.json`.
        deployment: Both fleets.
        consumer: Inference rank over the whole fleet.

    Returns:
        Slices by gather group. Inside a group they are module by module, modules in the order of
        their first name: the engine records a module's copies together.

    Source: `_bake` and `_build_call_plan` of `sharded_rdt_engine.py` (vLLM 0.32.0).
    """
    cutter = cutter_for(config, deployment, consumer)
    experts = cutter.experts()
    # Rows of a stack are alike, so each held tensor is looked at once.
    parts = {key: _part(held, layout.entries, cutter) for key, held in layout.held.items()}
    groups: list[tuple[Slice, ...]] = []
    for group in layout.groups:
        modules: dict[str, list[Slice]] = {}
        stacks: dict[str, list[tuple[Slice, tuple[str, ...]]]] = {}
        for key in group.keys:
            part = parts[key]
            if part is None:
                continue
            own = modules.setdefault(part.module, [])
            if layout.held[key].stacked:
                stacks.setdefault(part.module, []).append((part, layout.held[key].names))
            else:
                own.append(part)
        for module, held in stacks.items():
            # Names are in natural order: expert by expert, and inside it key by key.
            modules[module] += [
                Slice(names[row], *part[1:]) for row in experts for part, names in held
            ]
        groups.append(tuple(part for module in modules.values() for part in module))
    return tuple(groups)


def plan_consumer(
    consumer: int,
    slices: tuple[tuple[Slice, ...], ...],
    router: Router,
    max_chunk_bytes: int | None = None,
) -> ConsumerPlan:
    """Pack the slices of one consumer into pulls.

    Args:
        consumer: Inference rank over the whole fleet.
        slices: From `consumer_slices`.
        router: Who serves what.
        max_chunk_bytes: Limit on one pull; a chunk is cut where the next slice would exceed it, and a
            slice above the limit between its rows. None leaves chunks whole.

    Source: `_chunk_module_scatters` and `_build_call_plan` of `sharded_rdt_engine.py` (vLLM 0.32.0); for
    the limit `split_scatters` in `inference/plugin/chunk_split.py`.
    """
    class_of = router.owners.class_of
    chunks: list[Chunk] = []
    next_seq: dict[int, int] = {}
    for group, parts in enumerate(slices):
        by_class: dict[int, list[Slice]] = {}
        for part in parts:
            by_class.setdefault(class_of[part.name], []).append(part)
        for owner_class in sorted(by_class):
            producer = router.producer(consumer, owner_class, group)
            for num_slices, num_bytes in _cut(by_class[owner_class], max_chunk_bytes):
                seq = next_seq.get(producer, 0)
                next_seq[producer] = seq + 1
                chunks.append(Chunk(group, owner_class, producer, seq, num_slices, num_bytes))
    return ConsumerPlan(consumer, slices, tuple(chunks))


class Planner:
    """Plans the consumers of a checkpoint for any number of deployments.

    Deployments that differ only in what does not change a pull (slots, presize, lookahead) share their
    plans.

    Args:
        layout: The served checkpoint.
        config: The content of its `config.json`.
    """

    def __init__(self, layout: CheckpointLayout, config: Mapping[str, Any]) -> None:
        self.layout = layout
        self.config = config
        self._plans: dict[tuple[Any, ...], tuple[ConsumerPlan, ...]] = {}

    def consumers(self, deployment: Deployment) -> tuple[ConsumerPlan, ...]:
        """Plan every consumer of a deployment; one plan for each inference rank, by rank."""
        key = (
            deployment.num_trainers,
            deployment.data_parallel,
            deployment.tensor_parallel,
            deployment.expert_parallel,
            deployment.num_replicas,
            deployment.gather,
            deployment.max_chunk_bytes,
        )
        if key not in self._plans:
            self._plans[key] = self._plan(deployment)
        return self._plans[key]

    def _plan(self, deployment: Deployment) -> tuple[ConsumerPlan, ...]:
        owners = assign_owners(self.layout, deployment.num_trainers, deployment.gather)
        router = Router(owners, deployment.ranks_per_replica)
        known: dict[tuple[int, range], tuple[tuple[Slice, ...], ...]] = {}
        plans = []
        for consumer in range(deployment.num_consumers):
            cutter = cutter_for(self.config, deployment, consumer)
            # Nothing else tells two consumers apart.
            same = (cutter.tensor_rank, cutter.experts())
            if same not in known:
                known[same] = consumer_slices(self.layout, self.config, deployment, consumer)
            plans.append(plan_consumer(consumer, known[same], router, deployment.max_chunk_bytes))
        return tuple(plans)


def _part(held: HeldTensor, entries: Mapping[str, TensorEntry], cutter: Cutter) -> Slice | None:
    """The slice of one name of a held tensor; `None` when the consumer takes nothing of it."""
    entry = entries[held.names[0]]
    shape = cutter.part(entry.name, entry.shape)
    if shape is None:
        return None
    module = leaf_module(entry.name, latent=cutter.latent)
    num_bytes = math.prod(shape) * ITEM_BYTES[entry.dtype]
    return Slice(entry.name, shape, entry.dtype, module, num_bytes)


def _cut(parts: Iterable[Slice], limit: int | None) -> Iterator[tuple[int, int]]:
    """Slice count and packed length of each pull."""
    count = end = 0
    for part in parts:
        for size in (part.num_bytes,) if limit is None else _pieces(part, limit):
            grown = packed_end(end, size)
            if limit is not None and count and grown > limit:
                yield count, end
                count, grown = 0, size
            count, end = count + 1, grown
    if count:
        yield count, end


def _pieces(part: Slice, limit: int) -> Iterator[int]:
    """Sizes into which a slice above the limit is cut, by rows; a single row stays whole."""
    if part.num_bytes <= limit or not part.shape:
        yield part.num_bytes
        return
    rows = part.shape[0]
    row_bytes = part.num_bytes // rows
    step = max(1, limit // row_bytes)
    for start in range(0, rows, step):
        yield min(step, rows - start) * row_bytes

"""How a trainer holds a checkpoint: fused expert stacks, gather groups, rows per rank.

Pure arithmetic on an index: no files, no device, no Ray. The layout depends only on the names,
dtypes and shapes, not on the order of the index or on which shard holds what, so that two versions
of a checkpoint always have the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rdt_e2e.checkpoint.naming import (
    is_before_layers,
    natural_key,
    split_expert,
    split_layer,
    summarize,
)
from rdt_e2e.errors import CheckpointError, MissingTensorError, PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdt_e2e.checkpoint.index import CheckpointIndex, TensorEntry

BEFORE_LAYERS = "before layers"
AFTER_LAYERS = "after layers"


@dataclass(frozen=True)
class HeldTensor:
    """One tensor as the trainer holds it, sharded on dim 0: a stack of experts, or a single name.

    Attributes:
        key: Identity of the held tensor: the checkpoint name, or for a stack the name with `*` in
            place of the expert (`model.layers.3.mlp.experts.*.gate_proj.weight`).
        dtype: Torch name of the dtype, such as `float8_e4m3fn`; the checkpoint's own.
        shape: Shape as held: `[E, ...]` for a stack, `[1]` for a 0-d tensor.
        names: Checkpoint names served from it; row `e` of a stack is `names[e]`.
        stacked: True for a stack of experts; then each name is one row of dim 0.
        num_bytes: Size of the whole tensor in bytes.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: bool
    num_bytes: int


@dataclass(frozen=True)
class GatherGroup:
    """Tensors that are gathered, pulled and freed together.

    Attributes:
        index: Position of the group; every rank gathers in this order.
        label: `before layers`, `layers.<n>` or `after layers`.
        names: Checkpoint names of the group, in serving order.
        keys: Held tensors of the group, in the order of their first name.
    """

    index: int
    label: str
    names: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointLayout:
    """Everything the trainer holds and serves, without any bytes.

    Attributes:
        held: Held tensors by key, group by group.
        groups: Gather groups in order; none is empty.
        locate: For each name, its key and its row in a stack (`None` when the name is the whole).
        names: Every served name, group by group.
        entries: The checkpoint's own dtype and shape for each name, in the order of `names`. A 0-d
            tensor has shape `()` here although it is held as `[1]`.
    """

    held: Mapping[str, HeldTensor]
    groups: tuple[GatherGroup, ...]
    locate: Mapping[str, tuple[str, int | None]]
    names: tuple[str, ...]
    entries: Mapping[str, TensorEntry]


def build_layout(index: CheckpointIndex) -> CheckpointLayout:
    """Arrange the tensors of a checkpoint into held tensors and gather groups.

    Groups: the input embedding, one per decoder layer in numeric order, then everything else (final
    norm and output head). All names of a leaf module fall into one group, as the consumer's plan
    requires. Inside a group names are in natural order: numbers in a name count as numbers.

    Args:
        index: Index of a checkpoint, usually from `read_index`.

    Returns:
        The layout; every name of the index is in exactly one group and one held tensor.

    Raises:
        MissingTensorError: The expert numbers of a stack have a hole.
        CheckpointError: Experts of a stack differ in dtype or shape, or there is more than one list
            of layers.

    Source: the `sharded_rdt` consumer of vLLM 0.32.0 takes any partition that keeps leaf modules
    whole (`vllm/distributed/weight_transfer/sharded_rdt_engine.py`).
    """
    stacks = collect_stacks(index)
    rows = {name: (key, row) for key, stack in stacks.items() for row, name in enumerate(stack)}
    held: dict[str, HeldTensor] = {}
    locate: dict[str, tuple[str, int | None]] = {}
    groups: list[GatherGroup] = []
    for label, names in _names_by_group(index.entries):
        keys: dict[str, None] = {}
        for name in names:
            locate[name] = rows.get(name, (name, None))
            keys[locate[name][0]] = None
        for key in keys:
            held[key] = _hold(key, stacks.get(key), index.entries)
        groups.append(GatherGroup(len(groups), label, names, tuple(keys)))
    ordered = tuple(name for group in groups for name in group.names)
    entries = {name: index.entries[name] for name in ordered}
    return CheckpointLayout(held, tuple(groups), locate, ordered, entries)


def collect_stacks(index: CheckpointIndex) -> dict[str, tuple[str, ...]]:
    """Collect the routed experts of a checkpoint into stacks.

    Args:
        index: Index of a checkpoint.

    Returns:
        For each stack key its names; position `e` is expert `e`.

    Raises:
        MissingTensorError: The expert numbers of a stack have a hole.
        CheckpointError: Experts of a stack differ in dtype or shape.
    """
    rows: dict[str, dict[int, str]] = {}
    for name in index.entries:
        expert = split_expert(name)
        if expert is not None:
            key, number = expert
            rows.setdefault(key, {})[number] = name
    return {key: _check_stack(index, key, numbered) for key, numbered in rows.items()}


def shard_rows(num_rows: int, world: int, rank: int) -> tuple[int, int]:
    """Rows of dim 0 that one rank holds, by the uneven chunk rule of FSDP2.

    Chunks are `ceil(num_rows / world)` rows; the last ranks may hold fewer rows or none.

    Args:
        num_rows: Size of dim 0, at least 0.
        world: Number of trainer ranks, at least 1.
        rank: Trainer rank, 0 to `world - 1`.

    Returns:
        First row and the row after the last; equal when the rank holds nothing.

    Raises:
        PlanError: A count is negative or the rank is not one of `world`.

    Source: `torch.chunk`, and `Shard` on dim 0 in `torch/distributed/tensor` (torch 2.13).
    """
    if num_rows < 0 or not 0 <= rank < world:
        raise PlanError(
            f"cannot shard {num_rows} rows for rank {rank} of {world}. Rows must be at least 0 and "
            "the rank between 0 and the number of ranks; check trainer.num_ranks."
        )
    chunk = -(-num_rows // world)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


def _names_by_group(entries: Mapping[str, TensorEntry]) -> list[tuple[str, tuple[str, ...]]]:
    before: list[str] = []
    after: list[str] = []
    layers: dict[int, list[str]] = {}
    stems: dict[str, str] = {}
    for name in entries:
        split = split_layer(name)
        if split is None:
            (before if is_before_layers(name) else after).append(name)
            continue
        stem, layer, _ = split
        stems.setdefault(stem, name)
        layers.setdefault(layer, []).append(name)
    if len(stems) > 1:
        examples = " and ".join(stems.values())
        raise CheckpointError(
            f"{len(stems)} lists of layers in one checkpoint, for example {examples}. Only a text "
            "decoder with one list of layers is supported; export that part on its own."
        )
    groups = [(BEFORE_LAYERS, before)]
    groups += [(f"layers.{layer}", layers[layer]) for layer in sorted(layers)]
    groups.append((AFTER_LAYERS, after))
    return [(label, tuple(sorted(names, key=natural_key))) for label, names in groups if names]


def _check_stack(index: CheckpointIndex, key: str, numbered: Mapping[int, str]) -> tuple[str, ...]:
    first = index.entries[next(iter(numbered.values()))]
    missing = sorted(set(range(max(numbered) + 1)) - set(numbered))
    if missing:
        raise MissingTensorError(
            f"{index.root}: {key} has experts up to {max(numbered)} but not "
            f"{summarize(missing)}. Export the checkpoint again with every expert from 0 on."
        )
    for number, name in numbered.items():
        entry = index.entries[name]
        if (entry.dtype, entry.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{entry.file}: {name} (expert {number}) is {entry.dtype} {list(entry.shape)}, but "
                f"{first.name} is {first.dtype} {list(first.shape)}. All experts of a layer must "
                "be alike; export the checkpoint again."
            )
    return tuple(numbered[number] for number in range(len(numbered)))


def _hold(
    key: str, stack: tuple[str, ...] | None, entries: Mapping[str, TensorEntry]
) -> HeldTensor:
    if stack is None:
        entry = entries[key]
        shape = entry.shape or (1,)
        return HeldTensor(key, entry.dtype, shape, (key,), stacked=False, num_bytes=entry.num_bytes)
    entry = entries[stack[0]]
    shape = (len(stack), *entry.shape)
    num_bytes = len(stack) * entry.num_bytes
    return HeldTensor(key, entry.dtype, shape, stack, stacked=True, num_bytes=num_bytes)

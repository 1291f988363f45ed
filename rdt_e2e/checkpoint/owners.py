"""Which trainer ranks serve which name, and what is left to gather. Pure.

`gather: owner`: fused expert stacks are sharded on dim 0, so each rank holds whole experts. Their
names are owned by that rank and served from its shard; only the rest is gathered, and then held by
every rank. `gather: full`: every rank gathers, and so owns, everything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rdt_e2e.checkpoint.layout import CheckpointLayout, GatherGroup, shard_rows

Gather = Literal["owner", "full"]


@dataclass(frozen=True)
class OwnerTables:
    """The owner tables of the wire contract.

    Attributes:
        owner_sets: Distinct sets of trainer ranks, each sorted; row 0 is every rank.
        class_of: For each name, in the layout's order, its row in `owner_sets`.
    """

    owner_sets: tuple[tuple[int, ...], ...]
    class_of: Mapping[str, int]


def assign_owners(layout: CheckpointLayout, num_ranks: int, gather: Gather) -> OwnerTables:
    """Decide who serves each name.

    Args:
        layout: The served checkpoint.
        num_ranks: Trainer ranks.
        gather: Whether routed experts stay with their rank.

    Returns:
        The tables; a rank that holds no expert has no row of its own.

    Source: `RdtRouter` in `vllm/distributed/weight_transfer/sharded_rdt_common.py` (0.32.0), which
    reads the same tables on the consumer.
    """
    owner_sets = [tuple(range(num_ranks))]
    row_of_rank: dict[int, int] = {}
    class_of = dict.fromkeys(layout.names, 0)
    if gather == "owner" and num_ranks > 1:
        for held in layout.held.values():
            if not held.stacked:
                continue
            for rank in range(num_ranks):
                start, stop = shard_rows(len(held.names), num_ranks, rank)
                if start == stop:
                    continue
                if rank not in row_of_rank:
                    row_of_rank[rank] = len(owner_sets)
                    owner_sets.append((rank,))
                class_of |= dict.fromkeys(held.names[start:stop], row_of_rank[rank])
    return OwnerTables(tuple(owner_sets), class_of)


def gathered_groups(layout: CheckpointLayout, gather: Gather) -> tuple[GatherGroup, ...]:
    """The gather groups, reduced to what has to be gathered.

    Args:
        layout: The served checkpoint.
        gather: Whether routed experts stay with their rank.

    Returns:
        One group for each of the layout's, at the same index; it may be empty.
    """
    if gather == "full":
        return layout.groups

    def is_gathered(key: str) -> bool:
        return not layout.held[key].stacked

    return tuple(
        replace(
            group,
            names=tuple(name for name in group.names if is_gathered(layout.locate[name][0])),
            keys=tuple(key for key in group.keys if is_gathered(key)),
        )
        for group in layout.groups
    )


def largest_pull_bytes(layout: CheckpointLayout) -> int:
    """A bound on the bytes of any one pull: twice the largest group, alignment included.

    A pull stays within one group, and a loader asks for a slice once, or once for each of two
    parameters that share it.
    """
    return 2 * max(
        sum(layout.held[key].num_bytes for key in group.keys) + 16 * len(group.names)
        for group in layout.groups
    )

"""Which trainer rank each consumer pulls a name from: the rule of vLLM's router, on its own tables."""

from dataclasses import dataclass

from rdt_e2e.checkpoint.owners import OwnerTables


def block(num_owners: int, num_consumers: int, consumer: int) -> range:
    """Positions in an owner set that one consumer pulls from.

    Args:
        num_owners: Size of the owner set.
        num_consumers: Consumers it is shared among.
        consumer: One of them.

    Returns:
        With at least as many owners as consumers a block of its own, else one shared position.

    Source: `assign_producer_indices` in `sharded_rdt_common.py` (vLLM 0.32.0).
    """
    start = consumer * num_owners // num_consumers
    if num_owners >= num_consumers:
        return range(start, (consumer + 1) * num_owners // num_consumers)
    return range(start, start + 1)


@dataclass(frozen=True)
class Router:
    """The routing of one fleet of consumers.

    Attributes:
        owners: Who holds each name.
        ranks_per_replica: Inference ranks of one engine. Owners are shared out among these, and
            every engine is served alike.
    """

    owners: OwnerTables
    ranks_per_replica: int

    def producer(self, consumer: int, owner_class: int, group: int) -> int:
        """Trainer rank that serves a chunk.

        Args:
            consumer: Who pulls.
            owner_class: Row of the owner table that all names of the chunk share.
            group: Gather group of the chunk; a consumer rotates over its block by group.

        Source: `RdtRouter.producer_for` in `sharded_rdt_common.py` (vLLM 0.32.0).
        """
        ranks = self.owners.owner_sets[owner_class]
        positions = block(len(ranks), self.ranks_per_replica, consumer % self.ranks_per_replica)
        return ranks[positions[group % len(positions)]]

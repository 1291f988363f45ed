"""How far a sync is, as one trainer rank sees it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncProgress:
    """One rank's part of a sync that is under way.

    Attributes:
        num_done: Groups that every consumer is done with.
        num_groups: Groups of the sync.
        num_bytes: Bytes packed so far.
        elapsed_s: Since this rank began to gather.
    """

    num_done: int
    num_groups: int
    num_bytes: int
    elapsed_s: float

"""What is the same about a pull in every sync: its keys, its places, and where its bytes go.

A consumer repeats the same pulls sync after sync. Checking 300 keys, replaying their chains and making
the views takes longer than copying the bytes, so a producer keeps what does not change.
"""

from collections.abc import Mapping, Sequence

import torch

from rdt_e2e.errors import SyncError
from rdt_e2e.trainer.packing import CopyList, PackedSlice, Source, lay_out, source
from rdt_e2e.trainer.replay import FetchKey, OpSpec, check_key, replay


class ServePlan:
    """One pull of one consumer, checked.

    Attributes:
        keys: What was asked for, as it arrived; a pull that asks for anything else needs a new plan.
        wanted: The same, checked.
        gathered: Names that have to be published first.
    """

    def __init__(self, keys: object, owned: Mapping[str, torch.Tensor], who: str) -> None:
        """Check a pull.

        Args:
            keys: What arrived.
            owned: Names served from the shard, the same tensors in every sync.
            who: Who asks, for the message.

        Raises:
            SyncError: A key is malformed or asks for what is not allowed.
        """
        if not isinstance(keys, list | tuple) or not keys:
            raise SyncError(f"{who}: a pull of no names ({type(keys).__name__})")
        self.keys = keys
        self.wanted: list[FetchKey] = [check_key(key) for key in keys]
        self.gathered = [name for name, _ in self.wanted if name not in owned]
        self._owned = owned
        self._fixed: dict[int, Source] = {}
        self._places: list[PackedSlice] = []
        self._num_bytes = 0
        self._copies: CopyList | None = None

    def replay(
        self, published: Mapping[str, torch.Tensor], slot_bytes: int
    ) -> tuple[list[Source], int]:
        """Make the slices.

        Args:
            published: The gathered names.
            slot_bytes: What the slot holds.

        Returns:
            The slices, and the length of their blob in bytes.

        Raises:
            SyncError: A chain does not fit its tensor, or the slices do not fit the slot.
        """
        slices: list[Source] = []
        total = 0
        for index, (name, chain) in enumerate(self.wanted):
            if name in self._owned:
                found = self._from_shard(index, name, chain)
            else:
                found = source(replay(name, published[name], chain))
            slices.append(found)
            total += found.piece.nbytes
            if total > slot_bytes:
                raise SyncError(
                    f"a pull of {len(self.wanted)} slices does not fit its slot of {slot_bytes} "
                    "bytes; the consumer's plan and its reservation differ"
                )
        if not self._places:
            self._places, self._num_bytes = lay_out([one.piece for one in slices])
        return slices, self._num_bytes

    def prepare(self) -> None:
        """Make the slices that are served from the shard, so that the first sync finds them made.

        Raises:
            SyncError: A chain does not fit its tensor.
        """
        for index, (name, chain) in enumerate(self.wanted):
            if name in self._owned:
                self._from_shard(index, name, chain)

    def _from_shard(self, index: int, name: str, chain: tuple[OpSpec, ...]) -> Source:
        found = self._fixed.get(index)
        if found is None:
            whole = self._owned[name]
            found = source(replay(name, whole, chain))
            if _is_view(found.piece, whole):
                self._fixed[index] = found
        return found

    def pack(self, slices: Sequence[Source], slot: torch.Tensor) -> None:
        """Copy the slices of `replay` into a slot, which is the same one in every sync."""
        if self._copies is None:
            self._copies = CopyList(self._places, slot)
        self._copies.fill(slices)


def _is_view(piece: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a slice shows what its tensor holds, also after that changes; some chains copy."""
    return piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()

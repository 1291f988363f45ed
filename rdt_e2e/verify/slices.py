"""Per-name check for models too large to load twice: every slice received, against the checkpoint.

One tensor is in memory at a time. It proves what arrived in the receive slots and that no name of the
checkpoint was left out; what the engine made of it afterwards is for the fingerprints to prove.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from rdt_e2e.checkpoint.index import CheckpointIndex
from rdt_e2e.checkpoint.naming import summarize
from rdt_e2e.checkpoint.stream import ShardReader
from rdt_e2e.errors import WeightMismatchError
from rdt_e2e.fabric.checksum import checksum
from rdt_e2e.fabric.words import as_bytes
from rdt_e2e.trainer.replay import FetchKey, check_key, replay
from rdt_e2e.verify.weights import MISMATCH_MARK


def check_slices(
    landed: Mapping[Any, int], synced_names: Collection[str], index: CheckpointIndex, who: str
) -> int:
    """Compare the checksum of every landed slice with the same slice of the checkpoint.

    Args:
        landed: Checksum by (name, op chain), of everything this rank received in one sync.
        synced_names: Names this rank was told of at init.
        index: The checkpoint.
        who: For the message, such as "inference rank 1".

    Returns:
        Number of slices compared.

    Raises:
        WeightMismatchError: A name of the checkpoint is not synced, or a slice differs.
        CheckpointError: The checkpoint cannot be read.
    """
    skipped = [name for name in index.entries if name not in synced_names]
    if skipped:
        raise WeightMismatchError(
            f"{who}: {len(skipped)} of {len(index.entries)} names {MISMATCH_MARK}: they are not "
            f"synced: {summarize(skipped)}"
        )
    by_name: dict[str, list[tuple[FetchKey, int]]] = defaultdict(list)
    for key, total in landed.items():
        by_name[key[0]].append((check_key(key), total))
    with ShardReader(index) as reader:
        for name, slices in by_name.items():
            whole = reader.read_whole(name)
            for (_, chain), total in slices:
                piece = replay(name, whole, chain)
                if int(checksum(as_bytes(piece))) != total:
                    raise WeightMismatchError(
                        f"{who}: bytes of {name}, slice {list(piece.shape)}, {MISMATCH_MARK}"
                    )
    return len(landed)

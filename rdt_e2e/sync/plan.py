"""What the consumers are told at init: names, types, shapes, groups and owners. Pure."""

from collections.abc import Sequence
from typing import Any

from rdt_e2e.checkpoint.layout import CheckpointLayout
from rdt_e2e.checkpoint.owners import assign_owners
from rdt_e2e.config import Config
from rdt_e2e.errors import PlanError


def init_info(
    layout: CheckpointLayout, actor_names: Sequence[str], config: Config, replica: int = 0
) -> dict[str, Any]:
    """Build the init payload of vLLM's `sharded_rdt` engine.

    Args:
        layout: The served checkpoint.
        actor_names: Producers; position is the producer rank.
        config: The run's configuration.
        replica: Which of the independent engines it is for.

    Returns:
        A flat dict of JSON values.

    Raises:
        PlanError: The lists do not agree; the engine would report it only as a missing name.

    Source: `ShardedRDTWeightTransferInitInfo` in `sharded_rdt_engine.py` (vLLM 0.32.0), and
    `ConsumerInitInfo` in `inference/plugin/consumer.py` for the last five.
    """
    names = list(layout.names)
    group_lens = [len(group.names) for group in layout.groups]
    entries = [layout.entries[name] for name in names]
    if sum(group_lens) != len(names) or len(set(names)) != len(names):
        raise PlanError(
            f"{len(names)} names ({len(set(names))} distinct) in groups of {sum(group_lens)}: every "
            "name must be in exactly one gather group"
        )
    owners = assign_owners(layout, config.trainer.num_ranks, config.trainer.gather)
    return {
        "trainer_actor_names": list(actor_names),
        "trainer_actor_namespace": config.cluster.namespace,
        "names": names,
        "dtype_names": [entry.dtype for entry in entries],
        "shapes": [list(entry.shape) for entry in entries],
        "group_lens": group_lens,
        "owner_sets": [list(ranks) for ranks in owners.owner_sets],
        "name_owner_class": [owners.class_of[name] for name in names],
        "num_consumers": config.num_consumers,
        "num_rdt_buffers": config.sync.num_buffers,
        "buffer_presize_gb": config.sync.buffer_presize_gib,
        "replica_rank": replica,
        "num_replicas": config.inference.num_replicas,
        "max_chunk_bytes": config.sync.max_chunk_bytes,
        "wait_timeout_s": config.sync.rdt_fetch_timeout_s,
        "pull_checksums": config.verify.pulls,
        "slice_checksums": config.verify.weights == "names",
        "transport": config.sync.transport,
    }

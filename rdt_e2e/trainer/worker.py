"""One trainer rank: the Ray actor that holds its shard of the checkpoint and serves it."""

import gc
import socket
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util import get_node_ip_address
from torch.distributed.device_mesh import init_device_mesh

from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.config import Config
from rdt_e2e.fabric.agent import start_agent
from rdt_e2e.fabric.pinning import pin_nic
from rdt_e2e.fabric.process import process_figures
from rdt_e2e.trainer.producer import ProducerMixin
from rdt_e2e.trainer.shards import ShardedCheckpoint


class TrainerWorker(ProducerMixin):
    """A trainer rank, started by `fleet.py` as a named actor on one (logical) GPU.

    Order of calls: constructor (builds the NIXL agent), `join` on all ranks at once, `load` on all
    ranks at once; after that the producer serves.
    """

    def __init__(self, config: Config, producer_rank: int) -> None:
        self.config = config
        self.producer_rank = producer_rank
        if config.trainer.device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each actor its own GPU only.
        self.device = torch.device(config.trainer.device)
        # Before the agent exists: UCX reads its devices then, and never again.
        self.nic = pin_nic(self.device)
        self._agent_probe = start_agent(self.device)
        self._identity: str | None = None

    def nic_choice(self) -> dict[str, Any]:
        """Which NIC this rank's agent uses, and why; see `NicChoice`."""
        return asdict(self.nic)

    def node_address(self) -> str:
        """IP address of the node this rank runs on."""
        address: str = get_node_ip_address()
        return address

    def free_port(self) -> int:
        """A TCP port that is free on this node now."""
        with socket.socket() as listener:
            listener.bind((self.node_address(), 0))
            port: int = listener.getsockname()[1]
            return port

    def join(self, address: str, port: int) -> None:
        """Enter the trainer's process group; returns when all ranks have.

        Args:
            address: Address of rank 0's node.
            port: A free port there.
        """
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}:{port}",
            rank=self.producer_rank,
            world_size=self.config.trainer.num_ranks,
            timeout=timedelta(seconds=self.config.sync.stall_timeout_s),
        )
        # The first collective makes the connections, half a second of them over NCCL: now, not in
        # the first sync.
        dist.all_reduce(torch.zeros(1, device=self.device))

    def load(self, root: Path, identity: str) -> int:
        """Shard the checkpoint over the ranks and read this rank's rows.

        Args:
            root: The checkpoint folder, readable on this node.
            identity: What this rank is from now on, from `trainer_identity`.

        Returns:
            Bytes held by this rank.

        Raises:
            CheckpointError: The checkpoint is damaged or of an unknown form.
        """
        index = read_index(root)
        mesh = init_device_mesh(self.device.type, (self.config.trainer.num_ranks,))
        shards = ShardedCheckpoint(build_layout(index), mesh, self.device)
        shards.load(index)
        self.start_producer(shards, self.config, self.device)
        # The object graph is static from here on; a collection over it costs a pull its tail.
        gc.collect()
        gc.freeze()
        self._identity = identity
        return shards.num_bytes

    def resident_bytes(self, identity: str | None) -> int | None:
        """Bytes held, if this rank can serve a sync of that identity (any, for None) as it is."""
        if self._identity is None or identity not in (None, self._identity) or self._broken:
            return None
        return self._shards.num_bytes

    def load_version(self, root: Path) -> int:
        """Overwrite this rank's rows with another version of the same checkpoint.

        A later run does not take this rank over: it no longer holds what it was started with.

        Args:
            root: A checkpoint folder with the same tensors.

        Returns:
            Bytes read.

        Raises:
            CheckpointError: Its tensors differ in name, dtype or shape.
        """
        self._identity = None
        return self._shards.load(read_index(root))

    def memory(self) -> dict[str, Any]:
        """Bytes this rank holds, and what the process as a whole has open."""
        return {
            "shard_bytes": self._shards.num_bytes,
            "serve_ring_bytes": self._rings.registered_bytes,
            **process_figures(),
        }


def actor_class(config: Config) -> Any:
    """The Ray actor class, with enough threads for every pull that can be parked at once.

    A consumer keeps up to `num_buffers` pulls waiting; publication and free signals need threads of
    their own, or the pulls they would release hold all of them for ever.
    """
    threads = config.num_consumers * config.sync.num_buffers + 8
    return ray.remote(
        num_cpus=1, num_gpus=1, max_concurrency=threads, enable_tensor_transport=True
    )(TrainerWorker)

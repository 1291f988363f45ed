"""The trainer side of vLLM's own backends: its released trainer engines on the same tensors as ours.

The engines drive the inference side through a client object; here that client hands each call over to
the process that holds the engine fleet, and waits for its answer.
"""

import math
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util import get_node_ip_address
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

from rdt_e2e.bench.nccl_symbols import check_enabled, drop_missing_symbols
from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.layout import CheckpointLayout, build_layout
from rdt_e2e.checkpoint.synthetic import open_rows
from rdt_e2e.config import Config
from rdt_e2e.errors import SyncError

Command = tuple[str, Any]
"""What the trainer engine asks of the inference side: init, start, update or finish, and its payload."""

GIB = 1 << 30


class PeerTrainer:
    """One trainer rank that holds the whole slice and sends it with one of vLLM's engines.

    Its tensors lie in memory as ours do: experts stacked, everything else by itself. There is one
    rank, so nothing has to be gathered.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._engine: Any = None
        self._commands: queue.Queue[Command | None] = queue.Queue()
        self._answers: queue.Queue[str | None] = queue.Queue()

    def load(self, root: Path) -> int:
        """Hold a version of the checkpoint, in place of the one held before; returns its bytes."""
        index = read_index(root)
        if self._engine is None:
            self._source = HeldSource(build_layout(index), self._config.trainer.device)
        self._source.load(root)
        torch.cuda.synchronize()
        return sum(held.num_bytes for held in self._source.layout.held.values())

    def connect(self, row: str) -> list[str]:
        """Build the trainer engine; it initialises the inference side through the client.

        Returns:
            NCCL functions that the installed library lacks; see `nccl_symbols.py`.

        Raises:
            SyncError: The engine would move nothing.
        """
        missing = drop_missing_symbols() if row.startswith("peer-nccl") else []
        self._relayed(lambda: setattr(self, "_engine", self._build(row)))
        check_enabled(getattr(self._engine, "model_update_group", None))
        return missing

    def send(self) -> None:
        """One sync as the engine does it: start, update, finish."""
        self._relayed(self._engine.send_weights)
        torch.cuda.synchronize()

    def next_command(self) -> Command | None:
        """Wait for what the engine asks next; None when it is done, whether it failed or not."""
        return self._commands.get(timeout=self._config.sync.sync_timeout_s)

    def answer(self, error: str | None) -> None:
        """Say how the last command ended: with an error's text or well."""
        self._answers.put(error)

    def _relayed(self, job: Any) -> None:
        try:
            job()
        finally:
            self._commands.put(None)

    def _build(self, row: str) -> Any:
        client = _RelayClient(self._commands, self._answers, self._config.sync.sync_timeout_s)
        return WeightTransferTrainerFactory.trainer_init(
            self._init_info(row), client=client, source=self._source
        )

    def _init_info(self, row: str) -> TrainerInitInfo:
        config = self._config
        if row in ("peer-rdt", "peer-rdt-ours"):
            return ShardedRDTTrainerInitInfo(
                rank=0,
                num_consumers=config.num_consumers,
                trainer_actor_namespace=config.cluster.namespace,
                num_rdt_buffers=config.sync.num_buffers,
                buffer_presize_gb=config.sync.buffer_presize_gib,
                gather_lookahead=config.trainer.lookahead,
                stall_timeout_s=config.sync.stall_timeout_s,
            )
        if row in ("peer-nccl", "peer-nccl-1"):
            # Its defaults: packed, 1 GiB a buffer, two buffers; "-1" has one.
            more = {"packed_num_buffers": 1} if row == "peer-nccl-1" else {}
            return NCCLTrainerInitInfo(
                rank=0,
                master_address=get_node_ip_address(),
                master_port=_free_port(),
                world_size=1 + config.num_consumers,
                **more,
            )
        # Its buffer must hold the largest tensor whole.
        largest = max(entry.num_bytes for entry in self._source.layout.entries.values())
        return IPCTrainerInitInfo(
            rank=0,
            packed=True,
            packed_buffer_size_bytes=max(GIB, math.ceil(largest / GIB) * GIB),
        )


class HeldSource(WeightSource):
    """The held tensors as vLLM's engines read them: checkpoint names, views of the memory that holds them."""

    def __init__(self, layout: CheckpointLayout, device: str) -> None:
        self.layout = layout
        self._held = {
            key: torch.empty(held.shape, dtype=getattr(torch, held.dtype), device=device)
            for key, held in layout.held.items()
        }

    def load(self, root: Path) -> None:
        """Overwrite the tensors with a version of the checkpoint."""
        with open_rows(read_index(root)) as reader:
            for key, held in self.layout.held.items():
                reader.read_rows(held, 0, held.shape[0], self._held[key])

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of every tensor, group by group."""
        return [
            ParamMeta(name, getattr(torch, entry.dtype), tuple(entry.shape))
            for name, entry in self.layout.entries.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every name with its tensor, in the order of `metadata`."""
        for name, entry in self.layout.entries.items():
            key, row = self.layout.locate[name]
            tensor = self._held[key] if row is None else self._held[key][row]
            yield name, tensor.view(entry.shape)


class _RelayClient:
    """vLLM's client protocol over two queues; one call is under way at a time."""

    def __init__(
        self,
        commands: "queue.Queue[Command | None]",
        answers: "queue.Queue[str | None]",
        timeout_s: float,
    ) -> None:
        self._commands = commands
        self._answers = answers
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask("init", init_info)

    def start_weight_update(self) -> None:
        self._ask("start", None)

    def update_weights(self, update_info: Any) -> None:
        self._ask("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask("finish", weight_version)

    def _ask(self, verb: str, payload: Any) -> None:
        with self._lock:
            self._commands.put((verb, payload))
            error = self._answers.get(timeout=self._timeout_s)
        if error is not None:
            raise SyncError(error)


def peer_actor(config: Config, gpu: str | None) -> Any:
    """Start a peer's trainer as a Ray actor.

    Args:
        config: The run's configuration.
        gpu: A GPU that is in use already, for a trainer that shares it; none for one of its own.
    """
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1, "max_concurrency": 8}
    if gpu is not None:
        # Without a GPU of its own Ray would hide them all.
        variables = {
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "CUDA_VISIBLE_DEVICES": gpu,
        }
        options |= {"num_gpus": 0, "runtime_env": {"env_vars": variables}}
    return ray.remote(**options)(PeerTrainer).remote(config)


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind((get_node_ip_address(), 0))
        port: int = listener.getsockname()[1]
        return port

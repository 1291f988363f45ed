"""The settings that decide sizes: how many ranks on each side, and how the sync is cut."""

from dataclasses import dataclass
from typing import Self

from rdt_e2e.checkpoint.owners import Gather
from rdt_e2e.config import Config
from rdt_e2e.errors import ConfigError

MIN_BATCHED_TOKENS = 2048
"""Least `max_num_batched_tokens` the engine is started with (`inference/engine.py`)."""

_COUNTS = ("num_trainers", "data_parallel", "tensor_parallel", "num_replicas", "num_buffers")


@dataclass(frozen=True)
class Deployment:
    """Two fleets and the sync between them.

    Attributes:
        num_trainers: Trainer ranks, P.
        data_parallel: Data-parallel engine ranks.
        tensor_parallel: Tensor-parallel ranks within each.
        expert_parallel: Whole experts are spread over all ranks of an engine.
        num_replicas: Independent engines, each with ranks of its own.
        gather: Whether routed experts stay with their trainer rank.
        lookahead: Gather groups gathered ahead of the one being served.
        num_buffers: Slots of a serve ring and of a receive ring.
        presize_bytes: Smallest slot in bytes.
        max_chunk_bytes: Limit on one pull in bytes, or none.
        max_model_len: Longest prompt plus continuation, in tokens.
        max_num_seqs: Sequences at a time per data-parallel rank.
        kv_item_bytes: Size of one element of the KV cache in bytes.
        gpu_memory_utilization: Share of a GPU that vLLM may take; none leaves it open.
    """

    num_trainers: int
    data_parallel: int
    tensor_parallel: int = 1
    expert_parallel: bool = True
    num_replicas: int = 1
    gather: Gather = "owner"
    lookahead: int = 1
    num_buffers: int = 2
    presize_bytes: int = 0
    max_chunk_bytes: int | None = None
    max_model_len: int = 2048
    max_num_seqs: int = 4
    kv_item_bytes: int = 2
    gpu_memory_utilization: float | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.lookahead < 0 or self.presize_bytes < 0:
            raise ConfigError(
                f"lookahead is {self.lookahead} and presize_bytes is {self.presize_bytes}; neither "
                "may be negative"
            )
        if self.max_chunk_bytes is not None and self.max_chunk_bytes < 1:
            raise ConfigError(f"max_chunk_bytes is {self.max_chunk_bytes}; it must be at least 1")

    @property
    def num_consumers(self) -> int:
        """Inference ranks of all replicas, C."""
        return self.num_replicas * self.ranks_per_replica

    @property
    def ranks_per_replica(self) -> int:
        """Inference ranks of one engine, W."""
        return self.data_parallel * self.tensor_parallel

    @property
    def max_batched_tokens(self) -> int:
        """Tokens of one step of a data-parallel rank, as `inference/engine.py` sets it."""
        return max(MIN_BATCHED_TOKENS, self.max_model_len)

    @property
    def fleets(self) -> str:
        """Both fleets in a few words."""
        return (
            f"{self.num_trainers} trainer ranks -> {self.num_consumers} inference ranks "
            f"({self.parallelism})"
        )

    @property
    def parallelism(self) -> str:
        """The inference fleet's parallelism, as people write it: DP8 TP1 EP8."""
        experts = f" EP{self.ranks_per_replica}" if self.expert_parallel else ""
        engines = "" if self.num_replicas == 1 else f"{self.num_replicas} x "
        return f"{engines}DP{self.data_parallel} TP{self.tensor_parallel}{experts}"

    @classmethod
    def of(cls, config: Config) -> Self:
        """Take the deployment out of a run's configuration."""
        inference = config.inference
        float8_cache = inference.kv_cache_dtype.startswith("fp8")
        full_cache = inference.dtype == "float32" and inference.kv_cache_dtype == "auto"
        return cls(
            num_trainers=config.trainer.num_ranks,
            data_parallel=inference.data_parallel,
            tensor_parallel=inference.tensor_parallel,
            expert_parallel=inference.expert_parallel,
            num_replicas=inference.num_replicas,
            gather=config.trainer.gather,
            lookahead=config.trainer.lookahead,
            num_buffers=config.sync.num_buffers,
            presize_bytes=int(config.sync.buffer_presize_gib * 2**30),
            max_chunk_bytes=config.sync.max_chunk_bytes,
            max_model_len=inference.max_model_len,
            max_num_seqs=inference.max_num_seqs,
            kv_item_bytes=1 if float8_cache else 4 if full_cache else 2,
            gpu_memory_utilization=inference.gpu_memory_utilization,
        )

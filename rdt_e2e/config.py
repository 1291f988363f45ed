"""Every option of this package, with its default, its unit and what is allowed.

Importable without torch, Ray or vLLM. `rdt_e2e.profiles` reads the files; `load_config` here is the
one way to get a `Config`.
"""

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]

MINI_KIMI = "mini-kimi"
"""The value of `model.source` that selects the embedded model."""


def default_cache_dir() -> Path:
    """The user's cache folder for this package (XDG base directory rules)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path here is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "rdt-e2e"


class _Section(BaseModel):
    """Common behaviour: frozen, no unknown keys, field docstrings as descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_yes_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse ``true`` where a number is meant, which pydantic would read as 1."""
        field = cls.model_fields[str(info.field_name)]
        if value is False and "off" in get_args(field.annotation):
            return "off"  # YAML 1.1 reads a bare off as false.
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError(f"is {value}, a yes or no, where another kind of value is needed")
        return value


class ModelConfig(_Section):
    """Which checkpoint is synced."""

    source: Text
    """``mini-kimi`` (built on this machine), a checkpoint folder, or a hub id found offline in the
    local hub cache."""
    revision: Text = "main"
    """Branch, tag or commit of a hub id."""
    variant: Literal["v1", "v2"] = "v1"
    """Weight version of mini-kimi; v2 says something else than v1."""
    trust_remote_code: bool = False
    """Run the Python files of the checkpoint (K2's tokenizer needs it)."""

    @model_validator(mode="after")
    def _variant_is_of_mini_kimi(self) -> Self:
        if self.variant != "v1" and self.source != MINI_KIMI:
            raise ValueError(
                f"model.variant={self.variant} needs model.source={MINI_KIMI}, found "
                f"{self.source!r}; remove model.variant"
            )
        return self


class ClusterConfig(_Section):
    """The Ray cluster that both fleets run on."""

    target: Literal["local", "ray"]
    """``local`` starts two Ray nodes on this machine; ``ray`` joins a running cluster."""
    address: Text | None = None
    """``host:port`` of the running cluster's head; only with target ray, and required there."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the local cluster's head; 0 takes a free one (target local)."""
    namespace: Text = "rdt-e2e"
    """Ray namespace of every named actor."""
    trainer_ip: Text = "127.0.0.2"
    """Loopback address of the local trainer node (target local)."""
    inference_ip: Text = "127.0.0.3"
    """Loopback address of the local inference node (target local)."""
    cpus_per_node: Count = 8
    """CPUs each local node declares to Ray; a scheduling number, not a limit (target local)."""
    start_timeout_s: Seconds = 120
    """Longest wait for the cluster to be up and to show both nodes, in seconds."""

    @field_validator("trainer_ip", "inference_ip")
    @classmethod
    def _is_loopback(cls, value: str) -> str:
        try:
            loopback = ipaddress.IPv4Address(value).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise ValueError(f"is {value!r}; it must be an IPv4 loopback address (127.x.y.z)")
        return value

    @model_validator(mode="after")
    def _address_fits_target(self) -> Self:
        if self.target == "ray" and self.address is None:
            raise ValueError(
                "cluster.target=ray needs cluster.address, the host:port of the Ray head; give it "
                "with --set cluster.address=HOST:PORT or RDT_E2E_CLUSTER__ADDRESS"
            )
        if self.target == "local" and self.address is not None:
            raise ValueError(
                f"cluster.address={self.address} is for cluster.target=ray, found "
                "cluster.target=local; remove the address or set the target"
            )
        if self.trainer_ip == self.inference_ip:
            # Ray and vLLM tell nodes apart by address: one address would be one node.
            raise ValueError(
                f"cluster.trainer_ip and cluster.inference_ip are both {self.trainer_ip}; they "
                "must differ"
            )
        return self


class TrainerConfig(_Section):
    """The trainer fleet, which holds the checkpoint and serves it."""

    num_ranks: Count
    """Trainer ranks, one Ray actor and one (logical) GPU each."""
    device: Literal["cpu", "cuda"]
    """Where both fleets keep their weights."""
    gather: Literal["owner", "full"] = "owner"
    """``owner`` serves routed experts from the rank that holds them and gathers the rest; ``full``
    gathers every tensor on every rank, for trainers whose sharding splits experts."""
    lookahead: int = Field(default=1, ge=0)
    """Gather groups gathered ahead of the one being served; lookahead + 1 are resident."""
    load_timeout_s: Seconds = 300
    """Longest wait for all ranks to have read their rows of the checkpoint, in seconds."""


class InferenceConfig(_Section):
    """The vLLM fleet; the names are those of vLLM's engine arguments."""

    data_parallel: Count
    """Data-parallel engine ranks."""
    tensor_parallel: Count = 1
    """Tensor-parallel ranks within each data-parallel rank."""
    expert_parallel: bool = True
    """Spread whole experts over all data_parallel * tensor_parallel ranks."""
    num_replicas: Count = 1
    """Independent engines, each with data_parallel * tensor_parallel ranks of its own."""
    max_model_len: Count
    """Longest prompt plus continuation, in tokens."""
    max_num_seqs: Count
    """Sequences decoded at the same time, per data-parallel rank."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory that vLLM may take (device cuda)."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3"] = "auto"
    """Element type of the KV cache; auto is the model's own."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Element type of activations and unquantised weights."""
    enforce_eager: bool = True
    """Run without graph capture or compilation."""
    kv_cache_bytes: Count | None = None
    """KV cache size per rank in bytes; none lets vLLM decide."""
    start_timeout_s: Seconds = 600
    """Longest wait for the engine to be ready, in seconds."""


class SyncConfig(_Section):
    """The sync itself and its deadlines."""

    iters: Count = 2
    """Syncs to run, one after another; the first is the cold one."""
    transport: Literal["ray", "nixl"] = "ray"
    """``ray`` makes each pull a call over Ray Direct Transport. ``nixl`` tells the producers once what
    will be pulled; in a sync, messages and reads between NIXL agents carry every pull, and Ray one call
    per producer."""
    num_buffers: Count = 2
    """Depth of the serve rings and of the receive rings, in slots."""
    buffer_presize_gib: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Smallest size of a ring slot in GiB; 0 sizes it to the largest chunk."""
    max_chunk_bytes: Count | None = None
    """Most bytes of one pull; a gather group is cut into as many pulls as that takes. None pulls what
    one producer has of a group at once. Bytes in flight per consumer are num_buffers times this:
    on RoCE, keep it under the reach of the NIC's address translation, 2 to 3 GB."""
    stall_timeout_s: Seconds = 300
    """Longest time without progress before a producer names who is stuck, in seconds."""
    control_timeout_s: Seconds = 60
    """Longest wait for a call of the engine that moves no weights (pause, start, resume), in seconds."""
    heartbeat_timeout_s: Seconds = 30
    """Longest silence of a consumer during a sync before it is called lost, in seconds; consumers
    report to every producer every two seconds."""
    rdt_fetch_timeout_s: Seconds = 600
    """Ray's own limit for one pull, in seconds; above stall_timeout_s, so that the error that
    names the rank comes first."""
    init_timeout_s: Seconds = 600
    """Longest wait for init and bake, in seconds."""
    sync_timeout_s: Seconds = 900
    """Longest wait for one sync, in seconds."""

    @model_validator(mode="after")
    def _deadlines_are_ordered(self) -> Self:
        for name in ("rdt_fetch_timeout_s", "sync_timeout_s"):
            limit: float = getattr(self, name)
            if limit <= self.stall_timeout_s:
                # The stall error says which rank, group and consumer; the others only that
                # time is up.
                raise ValueError(
                    f"sync.{name}={limit:g} must be greater than "
                    f"sync.stall_timeout_s={self.stall_timeout_s:g}; raise the first or lower the "
                    "second"
                )
        return self


class VerifyConfig(_Section):
    """What the engine is asked before and after each sync, and what it must say."""

    prompts: Annotated[tuple[Text, ...], Field(min_length=1)] = (
        "The capital of France is",
        "The future of AI is",
    )
    """Prompts, continued greedily."""
    max_tokens: Count = 16
    """Tokens generated per prompt."""
    reference: Literal["recorded", "none"] = "recorded"
    """``recorded`` compares with the text stored beside the checkpoint; ``none`` compares nothing,
    and the run says so."""
    pulls: bool = True
    """Compare a checksum of every pull, taken on both ends, before generation resumes."""
    weights: Literal["disk", "names", "none"] = "none"
    """``disk`` compares every tensor of every inference rank, after each sync, with what vLLM's own
    loader makes of the checkpoint folder; it reads the checkpoint once per rank. ``names`` compares
    every slice a rank received with the same slice of the checkpoint, tensor by tensor, for models too
    large to hold twice."""


class ProfilingConfig(_Section):
    """What is measured while a sync runs; see `rdt_e2e.profiling`."""

    level: Literal["off", "summary", "full"] = "summary"
    """``off`` hooks into nothing. ``summary`` sums up what each process does and keeps one line per
    pull. ``full`` also keeps single calls for the timeline and, on CUDA, waits for each processing
    phase on the device, which slows a sync a little."""
    node_dir: Path | None = None
    """Folder on every node for what is measured there until it is collected; none takes one below
    the system's folder of temporary files."""


class PathsConfig(_Section):
    """Where this package writes."""

    runs_dir: Path = Path("runs")
    """Folder of run directories, relative to the working directory."""
    cache_dir: Path = Field(default_factory=default_cache_dir)
    """Folder of what is built once, such as mini-kimi."""

    @field_validator("runs_dir", "cache_dir")
    @classmethod
    def _expand_home(cls, value: Path) -> Path:
        return value.expanduser()


class Config(_Section):
    """The whole configuration of one run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the profile; part of the run directory's name."""
    model: ModelConfig
    cluster: ClusterConfig
    trainer: TrainerConfig
    inference: InferenceConfig
    sync: SyncConfig = Field(default_factory=SyncConfig)
    verify: VerifyConfig = Field(default_factory=VerifyConfig)
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig)
    paths: PathsConfig = Field(default_factory=PathsConfig)

    @property
    def num_consumers(self) -> int:
        """Inference ranks of all replicas, each of which pulls its own slices."""
        return self.inference.num_replicas * self.ranks_per_replica

    @property
    def ranks_per_replica(self) -> int:
        """Inference ranks of one engine: data_parallel * tensor_parallel."""
        return self.inference.data_parallel * self.inference.tensor_parallel

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if self.verify.max_tokens >= self.inference.max_model_len:
            raise ValueError(
                f"verify.max_tokens={self.verify.max_tokens} must be less than "
                f"inference.max_model_len={self.inference.max_model_len}, or no prompt fits"
            )
        if self.trainer.device == "cpu" and self.inference.kv_cache_dtype.startswith("fp8"):
            raise ValueError(
                f"inference.kv_cache_dtype={self.inference.kv_cache_dtype} needs "
                "trainer.device=cuda: vLLM's MLA attention on CPU takes only auto"
            )
        return self


def load_config(name_or_file: str, overrides: Mapping[str, object] | None = None) -> Config:
    """Read, merge and check a configuration.

    Precedence, lowest first: defaults, the profile, ``RDT_E2E_<SECTION>__<FIELD>`` variables,
    `overrides`.

    Args:
        name_or_file: A profile name (``local``) or the path of a YAML file.
        overrides: Dotted keys (``sync.iters``) with their values; text is converted.

    Returns:
        The checked, frozen configuration.

    Raises:
        ConfigError: One line naming the source, the key and what is allowed.
    """
    # Imported here because that module needs the classes above.
    from rdt_e2e import profiles

    return profiles.resolve(name_or_file, {} if overrides is None else overrides)

"""The bench `bake`: how long one inference rank plans for K2's names, and how that grows.

One process stands for the first of eight expert-parallel ranks, with K2's widths and all 384 experts. The
plan is made of names and shapes, so that the weights are allocated and never touched. What runs is vLLM's
own model, loaders, bake and plan, through this package's consumer.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.distributed import (
    init_distributed_environment,
    initialize_model_parallel,
    parallel_state,
)
from vllm.distributed.weight_transfer import sharded_rdt_engine
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from rdt_e2e.bench.k2_slice import Widths, model_config
from rdt_e2e.checkpoint.described import describe
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.config import Config, load_config
from rdt_e2e.inference.plugin.cpu_consumer import CpuConsumer
from rdt_e2e.sync.plan import init_info

NUM_RANKS = 8
K2_WHOLE = Widths(num_experts=384)
"""All experts, of which a rank holds 48."""


@dataclass
class BakeTimes:
    """What one rank took for one number of layers.

    Attributes:
        layers: Decoder layers.
        num_names: Names that the trainer serves.
        num_slices: Slices that this rank pulls, all chunks together.
        num_chunks: Pulls per sync.
        seconds: CPU seconds of each step, in order: the first two on the driver, the others on the
            rank. All of it is one thread's work, so that on a quiet machine it is the duration.
        wall_s: Duration of the same steps.
    """

    layers: int
    num_names: int
    num_slices: int = 0
    num_chunks: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    wall_s: dict[str, float] = field(default_factory=dict)

    on_driver = ("layout", "init payload")
    """The steps that the driver does once for all ranks."""

    @property
    def on_rank_s(self) -> float:
        """The steps of the rank, in CPU seconds."""
        return sum(seconds for step, seconds in self.seconds.items() if step not in self.on_driver)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Note what a block takes."""
        began, started = time.perf_counter(), time.process_time()
        yield
        self.seconds[name] = time.process_time() - started
        self.wall_s[name] = time.perf_counter() - began


class OfflineConsumer(CpuConsumer):
    """The consumer without its producers: everything of init but registration."""

    def plan(self, times: BakeTimes, payload: Mapping[str, Any]) -> None:
        """Run the steps of init that grow with names, and note how long each took."""
        settings = self.init_info_cls(**payload)
        self._settings = settings
        self._configure_ring(settings)
        with times.step("router"), mock.patch.object(ray, "get_actor", mock.MagicMock()):
            self._resolve_producers(settings)
        with times.step("bake"):
            self._bake(settings)
        with times.step("call plan"):
            self._build_static_plan(settings)
        with (
            times.step("digests"),
            mock.patch.object(ray, "get"),
            mock.patch.object(self._router, "reserve_serve_buffers", return_value=[]),
            mock.patch.object(sharded_rdt_engine, "register_nixl_memory"),
        ):
            self._preregister_at_init()
        chunks = self._cached_plan.chunks
        times.num_chunks = len(chunks)
        times.num_slices = sum(len(chunk.keys) for chunk in chunks)


def measure_bake(
    layers: Sequence[int], settings: Mapping[str, Any], widths: Widths = K2_WHOLE
) -> Iterator[BakeTimes]:
    """Plan for K2 with some numbers of layers, one after another.

    Args:
        layers: Numbers of decoder layers; 61 is K2.
        settings: Dotted configuration keys over the profile `kimi-k2`.
        widths: Sizes of the model.

    Yields:
        The times for each, as it is done.
    """
    config = load_config("kimi-k2", {"cluster.address": "none:0", **settings})
    with _one_of_many(), tempfile.TemporaryDirectory(prefix="rdt-e2e-bake-") as folder:
        for count in layers:
            yield _measure(model_config(widths, count), config, Path(folder))


def _measure(settings: Mapping[str, Any], config: Config, folder: Path) -> BakeTimes:
    (folder / "config.json").write_text(json.dumps(settings))
    index = describe(settings, folder)
    times = BakeTimes(settings["num_hidden_layers"], len(index.entries))
    with times.step("layout"):
        layout = build_layout(index)
    with times.step("init payload"):
        payload = init_info(layout, [f"trainer-{rank}" for rank in range(NUM_RANKS)], config)
    vllm_config = _vllm_config(folder)
    with set_current_vllm_config(vllm_config):
        _make_groups_once()
        # Weights are allocated and never touched: pages that nobody writes take no memory.
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(vllm_config)
    with set_current_vllm_config(vllm_config):
        consumer = OfflineConsumer(
            vllm_config.weight_transfer_config, vllm_config, torch.device("cpu"), model
        )
        consumer.plan(times, payload)
    return times


def _make_groups_once() -> None:
    """Make vLLM's groups of eight ranks; they are the same for every size of the model."""
    if not parallel_state.model_parallel_is_initialized():
        init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="fake")
        initialize_model_parallel()


def _vllm_config(folder: Path) -> VllmConfig:
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=128,
        data_parallel_size=NUM_RANKS,
        enable_expert_parallel=True,
        distributed_executor_backend="ray",
        data_parallel_backend="ray",
        enforce_eager=True,
        weight_transfer_config=WeightTransferConfig(backend="sharded_rdt"),
    )
    return arguments.create_engine_config()


@contextmanager
def _one_of_many() -> Iterator[None]:
    """Let this process be rank 0 of eight without the other seven: groups whose collectives do nothing."""
    new_group = dist.new_group
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        with (
            mock.patch.object(
                dist,
                "new_group",
                side_effect=lambda ranks=None, *_args, **_kwargs: new_group(ranks, backend="fake"),
            ),
            mock.patch.object(
                parallel_state,
                "in_the_same_node_as",
                side_effect=lambda group, *_args, **_kwargs: [True] * dist.get_world_size(group),
            ),
        ):
            yield
    finally:
        dist.destroy_process_group()

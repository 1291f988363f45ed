"""Every environment variable of other people's libraries that this package sets, with its reason.

Ray, UCX and vLLM read most of these when they are imported or started, and hand only some of them on to
their child processes. So each must be in the environment of a Ray node before ``ray start``, and in
that of the driver before the first import; nothing else in the package sets one.
"""

import math
import os
from pathlib import Path

from rdt_e2e.config import Config

SITE_VARIABLES = frozenset(
    {
        "RAY_AUTH_MODE",
        "UCX_MODULES",
        "UCX_RCACHE_MAX_UNRELEASED",
        "VLLM_LOGGING_LEVEL",
    }
)
"""What the owner of a real cluster may have set for the fabric or site; their value stays."""


def ray_environment(config: Config) -> dict[str, str]:
    """Variables for every Ray node, before ``ray start``, and for all that connects to it.

    Args:
        config: The run's configuration.

    Returns:
        Variable to value. On cluster.target=ray, site variables already set here are left out.
    """
    variables = {
        # The head turns token authentication on by itself; a second node, a driver and vLLM's
        # processes do not, and are refused without it.
        "RAY_AUTH_MODE": "token",
        # Ray's own 60 s ends a cold pull before the producer's error can name who is stuck. Read
        # when Ray is imported.
        "RAY_rdt_fetch_fail_timeout_milliseconds": str(
            math.ceil(config.sync.rdt_fetch_timeout_s * 1000)
        ),
        # A node that is told to stop first waits for its leases to end, for Ray Serve's sake: with
        # trainer ranks that stay, 30 s for nothing, and most engines kill it by then.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # No report to Ray's authors from a run that did not ask for one; without it, a wait too.
        "RAY_USAGE_STATS_ENABLED": "0",
        # NIXL's wheels crash at process exit beside Debian's ibverbs-providers: their EFA module
        # loads a second libibverbs.
        "UCX_MODULES": "^efa",
        # What vLLM sets for the consumer, against a rare hang of the registration cache; the
        # producers need it as well.
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
    }
    if config.trainer.device == "cpu":
        # No RDMA and no GPU here: leave UCX nothing to probe, and one path to debug.
        variables["UCX_TLS"] = "tcp,self"
        # Ray runs workers at niceness 15: on a machine that does anything else, the fleets then
        # get what is left over.
        variables["RAY_worker_niceness"] = "0"
    return _without_site_values(config, variables)


def process_environment(config: Config) -> dict[str, str]:
    """Variables for the driver, the trainer's actors and vLLM's processes; holds Ray's as well.

    Args:
        config: The run's configuration.

    Returns:
        Variable to value. On cluster.target=ray, site variables already set here are left out.
    """
    variables = ray_environment(config) | {
        # A forked engine core inherits the driver's Ray connection and waits for ever.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Only this executor turns tensor transport on for its workers; the default, but a default
        # that the run depends on.
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
        # vLLM gives a starting engine 600 s; K2 needs more.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.inference.start_timeout_s)),
        # No report to vLLM's authors from a run that did not ask for one.
        "VLLM_NO_USAGE_STATS": "1",
        # Its INFO and WARNING lines bury the steps this program prints; errors still show.
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Checkpoints are local by design: a look-up of a hub only waits for a time-out.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # The tokenizer warns, or hangs, when a process that used its threads forks.
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.trainer.device == "cpu":
        # Every rank is a process; with a thread per core each, they only wait for one another.
        variables["OMP_NUM_THREADS"] = "1"
        if config.inference.kv_cache_bytes is None:
            # In GiB. Without it each rank sizes its cache by the whole machine's memory. Not set
            # beside kv_cache_bytes, which it would override.
            variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return _without_site_values(config, variables)


def apply_environment(config: Config) -> None:
    """Put `process_environment` into this process; call it before Ray or vLLM is imported."""
    os.environ.update(process_environment(config))


def peer_environment(row: str) -> None:
    """Put what a benchmark's peer row needs into this process, after `apply_environment`.

    Args:
        row: Name of the row.
    """
    if row == "peer-rdt":
        # All of it as released: without our plugin, vLLM keeps its own consumer and NIXL's settings.
        os.environ["VLLM_PLUGINS"] = ""
    if row == "peer-ipc":
        # Its memory handles travel as pickles, which vLLM's workers otherwise refuse.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


def _without_site_values(config: Config, variables: dict[str, str]) -> dict[str, str]:
    if config.cluster.target == "local":
        return variables
    return {
        name: value
        for name, value in variables.items()
        if not (name in SITE_VARIABLES and name in os.environ)
    }


NET_DEVICES = "UCX_NET_DEVICES"
"""The NICs that UCX may use, as `device:port,...`; read when a process's agent is built."""


def use_net_devices(devices: str) -> None:
    """Restrict UCX in this process alone; see `rdt_e2e.fabric.pinning` for why not node-wide."""
    os.environ[NET_DEVICES] = devices


def trace_ucx(log: Path) -> None:
    """Have UCX write to a file, in this process alone, which build it is and which devices it uses.

    UCX reads the variables when it is loaded; it says these things in its log and nowhere else.
    """
    os.environ.update(
        {"UCX_LOG_FILE": str(log), "UCX_LOG_LEVEL": "info", "NIXL_LOG_LEVEL": "ERROR"}
    )

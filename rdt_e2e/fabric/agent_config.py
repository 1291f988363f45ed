"""Two settings of every NIXL agent that Ray builds and that Ray cannot be asked for.

*Locking*: Ray calls an agent from several threads (a producer's pulls, a consumer's reads), and the agent
NIXL 1.5.1's Python layer builds has no lock of its own.

*Progress*: the same layer fixes the delay of the agent's progress thread at 0, so that it asks UCX for an
event again and again. Every agent then keeps one core busy for ever, and between GPUs of one host it slows
the copies: UCX's `cuda_ipc` answers each of those requests with a host callback on the stream of its copies
(`uct_cuda_base_iface_event_fd_arm`), thousands during one read, which the next read has to wait for. With a
delay the thread sleeps until UCX has an event. `docs/performance.md` has the figures.
"""

import importlib
import importlib.util
import logging
import uuid
from importlib.metadata import version
from typing import Any

logger = logging.getLogger(__name__)

TESTED_RELEASE = "1.5."
VARIANTS = ("nixl_cu12", "nixl_cu13")
SLEEP_US = 1000
"""Longest sleep of a progress thread, in microseconds; an event wakes it. NIXL rounds up to milliseconds."""


def configure_agents(progress_delay_us: int = SLEEP_US) -> bool:
    """Give every NIXL agent built later in this process a lock, and its progress thread a delay.

    Needed while `nixl_agent.__init__` in `nixl_cu12/_api.py` sets `syncMode` to none and `pthrDelay`
    to 0.

    Args:
        progress_delay_us: Longest sleep of the progress thread in microseconds; 0 keeps it spinning.

    Returns:
        Whether it took effect; an untested release of NIXL is left alone, with one warning.
    """
    found = version("nixl")
    if not found.startswith(TESTED_RELEASE):
        logger.warning("NIXL %s: its agents are left as they are, and may take a core", found)
        return False
    for variant in VARIANTS:
        if importlib.util.find_spec(variant) is not None:
            _replace_config(importlib.import_module(f"{variant}._bindings"), progress_delay_us)
    return True


def build_agent(backend: str) -> Any:
    """Another NIXL agent for this process, outside Ray, with what `configure_agents` set last."""
    api: Any = importlib.import_module("nixl._api")
    return api.nixl_agent(f"rdt-e2e-{uuid.uuid4()}", api.nixl_agent_config(backends=[backend]))


def _replace_config(bindings: Any, progress_delay_us: int) -> None:
    original = bindings.nixlAgentConfig
    base = getattr(original, "rdt_e2e_base", original)

    class OurConfig(base):  # type: ignore[misc, valid-type]
        """The agent's configuration; whatever is asked for, ours is set."""

        rdt_e2e_base = base

        @property
        def pthrDelay(self) -> int:  # noqa: N802 - NIXL's own name
            """Delay of the progress thread, in microseconds."""
            delay: int = base.pthrDelay.fget(self)
            return delay

        @pthrDelay.setter
        def pthrDelay(self, _wanted: int) -> None:  # noqa: N802
            base.pthrDelay.fset(self, progress_delay_us)

        @property
        def syncMode(self) -> Any:  # noqa: N802
            """How calls from several threads are kept apart."""
            return base.syncMode.fget(self)

        @syncMode.setter
        def syncMode(self, _wanted: Any) -> None:  # noqa: N802
            base.syncMode.fset(self, bindings.NIXL_THREAD_SYNC_STRICT)

    bindings.nixlAgentConfig = OurConfig

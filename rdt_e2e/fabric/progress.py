"""NIXL's progress thread, made to sleep between looks where cores are scarce.

NIXL 1.5.1's Python layer fixes the thread's delay at 0, so every agent keeps one core busy for ever:
two trainer ranks and two workers on two cores then spend most of their time spinning. A delay lets
the thread wait for UCX's own events: measured here, an idle agent went from 100 % of a core to 2 %.
"""

import importlib
import importlib.util
import logging
from importlib.metadata import version

logger = logging.getLogger(__name__)

TESTED_RELEASE = "1.5."
VARIANTS = ("nixl_cu12", "nixl_cu13")
DELAY_US = 1000


def relax_progress_thread(delay_us: int = DELAY_US) -> bool:
    """Give every NIXL agent built later in this process a progress thread that sleeps.

    For CPU runs; on a GPU host the spinning thread is what keeps a pull's latency low. Still needed
    while `agent_config.pthrDelay = 0` stands in `nixl_cu12/_api.py`.

    Args:
        delay_us: Longest sleep of the thread, in microseconds; an event wakes it.

    Returns:
        Whether it took effect; an untested release of NIXL is left alone, with one warning.
    """
    found = version("nixl")
    if not found.startswith(TESTED_RELEASE):
        logger.warning("NIXL %s: its progress thread is left as it is, and may take a core", found)
        return False
    for variant in VARIANTS:
        if importlib.util.find_spec(variant) is not None:
            _replace_config(importlib.import_module(f"{variant}._bindings"), delay_us)
    return True


def _replace_config(bindings: object, delay_us: int) -> None:
    original = bindings.nixlAgentConfig  # type: ignore[attr-defined]
    base = getattr(original, "rdt_e2e_base", original)

    class SleepingConfig(base):  # type: ignore[misc, valid-type]
        """The agent's configuration; whatever delay is asked for, ours is set."""

        rdt_e2e_base = base

        @property
        def pthrDelay(self) -> int:  # noqa: N802 - NIXL's own name
            """Delay of the progress thread, in microseconds."""
            delay: int = base.pthrDelay.fget(self)
            return delay

        @pthrDelay.setter
        def pthrDelay(self, _wanted: int) -> None:  # noqa: N802
            base.pthrDelay.fset(self, delay_us)

    bindings.nixlAgentConfig = SleepingConfig  # type: ignore[attr-defined]

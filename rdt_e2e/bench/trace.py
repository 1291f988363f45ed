"""Records when chosen methods of live objects run, and gives the objects back as they were."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rdt_e2e.profiling.hooks import Call as FinishedCall
from rdt_e2e.profiling.hooks import HookSet
from rdt_e2e.profiling.transport import nixl_transport
from rdt_e2e.trainer import producer as producer_module

Call = tuple[str, float, float]
"""Name, start and end of a call, in seconds of the machine's monotonic clock."""

TRANSPORT_METHODS = (
    "actor_has_tensor_transport",
    "extract_tensor_transport_metadata",
    "fetch_multiple_tensors",
    "wait_fetch_complete",
)
"""Methods of Ray's NIXL transport (2.60) that a pull goes through on either side."""


class Trace:
    """A recording in progress; safe from several threads.

    The monotonic clock is one per machine, so traces of processes on one host can be laid together.
    """

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._hooks = HookSet()

    def wrap(self, target: Any, methods: Sequence[str]) -> None:
        """Record these methods of an object, or functions of a module, where they exist."""
        for method in methods:
            if hasattr(target, method):
                self._hooks.wrap(target, method, self._note)

    def wrap_transport(self) -> None:
        """Record the stages of Ray's NIXL transport in this process."""
        self.wrap(nixl_transport(), TRANSPORT_METHODS)

    def stop(self) -> list[Call]:
        """Put every method back and return what was recorded, by start."""
        self._hooks.uninstall()
        return sorted(self._calls, key=lambda call: call[1])

    def _note(self, call: FinishedCall) -> None:
        # Appending to a list is one step to other threads.
        self._calls.append((call.stage, call.started, call.ended))


def total_seconds(calls: Iterable[Call]) -> dict[str, tuple[int, float]]:
    """Number of calls and their summed seconds, by name."""
    spent: dict[str, list[float]] = defaultdict(list)
    for name, started, ended in calls:
        spent[name].append(ended - started)
    return {name: (len(each), sum(each)) for name, each in sorted(spent.items())}


# Trainer ranks run these two by reference. They are here, because what they are defined in is imported
# there, and no trainer needs to import vLLM.


def start_producer_trace(worker: Any) -> None:
    """Record, in a trainer rank, how each pull is served."""
    worker.bench_trace = Trace()
    worker.bench_trace.wrap(producer_module, ("replay", "pack"))
    worker.bench_trace.wrap(worker._cache, ("get", "publish", "wait_for_room"))
    worker.bench_trace.wrap(worker._direct, ("_await_slot", "_pack"))
    worker.bench_trace.wrap_transport()


def take_producer_trace(worker: Any) -> list[Call]:
    """Stop recording in a trainer rank; calls by slice are left out, one per slice is too many."""
    calls: list[Call] = worker.bench_trace.stop()
    return [call for call in calls if call[0] != "replay"]

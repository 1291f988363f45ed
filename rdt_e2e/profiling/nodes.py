"""Ray tasks pinned to each node: they empty, read and remove a run's files there, and take samples.

However many nodes there are, each is asked on its own; one that does not answer is an entry with an
error, and the others' answers count.
"""

import functools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rdt_e2e.profiling.place import ROWS, Place
from rdt_e2e.profiling.reading import ClockOffset, NodeReading
from rdt_e2e.profiling.samplers import boot_id, sample_node

NUM_PINGS = 5
NODE_TIMEOUT_S = 60.0
"""Longest wait for one node's answer, in seconds."""


def this_node_id() -> str:
    """Ray's id of the node that this process runs on."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def empty_folder(place: Place, node_id: str) -> dict[str, Any]:
    """Runs on a node: begin with empty files, and sample."""
    folder = place.folder(node_id)
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob(ROWS):
        file.write_text("")
    return sample_node()


def read_folder(place: Place, node_id: str) -> tuple[dict[str, Any], list[str]]:
    """Runs on a node: sample, and every line of every file; no files are no lines."""
    sample = sample_node()
    lines: list[str] = []
    for file in sorted(place.folder(node_id).glob(ROWS)):
        lines += file.read_text(errors="replace").splitlines()
    return sample, lines


def remove_folder(place: Place, node_id: str) -> None:
    """Runs on a node: leave nothing behind."""
    shutil.rmtree(place.folder(node_id), ignore_errors=True)


def monotonic_time() -> float:
    """Runs on a node: its monotonic clock."""
    return time.monotonic()


Submit = Callable[..., Any]
"""Starts a function with arguments on a node, given by its id; returns a reference."""


def submit_to_node(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Start a function as a Ray task that runs on that node or fails."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return _task(function).options(scheduling_strategy=strategy).remote(*args)


@functools.cache
def _task(function: Callable[..., Any]) -> Any:
    """One Ray task per function: each one made anew is sent to the cluster again."""
    return ray.remote(num_cpus=0, max_retries=0)(function)


class Nodes:
    """Every node of the cluster that is alive now and has GPUs; ranks run nowhere else.

    Args:
        place: Where files lie on each.
        timeout_s: Longest wait for one round of answers.
        submit: Starts a function on a node; another one in tests.
        fetch: Waits for one reference, as `ray.get` with its `timeout`; another one in tests.
        listed: `ray.nodes()`; another list in tests.
    """

    def __init__(
        self,
        place: Place,
        *,
        timeout_s: float = NODE_TIMEOUT_S,
        submit: Submit = submit_to_node,
        fetch: Callable[..., Any] | None = None,
        listed: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._submit = submit
        self._fetch = ray.get if fetch is None else fetch
        nodes = ray.nodes() if listed is None else listed
        self.addresses = {
            node["NodeID"]: node["NodeManagerAddress"]
            for node in nodes
            if node["Alive"] and node.get("Resources", {}).get("GPU", 0) > 0
        }

    def begin(self) -> list[NodeReading]:
        """Empty the files of every node; the samples from before the sync."""
        return [
            NodeReading(node_id, address, error, {} if error else answer)
            for node_id, address, answer, error in self._ask_all(empty_folder)
        ]

    def read(self) -> list[NodeReading]:
        """Every node's lines, and the samples from after the sync."""
        return [
            NodeReading(node_id, address, error)
            if error
            else NodeReading(node_id, address, None, answer[0], answer[1])
            for node_id, address, answer, error in self._ask_all(read_folder)
        ]

    def remove(self, timeout_s: float) -> None:
        """Remove the run's files from every node that answers in time, in seconds."""
        self._ask_all(remove_folder, timeout_s)

    def clock_offset(self, node_id: str, node_boot_id: str) -> ClockOffset | None:
        """Compare a node's clock with this process's.

        The node reads its clock some time between the moments the question left and the answer came,
        so the middle of the fastest round trip is wrong by half of it at most.

        Args:
            node_id: The node.
            node_boot_id: From its sample.

        Returns:
            The offset; None when the node does not answer.
        """
        if node_boot_id and node_boot_id == boot_id():
            return ClockOffset(0.0, 0.0)
        best: ClockOffset | None = None
        for _ in range(NUM_PINGS):
            asked = time.monotonic()
            try:
                there = self._fetch(self._submit(node_id, monotonic_time), timeout=self._timeout_s)
            except Exception:  # noqa: BLE001 - a lost node fails in as many ways as Ray has errors
                return best
            answered = time.monotonic()
            error_s = (answered - asked) / 2
            if best is None or error_s < best.error_s:
                best = ClockOffset(there - (asked + answered) / 2, error_s)
        return best

    def _ask_all(
        self, function: Callable[..., Any], timeout_s: float | None = None
    ) -> list[tuple[str, str, Any, str | None]]:
        """Ask every node at once: (node id, address, answer, error)."""
        refs: dict[str, Any] = {}
        answers: dict[str, tuple[Any, str | None]] = {}
        for node_id in self.addresses:
            try:
                refs[node_id] = self._submit(node_id, function, self._place, node_id)
            except Exception as error:  # noqa: BLE001 - see clock_offset
                answers[node_id] = None, _last_line(error)
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        for node_id, ref in refs.items():
            try:
                left_s = max(0.0, deadline - time.monotonic())
                answers[node_id] = self._fetch(ref, timeout=left_s), None
            except Exception as error:  # noqa: BLE001 - see clock_offset
                answers[node_id] = None, _last_line(error)
        return [
            (node_id, address, *answers[node_id]) for node_id, address in self.addresses.items()
        ]


def _last_line(error: BaseException) -> str:
    """Ray puts a task's traceback before its error; the last line says what it was."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"

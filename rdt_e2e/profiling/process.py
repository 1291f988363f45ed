"""What the profile of a trainer rank and of an inference rank have in common: their file and row."""

import contextlib
import os
import socket
from collections.abc import Iterable
from typing import Any

from rdt_e2e.environment import NET_DEVICES
from rdt_e2e.profiling.hooks import HookSet
from rdt_e2e.profiling.lines import LineFile
from rdt_e2e.profiling.place import Place
from rdt_e2e.profiling.samplers import sample_process

MAX_REASON = 300
"""Longest reason of a column that is "n/a", in characters; a line has an upper bound."""


class ProcessProfile:
    """One process under watch.

    Attributes:
        place: What it was told.
        hooks: Its hooks.
        iteration: The sync under way.
    """

    role = ""
    columns: Iterable[str] = ()

    def __init__(self, place: Place, node_id: str, rank: int, device_type: str) -> None:
        self.place = place
        self.hooks = HookSet(keep_events=place.keeps_events)
        self.iteration = 0
        self.rank = rank
        self._device_type = device_type
        self._node_id = node_id
        self._file = LineFile(place.folder(node_id) / f"{self.role}-{rank}.jsonl")

    def begin(self, iteration: int) -> None:
        """Start anew for a sync: an empty file and sums of 0."""
        self.iteration = iteration
        self._file.restart()
        self.hooks.reset()
        self.write("memory", when="before", **sample_process(self._device_type))

    def end(self) -> None:
        """Write what the sync came to."""
        self.write("memory", when="after", **sample_process(self._device_type))
        values = self.hooks.values(tuple(self.columns), busy=self.is_busy())
        for column, reason in self.hooks.missing.items():
            self.write("missing", column=column, reason=reason[:MAX_REASON])
        for stage, thread, started, ended in self.hooks.events:
            self.write("event", stage=stage, thread=thread, span=(started, ended))
        self.write(
            "row",
            host=socket.gethostname(),
            pid=os.getpid(),
            nic=os.environ.get(NET_DEVICES),
            columns=values,
            # Of what was written before this line.
            num_dropped=self._file.num_dropped,
        )

    def stop(self) -> None:
        """Take every hook out; the file stays for the collection."""
        self.hooks.uninstall()
        self._file.close()

    def is_busy(self) -> bool:
        """Whether the sync since `begin` had work for this process."""
        return self.hooks.counters["pulls"] > 0

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record."""
        self._file.append(
            {
                "kind": kind,
                "iteration": self.iteration,
                "role": self.role,
                "rank": self.rank,
                "node": self._node_id,
                **fields,
            }
        )


def stop_quietly(profile: ProcessProfile | None) -> None:
    """Stop a profile that may not exist."""
    if profile is not None:
        with contextlib.suppress(OSError):
            profile.stop()

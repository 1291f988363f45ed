"""Where the files of a run's profile lie on a node's own disk."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROWS = "*.jsonl"
PROFILE_FILE = "profile.json"
"""The result, in the run directory."""


@dataclass(frozen=True)
class Place:
    """What every process of a run is told; it crosses processes.

    Attributes:
        base: Folder on every node; None for one below the system's folder of temporary files.
        run: Name of the run: two runs on one node keep apart by it.
        level: `summary` or `full`.
    """

    base: str | None
    run: str
    level: str

    def folder(self, node_id: str) -> Path:
        """Folder of one node. Local nodes share a disk, so the node is part of its name."""
        base = Path(tempfile.gettempdir(), f"rdt-e2e-profiles-{os.getuid()}")
        return Path(base if self.base is None else self.base, self.run, node_id)

    @property
    def keeps_events(self) -> bool:
        """Whether single calls are kept for the timeline, and phases waited for."""
        return self.level == "full"

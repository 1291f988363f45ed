"""The JSON-lines file a process appends to on its own node's disk, and reading such files back.

One `write` per line, with O_APPEND and below 4 KiB: lines of several threads do not mix.
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

RECORD_VERSION = 1
MAX_LINE_BYTES = 4096
"""Longest line, its end included; a longer one is dropped and counted."""


class LineFile:
    """Appends records; a full disk costs records, never the sync.

    Attributes:
        num_dropped: Records that could not be written since `restart`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._warned = False
        self._torn = False
        self.num_dropped = 0

    def restart(self) -> None:
        """Empty the file, creating it and its folder where needed."""
        self.num_dropped = 0
        self._torn = False
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o644)
            os.ftruncate(self._file, 0)
        except OSError as error:
            self._warn(error)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        line = json.dumps({"v": RECORD_VERSION, **record}, separators=(",", ":")).encode() + b"\n"
        if self._file is None or len(line) > MAX_LINE_BYTES:
            self.num_dropped += 1
            return
        try:
            # The rest of a line that did not fit: the next one must not be lost with it.
            whole = b"\n" + line if self._torn else line
            self._torn = os.write(self._file, whole) != len(whole)
            self.num_dropped += self._torn
        except OSError as error:
            self.num_dropped += 1
            self._warn(error)

    def close(self) -> None:
        """Close the file; it stays on disk."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            logger.warning("profile: %s cannot be written: %s", self._path, error.strerror)
        self._warned = True


def read_records(lines: Iterable[str], iteration: int) -> tuple[list[dict[str, Any]], int]:
    """Parse lines of one iteration.

    Args:
        lines: Lines of any number of files.
        iteration: Records of other iterations are left out: late writers of an earlier sync.

    Returns:
        The records, and the number of lines that are no record of a version known here.
    """
    records, num_damaged = [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            num_damaged += 1
            continue
        if not isinstance(record, dict) or record.get("v") != RECORD_VERSION:
            num_damaged += 1
        elif record.get("iteration") == iteration:
            records.append(record)
    return records, num_damaged

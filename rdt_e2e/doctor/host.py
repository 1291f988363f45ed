"""The machine as the checks see it: every look at it goes through a `Host`.

A test hands the checks a folder and canned answers instead. Nothing here writes, needs root or waits
longer than it was told to.
"""

import ctypes
import importlib.metadata
import mmap
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

COMMAND_TIMEOUT_S = 5.0
"""Longest wait for a program that a check runs, in seconds."""


@dataclass(frozen=True)
class CommandResult:
    """What came of running a program.

    Attributes:
        code: Exit status, negative for a signal; None when it is not installed or ran out of time.
        stdout: Its standard output.
        stderr: Its standard error; says so when there is no exit status.
    """

    code: int | None
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class Space:
    """Room on a file system, in bytes."""

    total_bytes: int
    free_bytes: int


class Host(Protocol):
    """A machine; `RealHost` is this one."""

    @property
    def root(self) -> Path:
        """Root of its file system."""

    @property
    def environ(self) -> Mapping[str, str]:
        """Environment of the process that asks."""

    @property
    def python(self) -> str:
        """The interpreter that a run would use."""

    def run(
        self,
        command: Sequence[str],
        timeout_s: float = COMMAND_TIMEOUT_S,
        environ: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a program that changes nothing; `environ` replaces this process's environment."""

    def which(self, program: str) -> str | None:
        """Where a program is, or None."""

    def limit(self, name: Literal["memlock", "nofile"]) -> int | None:
        """The soft limit of this process, in bytes or files; None when unlimited."""

    def can_lock(self, num_bytes: int) -> bool:
        """Whether memory of that size can be locked; it is unlocked again."""

    def space(self, path: Path) -> Space | None:
        """Room where a path is or will be; None when nothing of it exists."""

    def distributions(self) -> Mapping[str, str]:
        """Installed Python distributions with their versions, by normalised name."""

    def entry_points(self, group: str) -> Mapping[str, str]:
        """Entry points of a group: name to target."""

    def package_folder(self, module: str) -> Path | None:
        """Folder of an installed package, found without importing it."""

    def answers(self, address: str, port: int) -> str | None:
        """None when a TCP connection is accepted, else the reason in words."""


class RealHost:
    """This machine."""

    def __init__(self) -> None:
        self.root = Path("/")
        self.environ: Mapping[str, str] = os.environ
        self.python = sys.executable

    def run(
        self,
        command: Sequence[str],
        timeout_s: float = COMMAND_TIMEOUT_S,
        environ: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a program in a session of its own, so that what it starts ends with it."""
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            return CommandResult(None, stderr=f"{command[0]}: {error.strerror}")
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return CommandResult(None, stderr=f"no answer within {timeout_s:g} s")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        return CommandResult(process.returncode, stdout, stderr)

    def which(self, program: str) -> str | None:
        """Look on PATH, and beside the interpreter, where a virtual environment has its own."""
        beside = Path(sys.executable).parent
        return shutil.which(program) or shutil.which(program, path=str(beside))

    def limit(self, name: Literal["memlock", "nofile"]) -> int | None:
        """The soft limit."""
        kind = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}[name]
        soft, _ = resource.getrlimit(kind)
        return None if soft == resource.RLIM_INFINITY else soft

    def can_lock(self, num_bytes: int) -> bool:
        """Lock fresh memory for a moment."""
        libc = ctypes.CDLL(None, use_errno=True)
        with mmap.mmap(-1, num_bytes) as memory:
            view = (ctypes.c_char * num_bytes).from_buffer(memory)
            address = ctypes.c_void_p(ctypes.addressof(view))
            size = ctypes.c_size_t(num_bytes)
            locked: bool = libc.mlock(address, size) == 0
            if locked:
                libc.munlock(address, size)
            # The mapping cannot be closed while something points into it.
            del view
        return locked

    def space(self, path: Path) -> Space | None:
        """Ask the nearest folder that exists."""
        for folder in (path, *path.parents):
            try:
                usage = shutil.disk_usage(folder)
            except OSError:
                continue
            return Space(usage.total, usage.free)
        return None

    def distributions(self) -> Mapping[str, str]:
        """From the metadata on the interpreter's path; the first of a name wins, as on import."""
        found: dict[str, str] = {}
        for distribution in importlib.metadata.distributions():
            name = distribution.name
            if name:
                found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
        return found

    def entry_points(self, group: str) -> Mapping[str, str]:
        """From the metadata on the interpreter's path."""
        return {point.name: point.value for point in importlib.metadata.entry_points(group=group)}

    def package_folder(self, module: str) -> Path | None:
        """Where the package lies on the interpreter's path."""
        for entry in sys.path:
            folder = Path(entry or ".") / module
            if folder.is_dir():
                return folder
        return None

    def answers(self, address: str, port: int) -> str | None:
        """Connect and hang up."""
        try:
            with socket.create_connection((address, port), timeout=COMMAND_TIMEOUT_S):
                return None
        except OSError as error:
            return error.strerror or str(error)

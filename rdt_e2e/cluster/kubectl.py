"""kubectl, for what it does better than a library: render, apply, delete, and copy out of a pod."""

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from rdt_e2e.errors import EnvironmentCheckError

APPLY_TIMEOUT_S = 120.0
EXEC_TIMEOUT_S = 60.0
INSTALL = "https://kubernetes.io/docs/tasks/tools/"


@dataclass(frozen=True)
class Kubectl:
    """kubectl on one context.

    Attributes:
        context: Name of the context in the kubeconfig; None for its current one.
        program: The executable.
    """

    context: str | None = None
    program: str = "kubectl"

    def kustomize(self, folder: Path) -> str:
        """Render an overlay; no cluster is asked.

        Raises:
            EnvironmentCheckError: kubectl is missing or the overlay does not render.
        """
        # Overlays take the plain manifests from the folder above theirs.
        restrictor = "--load-restrictor=LoadRestrictionsNone"
        return self._run(["kustomize", restrictor, str(folder)], timeout_s=APPLY_TIMEOUT_S)

    def apply(self, documents: Sequence[dict[str, Any]]) -> list[str]:
        """Apply documents in their order; applying the same twice changes nothing.

        Returns:
            One line for each object: created, configured or unchanged.

        Raises:
            EnvironmentCheckError: The cluster refused one.
        """
        answer = self._run(["apply", "-f", "-"], _as_list(documents), APPLY_TIMEOUT_S)
        return answer.splitlines()

    def delete(self, documents: Sequence[dict[str, Any]]) -> list[str]:
        """Delete what exists of these documents, and wait until it is gone.

        Raises:
            EnvironmentCheckError: The cluster refused, or something does not go away in time.
        """
        command = ["delete", "--ignore-not-found", f"--timeout={APPLY_TIMEOUT_S:g}s", "-f", "-"]
        answer = self._run(command, _as_list(documents), APPLY_TIMEOUT_S + EXEC_TIMEOUT_S)
        return answer.splitlines()

    def list_folder(self, namespace: str, pod: str, folder: str) -> list[str]:
        """Names in a folder of a pod's first container; empty when it is not there."""
        script = 'if [ -d "$1" ]; then ls -1 "$1"; fi'
        command = ["exec", "-n", namespace, pod, "--", "bash", "-c", script, "bash", folder]
        return self._run(command, timeout_s=EXEC_TIMEOUT_S).splitlines()

    def fetch_folder(self, namespace: str, pod: str, folder: str, into: Path) -> int:
        """Copy a folder's contents out of a pod's first container.

        Args:
            namespace: The pod's namespace.
            pod: Name of the pod.
            folder: Folder in the pod; symbolic links to folders are followed.
            into: Local folder, created if needed.

        Returns:
            Files copied.

        Raises:
            EnvironmentCheckError: kubectl or tar failed; what had arrived by then stays.
        """
        command = self._command(
            ["exec", "-n", namespace, pod, "--", "tar", "-C", f"{folder}/", "-cf", "-", "."]
        )
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with process:
            if process.stdout is None or process.stderr is None:
                raise AssertionError("both streams are pipes")
            try:
                num_files = unpack(process.stdout, into)
            except tarfile.TarError as error:
                process.kill()
                reason = process.stderr.read().decode(errors="replace").strip() or str(error)
                raise EnvironmentCheckError(
                    f"{folder} of pod {pod}: not fetched: {reason}"
                ) from error
            reason = process.stderr.read().decode(errors="replace").strip()
            # 1 says that a file changed while it was read: logs do.
            if process.wait() not in (0, 1):
                raise EnvironmentCheckError(f"{folder} of pod {pod}: fetched in part: {reason}")
        return num_files

    def _command(self, arguments: Sequence[str]) -> list[str]:
        program = find_program(self.program)
        if program is None:
            raise EnvironmentCheckError(
                f"there is no {self.program} on PATH; install it, 1.30 or newer ({INSTALL}), or fetch the "
                "one that the tests use: `make kubectl`"
            )
        context = [] if self.context is None else [f"--context={self.context}"]
        return [program, *context, *arguments]

    def _run(self, arguments: Sequence[str], text: str | None = None, timeout_s: float = 60) -> str:
        command = self._command(arguments)
        shown = " ".join(["kubectl", *arguments[:2]])
        try:
            done = subprocess.run(
                command, input=text, capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as error:
            raise EnvironmentCheckError(
                f"{shown} did not end within {timeout_s:g} s; is the cluster reachable? Try "
                "`kubectl cluster-info`"
            ) from error
        if done.returncode != 0:
            reason = done.stderr.strip() or done.stdout.strip()
            raise EnvironmentCheckError(f"{shown} failed (status {done.returncode}): {reason}")
        return done.stdout


def find_program(name: str = "kubectl") -> str | None:
    """Where kubectl is: on PATH, or the one of `make kubectl`, beside the interpreter."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def unpack(stream: IO[bytes], into: Path) -> int:
    """Write the regular files of a tar stream below a folder; all else in it is left out.

    Args:
        stream: An uncompressed tar archive.
        into: Folder to write to.

    Returns:
        Files written.

    Raises:
        tarfile.TarError: It is not a tar archive, is cut short, or a name in it leaves the folder.
    """
    num_files = 0
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            # A pod is not trusted with our file system.
            if name.is_absolute() or ".." in name.parts:
                raise tarfile.TarError(f"the name {member.name!r} leads outside of the folder")
            if not member.isfile():
                continue
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            if content is None:
                continue
            with target.open("wb") as file:
                shutil.copyfileobj(content, file)
            num_files += 1
    return num_files


def _as_list(documents: Sequence[dict[str, Any]]) -> str:
    """Documents as one JSON list, which keeps their order."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(documents)})

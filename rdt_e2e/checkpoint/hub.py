"""Snapshots in a local hub cache: which revision is meant, without asking any server.

The cache keeps one folder for each repository, `models--<owner>--<name>`, with `snapshots/<commit>/`
(links into `blobs/`) and `refs/<branch or tag>`, a file that holds a commit. Nothing here writes, so a
cache may be read-only.
"""

from pathlib import Path

from rdt_e2e.checkpoint.naming import summarize
from rdt_e2e.errors import CheckpointError

DEFAULT_REVISION = "main"


def repository_folder(source: str) -> Path | None:
    """Find the folder of a hub repository in this machine's cache.

    Args:
        source: A hub id, `owner/name`, or the repository's folder itself.

    Returns:
        The folder; `None` when there is none, or `source` does not look like a hub id.
    """
    folder = Path(source).expanduser()
    if (folder / "snapshots").is_dir():
        return folder
    if source.count("/") > 1 or source.startswith((".", "/", "~")):
        return None
    # Imported here: it takes a second, and a plain folder does not need it.
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{source.replace('/', '--')}"
    return folder if (folder / "snapshots").is_dir() else None


def choose_snapshot(folder: Path, revision: str = DEFAULT_REVISION) -> Path:
    """Choose the snapshot of one revision.

    Args:
        folder: The repository's folder in the cache.
        revision: Branch, tag or commit (or the beginning of one).

    Returns:
        The snapshot's folder. For the default revision without a `refs/main` it is the only snapshot.

    Raises:
        CheckpointError: No snapshot is of that revision, or several could be meant.
    """
    names = sorted(path.name for path in (folder / "snapshots").iterdir() if path.is_dir())
    ref = folder / "refs" / revision
    wanted = revision
    if ref.is_file():
        wanted = ref.read_text(encoding="utf-8").strip()
    elif revision == DEFAULT_REVISION and len(names) == 1:
        return folder / "snapshots" / names[0]
    matches = [name for name in names if wanted and name.startswith(wanted)]
    if len(matches) == 1:
        return folder / "snapshots" / matches[0]
    found = f"snapshots there: {summarize(names)}" if names else "there is no snapshot"
    problem = f"{len(matches)} snapshots begin with" if matches else "no snapshot is of revision"
    raise CheckpointError(
        f"{folder}: {problem} {wanted!r} ({found}). Set model.revision to one of them, or download "
        f"revision {revision} again"
    )

"""From the configured model to a checkpoint folder on this machine's disk."""

from pathlib import Path

from rdt_e2e.checkpoint.hub import choose_snapshot, repository_folder
from rdt_e2e.config import MINI_KIMI, Config
from rdt_e2e.console import Console
from rdt_e2e.errors import CheckpointError


def find_checkpoint(config: Config, console: Console) -> Path:
    """Resolve `model.source`: build mini-kimi, take a folder, or look a hub id up offline.

    Args:
        config: The run's configuration.
        console: For the progress of a build.

    Returns:
        The checkpoint folder, absolute.

    Raises:
        CheckpointError: There is no such folder, and no such snapshot in the local hub cache.
    """
    source = config.model.source
    if source == MINI_KIMI:
        from rdt_e2e.mini_kimi import ensure_mini_kimi

        return ensure_mini_kimi(
            config.paths.cache_dir, config.model.variant, report=console.info
        ).resolve()
    return find_folder(source, config.model.revision)


def find_folder(source: str, revision: str) -> Path:
    """Find the folder of a checkpoint that is already on this machine.

    Args:
        source: A checkpoint folder, a hub id, or a repository's folder of a hub cache.
        revision: Branch, tag or commit, for the latter two.

    Returns:
        The folder, absolute. Of a snapshot, the links inside it are left as they are.

    Raises:
        CheckpointError: There is neither, or it is not clear which snapshot is meant.
    """
    folder = Path(source).expanduser()
    if folder.is_dir() and not (folder / "snapshots").is_dir():
        return folder.resolve()
    repository = repository_folder(source)
    if repository is not None:
        return choose_snapshot(repository, revision).resolve()
    raise CheckpointError(
        f"model.source={source} is neither a folder nor a snapshot in the local hub cache "
        f"(revision {revision}); nothing is downloaded by this program. Download it first, or give "
        "the folder"
    )

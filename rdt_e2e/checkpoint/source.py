"""From the configured model to a checkpoint folder on this machine's disk."""

from pathlib import Path

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
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder.resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(source, revision=config.model.revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        raise CheckpointError(
            f"model.source={source} is neither a folder nor a snapshot in the local hub cache "
            f"(revision {config.model.revision}); nothing is downloaded by this program. Download it "
            "first, or give the folder"
        ) from None
    return Path(found)

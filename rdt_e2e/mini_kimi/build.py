"""Find mini-kimi in the cache, or train it and put it there in one step."""

import contextlib
import dataclasses
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rdt_e2e.errors import CheckpointError
from rdt_e2e.mini_kimi import recipe

logger = logging.getLogger(__name__)

# Written last: a folder that holds it, with every file at its recorded size, is complete.
MANIFEST = "mini_kimi.json"
_LOCK_TIMEOUT_S = 900.0


def ensure_mini_kimi(
    cache_dir: Path,
    variant: str = "v1",
    *,
    report: Callable[[str], None] | None = None,
) -> Path:
    """Return the folder of a mini-kimi checkpoint, training it first if the cache lacks it.

    The folder is `<cache_dir>/mini-kimi/<variant>-<hash>`, the hash covering the whole recipe. A
    build happens in a hidden folder beside it and appears with one rename, under a file lock:
    processes that race get the same folder, and an interrupted build leaves nothing.

    Args:
        cache_dir: Root of the cache; created if needed.
        variant: A name in `recipe.VARIANTS`.
        report: Receives one line of progress now and then; the module's logger without it.

    Returns:
        A folder in the form Kimi K2 ships, plus `expected.json` (the reference text) and
        `mini_kimi.json` (how it was made).

    Raises:
        ConfigError: The variant is unknown.
        CheckpointError: The cache cannot be written, another process holds the lock for too long,
            or training did not reach the text; the message says what to do.
    """
    digest = recipe.recipe_hash(variant)
    report = report if report is not None else logger.info
    root = cache_dir.expanduser() / "mini-kimi"
    folder = root / f"{variant}-{digest}"
    if _is_complete(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{folder.name}.lock", report):
            if not _is_complete(folder):
                _build_atomically(folder, variant, report)
    except OSError as error:
        raise CheckpointError(
            f"the mini-kimi cache {root} cannot be written: {error}. Set paths.cache_dir to a "
            f"folder that this user can write to and that has 50 MB free."
        ) from error
    return folder


def _is_complete(folder: Path) -> bool:
    """Whether every file of a finished build is there at its size; headers are not looked at."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


@contextlib.contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the file lock of one folder; the system frees it when its process ends."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"another process is building {path.stem[1:]}; waiting for it")
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT_S)
        except Timeout as error:
            raise CheckpointError(
                f"waited {_LOCK_TIMEOUT_S:.0f} s for another process to build mini-kimi; it still "
                f"holds {path}. End that process and run again."
            ) from error
    try:
        yield
    finally:
        lock.release()


def _build_atomically(folder: Path, variant: str, report: Callable[[str], None]) -> None:
    """Build in a temporary folder and rename it; remove it whatever goes wrong."""
    # The lock is held, so a temporary folder of this name belongs to a build that was killed.
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        _build(work, variant, report)
        if folder.exists():
            report(f"replacing {folder}: a file in it is missing or cut short")
            shutil.rmtree(folder)
        work.chmod(0o755)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _build(work: Path, variant: str, report: Callable[[str], None]) -> None:
    """Train, write and check one variant in `work`; another seed if the check fails."""
    # Imported here so that a cached model costs no import of torch and transformers.
    from rdt_e2e.mini_kimi.model import checkpoint_weights, new_model
    from rdt_e2e.mini_kimi.reference import write_expected
    from rdt_e2e.mini_kimi.tokenizer import save_tokenizer, train_tokenizer
    from rdt_e2e.mini_kimi.train import seeded_and_limited, train
    from rdt_e2e.mini_kimi.write import write_checkpoint

    started = time.monotonic()
    training = recipe.TRAINING[variant]
    tokenizer = train_tokenizer(recipe.tokenizer_corpus())
    for attempt in range(training.attempts):
        seed = training.seed + attempt
        with seeded_and_limited(seed) as num_threads:
            report(f"training mini-kimi {variant} on {num_threads} CPU threads, seed {seed}")
            model = new_model(variant)
            train(model, tokenizer, variant, report, attempt=attempt)
            write_checkpoint(work, checkpoint_weights(model))
            save_tokenizer(tokenizer, work)
            try:
                margins = write_expected(work, tokenizer, variant)
                break
            except CheckpointError as error:
                if attempt + 1 == training.attempts:
                    raise
                report(f"{error} Trying another seed.")
    built_s = time.monotonic() - started
    _write_manifest(work, variant, {"seed": seed, "built_s": round(built_s, 1), "margins": margins})
    report(f"mini-kimi {variant} built in {built_s:.0f} s; margins: {margins}")


def _write_manifest(work: Path, variant: str, facts: dict[str, Any]) -> None:
    """Write how the folder was made and how large each of its files is."""
    manifest = {
        "variant": variant,
        "recipe_hash": recipe.recipe_hash(variant),
        "text_without_router_bias": recipe.MISSING_BIAS_CONTINUATION,
        **facts,
        "margins": dataclasses.asdict(facts["margins"]),
        "files": {path.name: path.stat().st_size for path in sorted(work.iterdir())},
    }
    (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")

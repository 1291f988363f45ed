"""`rdt-e2e report`: the reports of a run made again from its JSON, and runs compared."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rdt_e2e.errors import ConfigError
from rdt_e2e.profiling.compare import comparison_text
from rdt_e2e.profiling.html import html_comparison, html_report
from rdt_e2e.profiling.place import PROFILE_FILE
from rdt_e2e.profiling.text import text_report
from rdt_e2e.profiling.trace import trace_json

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
TEXT_FILE = "profile.txt"
TRACE_FILE = "trace.json"
HTML_FILE = "report.html"
COMPARISON_FILE = "comparison.html"
KNOWN_SCHEMAS = (1,)


class Lines(Protocol):
    """Where lines go: `rdt_e2e.console.Console`."""

    def info(self, line: str) -> None:
        """Print one line."""


def write_reports(folder: Path, console: Lines) -> None:
    """Make a finished run's reports and print the text; a run without a profile has none.

    Nothing here fails the run.

    Args:
        folder: The run directory, with `run.json`.
        console: Where to print.
    """
    if not (folder / PROFILE_FILE).is_file():
        return
    try:
        console.info(render(folder))
    except Exception as error:  # noqa: BLE001 - the syncs went as they went, report or not
        logger.warning("profile: no reports in %s: %s", folder, error)


def report(folders: Sequence[Path], console: Lines) -> int:
    """Make the reports of runs again; with two or more, compare them too.

    Args:
        folders: Run directories, the baseline first.
        console: Where to print.

    Returns:
        Exit status 0.

    Raises:
        ConfigError: A folder is no run directory, has no profile, or cannot be written.
    """
    texts = [_checked_render(folder) for folder in folders]
    if len(folders) == 1:
        console.info(texts[0])
        return 0
    profiles = [read_profile(folder) for folder in folders]
    console.info(comparison_text(profiles))
    target = folders[-1] / COMPARISON_FILE
    try:
        target.write_text(html_comparison(profiles))
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
    console.info(f"comparison {target}")
    return 0


def render(folder: Path) -> str:
    """Write text, trace and page beside `profile.json`.

    Returns:
        The text of the last sync, with the paths of the files; the text file has every sync.

    Raises:
        ConfigError: `profile.json` is missing or of another version.
        OSError: The folder cannot be written.
    """
    profile = read_profile(folder)
    (folder / TEXT_FILE).write_text(text_report(profile) + "\n")
    (folder / TRACE_FILE).write_text(trace_json(profile))
    (folder / HTML_FILE).write_text(html_report(profile, _read_run(folder)))
    return (
        f"{text_report(profile, last_only=True)}\n\n"
        f"text       {folder / TEXT_FILE} (every sync)\n"
        f"page       {folder / HTML_FILE}\n"
        f"trace      {folder / TRACE_FILE} (opens in ui.perfetto.dev)"
    )


def read_profile(folder: Path) -> dict[str, Any]:
    """Read `profile.json` of a run directory.

    Raises:
        ConfigError: It is missing, damaged or of another version.
    """
    path = folder / PROFILE_FILE
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; give a run directory whose run had "
            "profiling.level summary or full"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}; the run may have been cut short") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema not in KNOWN_SCHEMAS:
        raise ConfigError(
            f"{path}: schema {schema!r}, known are {', '.join(map(str, KNOWN_SCHEMAS))}; use the "
            "version of rdt-e2e that wrote it"
        )
    found: dict[str, Any] = content
    return found


def _checked_render(folder: Path) -> str:
    try:
        return render(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error


def _read_run(folder: Path) -> dict[str, Any]:
    """`run.json`, or nothing: the page then has no texts and no verdict."""
    try:
        content = json.loads((folder / RUN_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

"""The `rdt-e2e` program: read the command line, build the configuration, call one function.

What a verb needs is imported inside it, so that `--help` and a misspelt key answer at once, without
loading torch, Ray or vLLM.
"""

import atexit

from rdt_e2e.cli import bare, bench, examine, remote, run, settings
from rdt_e2e.cli.leaving import end_resource_tracker
from rdt_e2e.cli.program import app

__all__ = ["app", "bare", "bench", "examine", "main", "remote", "run", "settings"]


def main() -> None:
    """Run the program; the entry point of the `rdt-e2e` command."""
    atexit.register(end_resource_tracker)
    app()

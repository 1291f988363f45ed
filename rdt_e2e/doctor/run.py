"""The verb `doctor`: choose the checks, ask them, show what they found."""

import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rdt_e2e.config import Config
from rdt_e2e.console import Console
from rdt_e2e.doctor import pair_checks, registry, report
from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Check, Finding, Status, Theme, fail
from rdt_e2e.doctor.host import Host, RealHost
from rdt_e2e.doctor.pair_facts import PairFacts
from rdt_e2e.environment import apply_environment
from rdt_e2e.errors import ConfigError, RdtE2EError

logger = logging.getLogger(__name__)

EXIT_FAILED = 1


def ask(check: Check, context: Context) -> Finding:
    """Ask one check; a machine that it does not understand is a finding, not the end of the doctor."""
    try:
        return check.run(context)
    except Exception as error:
        logger.debug("check %s", check.id, exc_info=True)
        return fail(
            f"the check itself failed: {type(error).__name__}: {error}",
            "report it, with the output of rdt-e2e doctor --json",
        )


def examine(context: Context, theme: Theme, checks: Sequence[Check]) -> list[report.Result]:
    """Ask checks of a theme, one after another."""
    return [report.Result(theme, check, ask(check, context)) for check in checks]


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        groups: Groups of checks to keep; all when empty.
        at_build: Keep only what an image build can answer.
        with_pair: Measure between the two nodes as well.
        as_json: Print one JSON object.
        verbose: Print also what passed and what was skipped.
    """

    groups: tuple[str, ...] = ()
    at_build: bool = False
    with_pair: bool = False
    as_json: bool = False
    verbose: bool = False


def run_doctor(config: Config, stream: TextIO, options: Options, host: Host | None = None) -> int:
    """Examine a machine and print the findings.

    Args:
        config: What is to be run on it.
        stream: Where to print.
        options: What to ask, and how to print it.
        host: The machine; this one when none.

    Returns:
        Exit status: 0 when nothing failed (warnings are allowed), 1 when something did.

    Raises:
        ConfigError: There is no such group, or options that exclude one another.
    """
    if options.at_build and options.with_pair:
        raise ConfigError("command line: --image and --pair exclude one another; give one of them")
    chosen = registry.select(options.groups, at_build=options.at_build, with_pair=options.with_pair)
    machine = RealHost() if host is None else host
    context = Context(machine, config, at_build=options.at_build)
    printer = report.Printer(
        lambda line: stream.write(f"{line}\n"),
        terminal_width(),
        colour=stream.isatty(),
        verbose=options.verbose,
    )
    results = []
    for theme, checks in chosen:
        # The last theme: measuring puts the run's environment into this process.
        if theme is pair_checks.THEME:
            context.pair = _measure(config)
        found = examine(context, theme, checks)
        results += found
        if not options.as_json:
            printer.show_theme(found)
            stream.flush()
    if options.as_json:
        stream.write(f"{report.as_json(results)}\n")
    else:
        printer.show_total(results)
    # Ray's end of the process is not ours: what was found must be out before it.
    stream.flush()
    failed = any(result.finding.status is Status.FAIL for result in results)
    return EXIT_FAILED if failed else 0


def explain(check_id: str) -> str:
    """A check in full.

    Raises:
        ConfigError: There is no such check.
    """
    return report.explain(registry.find(check_id), terminal_width())


def terminal_width() -> int:
    """Columns of the terminal, or a fixed number where there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else report.DEFAULT_WIDTH


def _measure(config: Config) -> PairFacts | str:
    """What lies between the two nodes, or in one line why it cannot be told."""
    apply_environment(config)
    # Loads torch and Ray, which the other checks do without.
    from rdt_e2e.doctor.pair import measure_pair

    try:
        return measure_pair(config, Console(sys.stderr))
    except RdtE2EError as error:
        return str(error)
    except Exception as error:
        # A cluster that breaks under the measurement is a finding too.
        logger.debug("measuring between the nodes", exc_info=True)
        return f"{type(error).__name__}: {error}"

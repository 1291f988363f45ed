"""What every test shares: an environment that is put back, and marks by folder."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import markers
from tests.fault_table import fault_table, network_table

__all__ = ["fault_table", "network_table"]

# Ray reads its token mode when it is imported, which collecting some unit tests does.
os.environ.setdefault("RAY_AUTH_MODE", "token")
# A run in the background of a shell ignores Ctrl-C, and so would every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
FOR_ALL_TESTS = "RDT_E2E_SYNC__TRANSPORT"
"""The one option that a whole run may be given: the same tests over the other transport."""
# A case that is slow on a busy machine is not a failure.
settings.register_profile("rdt_e2e", deadline=None)
settings.load_profile("rdt_e2e")


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """Start without `RDT_E2E_*` variables but one, and put every variable back afterwards."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("RDT_E2E_") and name != FOR_ALL_TESTS:
            del os.environ[name]
    yield
    # Not clear() and update(): other threads (Ray's) must never see an empty environment.
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that say where the fault tables go, and which image is tested."""
    parser.addoption(
        "--fault-table", metavar="FILE", help="document to write the tables of faults into"
    )
    parser.addoption("--image", metavar="NAME", help="test this image of podman's, and build none")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and skip those whose devices are not here."""
    root = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(root).parts[0]
        if folder in markers.FOLDER_MARKS:
            item.add_marker(folder)
    markers.skip_without_devices(items)

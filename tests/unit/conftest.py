"""What the unit tests share: no value of a site, also after tests of the real stack in one session."""

import pytest

from rdt_e2e.environment import SITE_VARIABLES


@pytest.fixture(autouse=True)
def no_site_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the owner of a cluster may have set, and what the live fleets' driver has."""
    for name in SITE_VARIABLES:
        monkeypatch.delenv(name, raising=False)

"""The image, built once for all tests, and the compose project brought up from it."""

from collections.abc import Iterator, Mapping

import pytest

from tests.containers import base
from tests.containers.project import Project, running_project


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Environment of podman and buildah; skips where they are not here."""
    reason = base.missing()
    if reason:
        pytest.skip(reason)
    return base.podman_environment(tmp_path_factory.mktemp("podman"))


@pytest.fixture(scope="session")
def image(
    request: pytest.FixtureRequest,
    podman: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """Name of the cpu image, built from the Dockerfile as it is now unless `--image` names one."""
    given: str | None = request.config.getoption("--image")
    if given is not None:
        return given
    base.build_image("cpu", tmp_path_factory.mktemp("build"), podman)
    return base.image_name("cpu")


@pytest.fixture(scope="session")
def project(
    podman: Mapping[str, str], image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    """The three nodes, up and healthy."""
    del image  # Built first.
    with running_project(tmp_path_factory.mktemp("compose"), podman) as running:
        yield running

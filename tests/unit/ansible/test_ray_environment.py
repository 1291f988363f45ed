"""The environment of Ray's nodes is the package's own: the playbooks copy it and never drift from it."""

import pytest
import yaml

from rdt_e2e.config import load_config
from rdt_e2e.environment import ray_environment
from tests.ansible_modules import ANSIBLE

RAY_CLUSTER = {"cluster.address": "10.0.0.1:6379"}


@pytest.fixture
def playbooks():
    return yaml.safe_load((ANSIBLE / "group_vars/all/environment.yml").read_text())


def test_gpu_hosts_have_what_the_package_sets(playbooks, monkeypatch):
    # A site's own values would be left out by the package; here there is no site.
    for name in playbooks["ray_environment"]:
        monkeypatch.delenv(name, raising=False)
    assert playbooks["ray_environment"] == ray_environment(load_config("kimi-k2", RAY_CLUSTER))


def test_cpu_hosts_have_what_the_package_sets(playbooks):
    together = playbooks["ray_environment"] | playbooks["ray_environment_cpu"]
    assert together == ray_environment(load_config("local"))

"""Image and compose file for real: two nodes in containers of their own, and a job that syncs across them.

The tests share one deployment and run in this order; each leaves it able to sync again.
"""

import json
import re

import pytest

from rdt_e2e.cluster.compose import NODES
from rdt_e2e.config import load_config
from rdt_e2e.environment import ray_environment
from tests.containers.project import output

# A build from nothing, and three jobs of which each starts vLLM.
pytestmark = pytest.mark.timeout(3000)

SLOW = "32mbit"
"""Of the trainer's link: a sync then takes seconds, and can be met in its middle."""
ENDS_S = 300.0
"""The longest that a job may go on after a node is lost: its own limits, and stopping what is left."""


def run_in_image(podman, image, script, *options):
    command = ("podman", "run", "--rm", "--network", "none", *options, "--entrypoint", "bash")
    return output(*command, image, "-euc", script, environment=podman)


def test_image_runs_as_any_user_of_group_0(podman, image):
    script = "id -u; rdt-e2e doctor --image >/tmp/said || { cat /tmp/said >&2; exit 1; }; touch /runs/x ~/x"
    for user in ("1000:0", "4711:0"):
        assert run_in_image(podman, image, script, "--user", user) == f"{user[:4]}\n"


def test_image_holds_nothing_of_the_build(podman, image):
    # What a build mounts leaves an empty file or folder.
    left = (
        "find /var/cache/uv /var/cache/rdt-e2e /root/.cache /home/ray/.cache /var/lib/apt/lists "
        "/tmp /etc/pip.conf /run -type f -size +0 2>/dev/null || true"
    )
    assert run_in_image(podman, image, left, "--user", "0") == ""
    held = run_in_image(podman, image, "cd /opt/rdt-e2e; ls -A; cat packages.json")
    names, _, packages = held.partition("{")
    assert not {".secrets", ".git", "tests", "runs"} & set(names.split())
    installed = {one["metadata"]["name"] for one in json.loads("{" + packages)["installed"]}
    assert {"rdt-e2e", "ray", "torch", "nixl-cu12"} <= installed
    assert "nixl-cu13" not in installed


def test_image_keeps_its_health_check(podman, image):
    (found,) = json.loads(output("podman", "inspect", image, environment=podman))
    assert found["Healthcheck"]["Test"] == ["CMD", "/opt/rdt-e2e/containers/node.sh", "health"]
    assert found["User"] == "1000"


def test_nodes_have_one_environment_and_no_token_in_it(project):
    wanted = ray_environment(load_config("local"))
    for node in NODES:
        held = project.inside(node, "tr '\\0' '\\n' </proc/1/environ")
        assert (
            dict(line.split("=", 1) for line in held.splitlines() if "=" in line).items()
            >= wanted.items()
        )
        token = project.inside(node, "cat /run/secrets/ray-token")
        assert token
        assert token not in held
        assert token not in project.podman("logs", project.container(node))


def lose(project, node):
    """Kill a node in the middle of a job's second sync; the error that the job ends with."""
    with project.job() as job, project.limited("trainer", SLOW):
        project.await_pulls(job)
        project.kill(node)
        assert job.end(ENDS_S) != 0
    return job.error


def test_trainer_lost_in_the_middle_of_a_sync(project):
    # Its first sync is that of a fresh deployment, across its containers.
    said = lose(project, "trainer")
    assert "trainer" in said
    project.deploy()


def test_inference_node_lost_in_the_middle_of_a_sync(project):
    # Its first sync is the one after the trainer came back.
    said = lose(project, "inference")
    assert "container inference ended" in said
    project.deploy()


def test_sync_across_the_containers_once_both_have_returned(project):
    with project.job() as job:
        assert job.end() == 0, job.output
    assert re.search(r"^verdict +PASS$", job.output, re.MULTILINE), job.output
    assert job.output.count("every tensor of every rank is what the checkpoint gives") == 2
    folder = project.newest_run()
    run = json.loads((folder / "run.json").read_text())
    addresses = {role: project.address(role) for role in ("trainer", "inference")}
    assert run["nodes"] == addresses
    assert len(set(addresses.values())) == 2
    profile = json.loads((folder / "profile.json").read_text())
    for iteration in profile["iterations"]:
        assert not iteration["problems"]
        # Each container has a disk of its own, so these were fetched from two.
        assert {node["address"] for node in iteration["nodes"]} == set(addresses.values())
        assert all(node["error"] is None and node["processes"] for node in iteration["nodes"])
        assert {one["node"] for one in iteration["producers"]} == {addresses["trainer"]}
        assert {one["node"] for one in iteration["consumers"]} == {addresses["inference"]}
    for role in addresses:
        assert project.inside(role, "ls /tmp | grep rdt-e2e-profiles || true").split() in (
            [],
            ["rdt-e2e-profiles-1000"],
        )

"""The pods that Kubernetes would run for the `cpu` overlay, and a real sync across them."""

import json

import pytest

from rdt_e2e.cluster.kubectl import find_program
from tests.containers.kube_pods import running_pods

pytestmark = [
    # Three Ray nodes, two fleets and a sync, on few cores.
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_program() is None, reason="needs kubectl: `make kubectl`"),
]


@pytest.fixture(scope="module")
def pods(podman, image, tmp_path_factory):
    with running_pods(tmp_path_factory.mktemp("kube"), image, podman) as running:
        yield running


def test_pods_have_the_identity_and_limits_of_the_manifests(pods):
    for role in ("head", "trainer", "inference"):
        assert pods.inside(role, "id -u; id -g").split() == ["1000", "0"]
        held = dict(
            line.split(":\t") for line in pods.inside(role, "cat /proc/1/status").splitlines()
        )
        assert int(held["CapEff"], 16) == 0
        assert held["NoNewPrivs"] == "1"
    variables = pods.inside("trainer", "env").splitlines()
    assert "UCX_TLS=tcp,self" in variables
    assert "RAY_AUTH_MODE=token" in variables


def test_doctor_ran_before_ray_did(pods):
    for role in ("trainer", "inference"):
        log = pods.log(role)
        assert log.index("NIXL and UCX: ") < log.index("Ray runtime started")


def test_dashboard_refuses_a_caller_without_the_token(pods):
    ask = "wget -q -O- --tries=1 --timeout=10 {} http://127.0.0.1:8265/api/jobs/ || echo refused $?"
    assert "refused" in pods.inside("head", ask.format(""))
    header = '--header="Authorization: Bearer $RAY_AUTH_TOKEN"'
    assert "refused" not in pods.inside("head", ask.format(header))


def test_sync_job_passes_across_the_pods(pods, tmp_path):
    status, log = pods.run_job("mini-kimi")
    assert status == 0, log
    assert "PASS" in log
    (run,) = pods.inside("inference", "ls -1 /runs").split()
    pods.fetch("inference", f"/runs/{run}", tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["verdict"] == "PASS"
    assert (tmp_path / "profile.txt").exists()
    assert record["config"]["cluster"]["address"] == "rdt-e2e-head-svc:6379"

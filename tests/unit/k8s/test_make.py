"""`make deploy`, `make sync` and `make down` as typed, with real kubectl, against the emulated cluster.

What runs inside the pods is made up: the job's output, and the files that it leaves.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.k8s.emulated_cluster import (
    CRDS,
    DEPLOYMENTS,
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
    EmulatedCluster,
    served,
    write_client,
)
from tests.unit.k8s.variants import ROOT, needs_kubectl

pytestmark = [
    needs_kubectl,
    pytest.mark.skipif(shutil.which("make") is None, reason="needs make"),
    # kmock 0.8 reads its own data the old way.
    pytest.mark.filterwarnings("ignore:read_binary is deprecated:DeprecationWarning"),
]


@pytest.fixture
def cluster(tmp_path):
    """An emulated cluster without KubeRay and without nodes."""
    emulated = EmulatedCluster()
    emulated.prepare(tmp_path / "pods")
    return emulated


def install(cluster, *, gpus="8", labels=True):
    """Give the cluster what the deployment needs."""
    for plural in ("rayclusters", "rayjobs"):
        versions = [{"name": "v1", "served": True, "storage": True}]
        names = {"plural": plural, "kind": "x"}
        spec = {"group": "ray.io", "scope": "Namespaced", "names": names, "versions": versions}
        cluster.hold(CRDS, f"{plural}.ray.io", {"spec": spec})
    container = {"name": "operator", "image": "kuberay/operator:v1.7.0"}
    spec = {"selector": {}, "template": {"spec": {"containers": [container]}}}
    operator = {
        "metadata": {"labels": {"app.kubernetes.io/name": "kuberay-operator"}},
        "spec": spec,
        "status": {"readyReplicas": 1},
    }
    cluster.hold(DEPLOYMENTS, "kuberay-operator", operator, "kuberay-system")
    offered = {"cpu": "192", "memory": "2000Gi", "nvidia.com/gpu": gpus, "rdma/ib": "1"}
    for name, role in (("node-a", "trainer"), ("node-b", "inference")):
        marks = {"labels": {"rdt-e2e/role": role} if labels else {}}
        cluster.hold(
            NODES, name, {"metadata": marks, "spec": {}, "status": {"allocatable": offered}}
        )


def run(cluster, folder, *calls):
    """Run `make` once for each call on the cluster; what each returned and printed.

    A function among the calls is called in its turn.
    """

    def work(url):
        variables = write_client(folder, url, str(shutil.which("kubectl")))
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | variables | {"PATH": path}
        for one in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL"):
            environment.pop(one, None)  # What an outer `make test` was given is not for this one.
        # The environment that runs the tests, as it is.
        fixed = ["make", "-C", str(ROOT), "-s", "-o", "setup", f"BIN={Path(sys.executable).parent}"]
        done = []
        for call in calls:
            if callable(call):
                call()
                continue
            command = [*fixed, "TARGET=k8s", "CONTEXT=emulated", *call]
            done.append(
                subprocess.run(
                    command, capture_output=True, text=True, timeout=120, env=environment
                )
            )
        return done

    return asyncio.run(served(cluster, work))


def test_empty_cluster_is_told_what_it_lacks(cluster, tmp_path):
    (done,) = run(cluster, tmp_path, ["deploy"])
    assert done.returncode != 0
    assert done.stdout.count("missing: ") == 5
    # One command mends three of them.
    assert done.stdout.count("\n  fix: ") == 3
    assert "fix: helm upgrade --install kuberay-operator" in done.stdout
    assert "fix: kubectl label node NODE rdt-e2e/role=inference" in done.stdout
    assert "lacks 5 things" in done.stderr
    assert cluster.names(NAMESPACES) == []


def test_deploy_sync_and_down(cluster, tmp_path):
    install(cluster)
    arguments = f"ARGS=--runs {tmp_path / 'runs'}"
    first, again, sync, down, nothing = run(
        cluster, tmp_path, ["deploy"], ["deploy"], ["sync", arguments], ["down"], ["down"]
    )
    assert first.returncode == 0, first.stdout + first.stderr
    assert "namespace/rdt-e2e created" in first.stdout
    assert "  trainer: Pending\n" in first.stdout
    assert first.stdout.endswith("the RayCluster rdt-e2e is ready: head, trainer, inference\n")

    assert again.returncode == 0, again.stdout + again.stderr
    words = {line.rsplit(maxsplit=1)[-1] for line in again.stdout.splitlines() if "/" in line}
    # The one that kubectl always calls configured: see test_emulator.
    assert "created" not in words
    assert again.stdout.count(" configured") <= 1

    assert sync.returncode == 0, sync.stdout + sync.stderr
    assert "verdict   PASS" in sync.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "profile.txt").read_text() == "profile of the inference node"
    assert (folder / "nodes/trainer/profile.txt").read_text() == "of the trainer"
    assert (folder / "nodes/trainer/ray-logs/raylet.out").read_text() == "raylet of trainer"
    assert (folder / "nodes/inference/ray-logs/raylet.out").read_text() == "raylet of inference"

    assert down.returncode == 0, down.stdout + down.stderr
    assert 'namespace "rdt-e2e" deleted' in down.stdout
    assert "nothing was deployed" in nothing.stdout
    left = {kind for (kind, _, _), held in cluster.objects.items() if not held.deleted}
    assert left == {CRDS, DEPLOYMENTS, NODES}


def test_failed_job_fails_make_and_its_results_are_here(cluster, tmp_path):
    install(cluster)
    cluster.fails = True
    arguments = f"ARGS=--runs {tmp_path / 'runs'}"
    deploy, sync = run(cluster, tmp_path, ["deploy"], ["sync", arguments])
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    assert sync.returncode != 0
    assert "what arrived is wrong" in sync.stderr
    assert list((tmp_path / "runs").glob("*/run.json"))


def test_pending_pod_says_why(cluster, tmp_path):
    install(cluster)
    cluster.stuck = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu."
    (done,) = run(cluster, tmp_path, ["deploy", "ARGS=--timeout 1"])
    assert done.returncode != 0
    assert "not ready after 1 s: " in done.stderr
    assert "; trainer: not scheduled: 0/2 nodes are available" in done.stderr
    assert "something else holds the GPUs" in done.stderr


def test_down_leaves_what_others_put_there(cluster, tmp_path):
    install(cluster)

    def others():
        cluster.hold(SECRETS, "huggingface", {"type": "Opaque"}, "rdt-e2e")
        cluster.hold(PODS, "other", {"metadata": {"labels": {}}, "status": {}}, "rdt-e2e")

    deploy, down = run(cluster, tmp_path, ["deploy"], others, ["down"])
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    assert down.returncode == 0, down.stdout + down.stderr
    assert "stays: it still holds pod/other, secret/huggingface" in down.stdout
    assert cluster.names(NAMESPACES) == ["rdt-e2e"]
    assert cluster.names(PODS) == ["other"]

"""Real kubectl and the official client, through the deployment's own code, against the emulated cluster."""

import asyncio
import json
import shutil
import socket
import subprocess

import pytest

from rdt_e2e.cluster.kube_api import OfficialApi, contexts
from rdt_e2e.cluster.kubectl import Kubectl
from rdt_e2e.errors import EnvironmentCheckError
from tests.unit.k8s.emulated_cluster import EmulatedCluster, served, write_client
from tests.unit.k8s.variants import K8S, needs_kubectl

pytestmark = [
    needs_kubectl,
    # kmock 0.8 reads its own data the old way.
    pytest.mark.filterwarnings("ignore:read_binary is deprecated:DeprecationWarning"),
]


@pytest.fixture
def cluster(tmp_path):
    """An emulated cluster in which nobody runs."""
    emulated = EmulatedCluster()
    emulated.prepare(tmp_path / "pods")
    return emulated


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """Makes a `Kubectl` for the emulator's address."""

    def at(url):
        for name, value in write_client(tmp_path, url, str(shutil.which("kubectl"))).items():
            monkeypatch.setenv(name, value)
        return Kubectl("emulated", str(tmp_path / "bin" / "kubectl"))

    return at


@pytest.fixture
def unused_port():
    """A port of the loopback address on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def budget(client):
    """The disruption budget as the server has it."""
    command = ["get", "-n", "rdt-e2e", "poddisruptionbudget", "ray-nodes", "-o", "json"]
    found = subprocess.run([client.program, *command], check=True, capture_output=True, text=True)
    return json.loads(found.stdout)["spec"]


def words(lines):
    return {line.rsplit(maxsplit=1)[-1] for line in lines}


# The overlay with a kind of its own, too.
@pytest.mark.parametrize("overlay", [None, "dra"])
def test_apply_apply_again_and_delete(overlay, rendered, jobs, cluster, kubectl):
    documents = [*rendered(overlay), *jobs.values()]

    def work(url):
        client = kubectl(url)
        first, before = client.apply(documents), budget(client)
        second, after = client.apply(documents), budget(client)
        on_server = subprocess.run(
            [client.program, "--context=emulated", "apply", "--server-side", "-f", "-"],
            input=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}),
            capture_output=True,
            text=True,
        )
        gone, again = client.delete(documents), client.delete(documents)
        return (first, before), (second, after), on_server, gone, again

    (first, before), (second, after), on_server, gone, again = asyncio.run(served(cluster, work))
    assert len(first) == len(documents)
    assert words(first) == {"created"}
    # kubectl replaces a budget's selector whole each time, and says so; it stays the same.
    changed = [one for one in second if not one.endswith(" unchanged")]
    assert changed == ["poddisruptionbudget.policy/ray-nodes configured"]
    assert before == after
    assert before["selector"]["matchLabels"]
    assert on_server.returncode == 0, on_server.stderr
    assert words(on_server.stdout.splitlines()) == {"serverside-applied"}
    assert len(gone) == len(documents)
    assert again == []


def test_folder_is_applied_as_the_readme_says(cluster, kubectl):
    def work(url):
        command = [kubectl(url).program, "apply", "-f", str(K8S)]
        return [subprocess.run(command, capture_output=True, text=True) for _ in range(2)]

    first, second = asyncio.run(served(cluster, work))
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert lines[0] == "namespace/rdt-e2e created"
    assert lines[-1] == "raycluster.ray.io/rdt-e2e created"
    assert second.returncode == 0, second.stderr
    # Neither the jobs nor the overlays below the folder.
    assert words(second.stdout.splitlines()) <= {"unchanged", "configured"}
    assert len(second.stdout.splitlines()) == len(lines) == 17


def test_questions_through_the_official_client(rendered, jobs, cluster, kubectl):
    documents = [one for one in rendered(None) if one["kind"] == "RayCluster"]

    def work(url):
        kubectl(url).apply(documents)
        api = OfficialApi("emulated")
        missing = api.ray_object("rayjobs", "rdt-e2e", "sync")
        api.create_ray_job("rdt-e2e", jobs["sync"])
        job = api.ray_object("rayjobs", "rdt-e2e", "sync")
        cluster = api.ray_object("rayclusters", "rdt-e2e", "rdt-e2e")
        return contexts(), missing, job, cluster, api.namespace("other"), api.crd("rayjobs.ray.io")

    known, missing, job, cluster, namespace, crd = asyncio.run(served(cluster, work))
    assert known == (["emulated"], "emulated")
    assert (missing, namespace, crd) == (None, None, None)
    assert job["spec"]["entrypoint"] == jobs["sync"]["spec"]["entrypoint"]
    assert cluster["metadata"]["name"] == "rdt-e2e"


def test_cluster_that_does_not_answer_is_named(kubectl, unused_port):
    kubectl(f"http://127.0.0.1:{unused_port}")
    with pytest.raises(EnvironmentCheckError, match=rf"127\.0\.0\.1:{unused_port} does not answer"):
        OfficialApi("emulated").nodes()


def test_no_kubeconfig_is_an_error_with_a_fix(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(EnvironmentCheckError, match="set KUBECONFIG"):
        contexts()

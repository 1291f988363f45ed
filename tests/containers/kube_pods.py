"""The Kubernetes pods of the `cpu` overlay on this machine, by `podman kube play`.

The pods are those that KubeRay would make (tests/kuberay_pods.py), with their init container, user,
capabilities, memory limits, token, environment and volumes. What podman 4.3 takes otherwise is adapted:

- No ports: it would bind them on this machine. Between pods all are open without.
- No probes: it would run them by systemd timers. The readiness probe's command is run from here.
- `restartPolicy: Never`: with another, it starts an init container that has ended again and again.
- The head's service becomes an entry in the workers' /etc/hosts: there are no services.
- A memory-backed `emptyDir` becomes a folder of this machine's /dev/shm: `medium` is not honoured, and so
  its size limit is not either.
- Only limits, no requests; a CPU limit only below one core, which all of these machines have.
- The token's Secret is podman's own, in the form in which it keeps one.
"""

import base64
import contextlib
import copy
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rdt_e2e.cluster.kube_checks import quantity
from rdt_e2e.cluster.kube_manifests import (
    Document,
    load_job,
    load_manifests,
    ray_cluster,
    with_image,
)
from rdt_e2e.cluster.kubectl import Kubectl, unpack
from tests.containers.base import restored_network
from tests.kuberay_pods import head_service, ray_pods, submitter_pod

READY_TIMEOUT_S = 400.0
JOB_TIMEOUT_S = 900.0
CALL_TIMEOUT_S = 120.0


class KubePods:
    """The three Ray pods, on a network of their own.

    Attributes:
        documents: The rendered overlay.
        mark: What all names begin with.
    """

    def __init__(self, folder: Path, image: str, environment: Mapping[str, str]) -> None:
        documents = load_manifests("cpu", Kubectl())
        self.documents = [with_image(one, image) for one in documents]
        self.mark = f"rdt-e2e-kube-{os.getpid()}"
        self._image = image
        self._folder = folder
        self._environment = environment
        self._shm = Path("/dev/shm", self.mark)

    def start(self) -> None:
        """Start head and workers as an operator would, and wait until each is ready."""
        self.podman("network", "create", self.mark)
        token = base64.b64encode(os.urandom(24).hex().encode()).decode()
        self.podman(
            "secret", "create", self.mark, "-", stdin=json.dumps({"auth_token": token}).encode()
        )
        for role, pod in ray_pods(self.documents).items():
            self._play(role, pod)

    def wait_until_ready(self) -> None:
        """Run each pod's readiness probe until it passes."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        for role, pod in ray_pods(self.documents).items():
            command = pod["spec"]["containers"][0]["readinessProbe"]["exec"]["command"]
            while self._run("exec", self.container(role), *command).returncode != 0:
                state = self.podman("inspect", "-f", "{{.State.Status}}", self.container(role))
                assert state.strip() == "running", f"{role} is {state}:\n{self.log(role)}"
                assert time.monotonic() < deadline, f"{role} is not ready:\n{self.log(role)}"
                time.sleep(1)

    def run_job(self, name: str) -> tuple[int, str]:
        """Run a job of `k8s/jobs` by its submitter's pod; the pod's exit status, and its log."""
        job = load_job(name, run_name="job", image=self._image)
        pod = submitter_pod(job, ray_cluster(self.documents), self.mark)
        self._play("job", pod)
        status = self.podman("wait", self.container("job"), timeout_s=JOB_TIMEOUT_S)
        return int(status), self.log("job")

    def inside(self, role: str, script: str) -> str:
        """Run a shell script in a pod's container."""
        return self.podman("exec", self.container(role), "bash", "-euc", script)

    def fetch(self, role: str, folder: str, into: Path) -> None:
        """Copy a folder out of a pod, as the deployment does with kubectl."""
        command = [
            "podman",
            "exec",
            self.container(role),
            "tar",
            "-C",
            f"{folder}/",
            "-cf",
            "-",
            ".",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env=dict(self._environment)
        ) as process:
            assert process.stdout is not None
            unpack(process.stdout, into)

    def container(self, role: str) -> str:
        """Name of the container in the pod of a role."""
        name = {"head": "ray-head", "job": "ray-job-submitter"}.get(role, "ray-worker")
        return f"{self.mark}-{role}-{name}"

    def log(self, role: str) -> str:
        """What a pod's container has written."""
        done = self._run("logs", self.container(role))
        return (done.stdout + done.stderr).decode(errors="replace")

    def podman(self, *arguments: str, stdin: bytes = b"", timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Standard output of a podman command that must succeed."""
        done = self._run(*arguments, stdin=stdin, timeout_s=timeout_s)
        assert done.returncode == 0, f"podman {arguments}: {done.stderr.decode(errors='replace')}"
        return done.stdout.decode(errors="replace")

    def close(self) -> None:
        """Remove everything that has the mark."""
        for role in ("job", "inference", "trainer", "head"):
            self._run("pod", "rm", "-f", "-t", "5", f"{self.mark}-{role}")
        volumes = self.podman("volume", "ls", "-q").split()
        for volume in [one for one in volumes if one.startswith(self.mark)]:
            self.podman("volume", "rm", "-f", volume)
        self._run("secret", "rm", self.mark)
        self._run("network", "rm", "-f", self.mark)
        shutil.rmtree(self._shm, ignore_errors=True)

    def _run(
        self, *arguments: str, stdin: bytes = b"", timeout_s: float = CALL_TIMEOUT_S
    ) -> "subprocess.CompletedProcess[bytes]":
        command = ["podman", *arguments]
        return subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            env=dict(self._environment),
            timeout=timeout_s,
        )

    def _play(self, role: str, pod: Document) -> None:
        maps = [one for one in self.documents if one["kind"] == "ConfigMap"]
        documents = [*map(self._renamed_map, maps), self._adapted(role, pod)]
        path = self._folder / f"{role}.yaml"
        path.write_text(yaml.safe_dump_all(documents))
        self.podman(*("kube", "play", "--network", self.mark, str(path)), timeout_s=READY_TIMEOUT_S)

    def _renamed_map(self, config_map: Document) -> Document:
        # One that is mounted becomes a volume of its name, which would outlive the test.
        return config_map | {"metadata": {"name": f"{self.mark}-{config_map['metadata']['name']}"}}

    def _adapted(self, role: str, pod: Document) -> Document:
        pod = copy.deepcopy(pod)
        pod["metadata"]["name"] = f"{self.mark}-{role}"
        spec = pod["spec"]
        spec["restartPolicy"] = "Never"
        if role != "head":
            service = head_service(ray_cluster(self.documents))
            names = [service, service.partition(".")[0]]
            spec["hostAliases"] = [{"ip": self._address("head"), "hostnames": names}]
        for volume in spec.get("volumes", []):
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                shared = self._shm / role
                shared.mkdir(parents=True)
                # As an emptyDir: every user may write.
                shared.chmod(0o777)
                del volume["emptyDir"]
                volume["hostPath"] = {"path": str(shared), "type": "Directory"}
            elif "configMap" in volume:
                volume["configMap"]["name"] = f"{self.mark}-{volume['configMap']['name']}"
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            self._adapt_container(container)
        return pod

    def _adapt_container(self, container: dict[str, Any]) -> None:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            container.pop(probe, None)
        container.pop("ports", None)
        container["imagePullPolicy"] = "Never"
        limits = container["resources"].pop("limits")
        container["resources"] = {"limits": limits}
        if quantity(limits["cpu"]) >= 1:
            del limits["cpu"]
        for source in container.get("envFrom", []):
            source["configMapRef"]["name"] = f"{self.mark}-{source['configMapRef']['name']}"
        for variable in container.get("env", []):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                variable["valueFrom"]["secretKeyRef"]["name"] = self.mark

    def _address(self, role: str) -> str:
        infra = self.podman("pod", "inspect", "-f", "{{.InfraContainerID}}", f"{self.mark}-{role}")
        place = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self.podman("inspect", "-f", place, infra.strip()).strip()


@contextlib.contextmanager
def running_pods(folder: Path, image: str, environment: Mapping[str, str]) -> Iterator[KubePods]:
    """The pods, up and ready; removed at the end."""
    pods = KubePods(folder, image, environment)
    with restored_network(environment):
        try:
            pods.start()
            pods.wait_until_ready()
            yield pods
        finally:
            pods.close()

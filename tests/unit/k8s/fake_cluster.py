"""A Kubernetes cluster as far as the deployment asks it, with a clock that only waiting moves."""

import copy
import io
import tarfile
from dataclasses import dataclass, field
from typing import Any

from tests.unit.k8s.emulated_cluster import selected

NAMESPACE = "rdt-e2e"
GPU_NODE = {"cpu": "192", "memory": "2000Gi", "nvidia.com/gpu": "8", "rdma/ib": "1"}


def node(name, role=None, **allocatable):
    labels = {"kubernetes.io/hostname": name} | ({"rdt-e2e/role": role} if role else {})
    offered = GPU_NODE | allocatable
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {"allocatable": {k: v for k, v in offered.items() if v is not None}},
    }


def pod(role, *, ready=True, image="reg/rdt-e2e:0.1.0-cuda", **status):
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {
            "name": f"rdt-e2e-{role}",
            "namespace": NAMESPACE,
            "labels": {
                "rdt-e2e/node": role,
                "ray.io/cluster": "rdt-e2e",
                "app.kubernetes.io/component": "ray-node",
            },
        },
        "spec": {"containers": [{"name": "ray", "image": image}]},
        "status": {"phase": "Running", "conditions": conditions} | status,
    }


def unscheduled(message):
    """Status of a pod that no node takes."""
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    return {"ready": False, "phase": "Pending", "conditions": [condition]}


def waiting(reason, restarts=0):
    """Status of a pod whose container waits."""
    container = {
        "name": "ray-worker",
        "image": "reg/rdt-e2e:0.1.0-cuda",
        "restartCount": restarts,
        "state": {"waiting": {"reason": reason}},
    }
    return {"ready": False, "containerStatuses": [container]}


@dataclass
class FakeApi:
    """Answers from what a test put in; `script` changes it while time passes."""

    node_list: list[Any] = field(
        default_factory=lambda: [node("a", "trainer"), node("b", "inference"), node("c")]
    )
    pod_list: list[Any] = field(
        default_factory=lambda: [pod(r) for r in ("head", "trainer", "inference")]
    )
    served: tuple[str, ...] = ("v1",)
    known_fields: tuple[str, ...] | None = None
    operator_image: str | None = "quay/kuberay/operator:v1.7.0"
    groups: set[str] = field(default_factory=lambda: {"apps", "ray.io"})
    event_list: dict[Any, Any] = field(default_factory=dict)
    namespaces: dict[Any, Any] = field(
        default_factory=lambda: {NAMESPACE: {"app.kubernetes.io/part-of": "rdt-e2e"}}
    )
    left: list[Any] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)
    previous_log: list[Any] = field(default_factory=list)
    jobs: dict[Any, Any] = field(default_factory=dict)
    statuses: list[Any] = field(default_factory=lambda: [{"jobStatus": "SUCCEEDED"}])
    conditions: list[Any] = field(default_factory=list)
    submits: bool = True
    interrupted: bool = False

    def crd(self, name):
        if not self.served or not name.endswith("ray.io"):
            return None
        schema: dict[str, Any] = {}
        if self.known_fields is not None:
            fields: dict[str, Any] = {key: {} for key in self.known_fields}
            properties = {"spec": {"properties": fields}}
            schema = {"schema": {"openAPIV3Schema": {"properties": properties}}}
        versions = [{"name": one, "served": True} | schema for one in self.served]
        return {"spec": {"versions": versions}}

    def operators(self):
        if self.operator_image is None:
            return []
        spec = {"template": {"spec": {"containers": [{"image": self.operator_image}]}}}
        return [
            {
                "metadata": {"name": "kuberay-operator", "namespace": "kuberay-system"},
                "spec": spec,
                "status": {"readyReplicas": 1},
            }
        ]

    def api_groups(self):
        return self.groups

    def nodes(self):
        return self.node_list

    def pods(self, namespace, selector):
        assert namespace == NAMESPACE
        return [one for one in self.pod_list if selected(one["metadata"]["labels"], selector)]

    def events(self, namespace, name):
        return [{"type": "Warning", "message": text} for text in self.event_list.get(name, [])]

    def objects(self, namespace):
        return self.left

    def namespace(self, name):
        if name not in self.namespaces:
            return None
        return {"metadata": {"name": name, "labels": self.namespaces[name]}}

    def follow_log(self, namespace, name):
        assert name in [one["metadata"]["name"] for one in self.pod_list]
        if self.interrupted:
            raise KeyboardInterrupt
        yield from self.log

    def log_tail(self, namespace, name, num_lines, *, previous):
        return self.previous_log[-num_lines:] if previous else self.log[-num_lines:]

    def ray_object(self, plural, namespace, name):
        if plural == "rayclusters":
            return {"status": {"conditions": self.conditions}}
        if name not in self.jobs:
            return None
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return self.jobs[name] | {"status": status}

    def ray_objects(self, plural, namespace, selector):
        assert plural == "rayjobs"
        return list(self.jobs.values())

    def create_ray_job(self, namespace, job):
        name = job["metadata"]["name"]
        assert name not in self.jobs
        self.jobs[name] = copy.deepcopy(job)
        submitter = pod("submitter")
        submitter["metadata"] |= {"name": f"{name}-x", "labels": {"job-name": name}}
        if self.submits:
            self.pod_list.append(submitter)


@dataclass
class FakeKubectl:
    """Keeps what was applied; folders of pods are dictionaries."""

    api: FakeApi
    folders: dict[Any, Any] = field(default_factory=dict)
    new_run: str | None = None
    applied: list[Any] = field(default_factory=list)
    deleted: list[Any] = field(default_factory=list)

    def apply(self, documents):
        seen = [one for one in documents if one in self.applied]
        self.applied += [one for one in documents if one not in seen]
        return [
            f"{one['kind'].lower()}/{one['metadata']['name']} "
            f"{'unchanged' if one in seen else 'created'}"
            for one in documents
        ]

    def delete(self, documents):
        for one in documents:
            self.deleted.append((one["kind"], one["metadata"]["name"]))
            if one["kind"] == "RayCluster":
                self.api.pod_list = []
            if one["kind"] == "Namespace":
                self.api.namespaces.pop(one["metadata"]["name"])
        return [f"{kind} {name} deleted" for kind, name in self.deleted[-len(documents) :]]

    def list_folder(self, namespace, name, folder):
        if self.api.jobs and self.new_run and folder == "/runs":
            self.folders.setdefault((name, folder), []).append(self.new_run)
        return list(dict.fromkeys(self.folders.get((name, folder), [])))

    def fetch_folder(self, namespace, name, folder, into):
        into.mkdir(parents=True, exist_ok=True)
        (into / "from").write_text(f"{name}:{folder}")
        return 1


@dataclass
class Time:
    """Moves only when somebody waits; then the test's script runs."""

    now: float = 0.0
    script: dict[Any, Any] = field(default_factory=dict)

    def __call__(self):
        return self.now

    def pause(self, seconds):
        self.now += seconds
        for at in sorted(self.script):
            if at <= self.now:
                self.script.pop(at)()


def archive(files, *, link=None):
    """A tar archive in memory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
        if link is not None:
            member = tarfile.TarInfo(link)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(member)
    buffer.seek(0)
    return buffer

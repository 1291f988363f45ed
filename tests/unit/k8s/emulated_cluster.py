"""An API server on loopback for kubectl and the official client, with a stand-in for KubeRay's operator.

kmock stores and merges objects; it knows no schema, no admission, no controllers. Added here: namespaces,
lists that kubectl can read, selectors, pods' logs, and an operator whose pods come one step further each
time that somebody asks for them, so that nothing depends on time.
"""

import asyncio
import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

from aiohttp import web
from kmock import KubernetesEmulator, ResourceInfo, Server, action, resource
from kmock._internal import parsing

from rdt_e2e.cluster.kube_manifests import CLUSTER_NAME
from tests.kuberay_pods import ray_pods, submitter_pod

NAMESPACE = "rdt-e2e"
ENDING = "2026-11-30T00:00:00Z"
# What kmock's own list of kinds lacks.
OTHER_KINDS = (
    ("ray.io", "RayCluster"),
    ("ray.io", "RayJob"),
    ("resource.k8s.io", "ResourceClaimTemplate"),
)
VERBS = {"get", "list", "create", "patch", "delete", "watch", "update"}
PODS, NAMESPACES = resource("", "v1", "pods"), resource("", "v1", "namespaces")
CLUSTERS, JOBS = resource("ray.io", "v1", "rayclusters"), resource("ray.io", "v1", "rayjobs")
CRDS = resource("apiextensions.k8s.io", "v1", "customresourcedefinitions")
NODES, DEPLOYMENTS = resource("", "v1", "nodes"), resource("apps", "v1", "deployments")
SECRETS = resource("", "v1", "secrets")

KUBECTL = """#!{python}
# kubectl against the emulator: without its schema, which has none, and with `exec` in folders of pods.
import os, subprocess, sys
arguments = sys.argv[1:]
if "exec" in arguments:
    split = arguments.index("--")
    root = os.path.join({pods!r}, arguments[split - 1])
    inside = [root + one if one.startswith("/") else one for one in arguments[split + 1:]]
    sys.exit(subprocess.run(inside).returncode)
if "apply" in arguments:
    arguments.append("--validate=false")
os.execv({kubectl!r}, [{kubectl!r}, *arguments])
"""


def selected(labels: dict[str, str], selector: str) -> bool:
    """Whether labels are what a selector of `key=value` and `key in (a,b)` asks for."""
    for one in re.findall(r"[^,(]+(?:\([^)]*\))?", selector):
        if found := re.fullmatch(r"\s*(\S+) in \(([^)]*)\)", one):
            if labels.get(found[1]) not in [value.strip() for value in found[2].split(",")]:
                return False
        elif one.strip():
            key, _, value = one.strip().partition("=")
            if labels.get(key) != value:
                return False
    return True


class EmulatedCluster(KubernetesEmulator):
    """The API server. `log` is what a job prints; `fails` makes it end as FAILED."""

    log: str = "[1/8] checkpoint\nverdict   PASS\n"
    fails: bool = False
    with_operator: bool = True
    stuck: str | None = None

    def prepare(self, folder: Path) -> None:
        """Declare what exists in a new cluster; pods' files are below the folder."""
        self.folder = folder
        self.asked: dict[str, int] = {}
        for group, kind in OTHER_KINDS:
            self.resources[f"{group}/v1/{kind.lower()}s"] = ResourceInfo(
                kind=kind,
                namespaced=True,
                verbs=VERBS,
                singular=kind.lower(),
                shortnames=set(),
                categories=set(),
                subresources=set(),
            )
        self.resources.load_bundled()

    def hold(self, kind: Any, name: str, content: dict[str, Any], namespace: str | None = None):
        """Put an object into the cluster, as somebody else would have."""
        metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
        metadata |= content.get("metadata", {})
        self.objects[kind, namespace, name] = content | {"metadata": metadata}

    def names(self, kind: Any) -> list[str]:
        """Names of the objects of a kind that exist."""
        return [
            name
            for (one, _, name), held in self.objects.items()
            if one == kind and not held.deleted
        ]

    async def _serve_version(self, request):
        # kmock 0.8 calls the core group's version "/v1", which kubectl does not take.
        answer: Any = await super()._serve_version(request)
        answer["groupVersion"] = answer["groupVersion"].lstrip("/")
        return answer

    async def _serve_list(self, request):
        answer: Any = await super()._serve_list(request)
        kind = self.resources[request.resource].kind
        version = "/".join(
            part for part in (request.resource.group, request.resource.version) if part
        )
        labels = request.params.get("labelSelector", "")
        items = [
            one for one in answer["items"] if selected(one["metadata"].get("labels", {}), labels)
        ]
        for part in filter(None, request.params.get("fieldSelector", "").split(",")):
            field, _, value = part.partition("=")
            items = [one for one in items if _field(one, field) == value]
        return answer | {"kind": f"{kind}List", "apiVersion": version, "items": items}

    async def _handle(self, request):
        path = request.url.path
        if found := re.fullmatch(r"/api/v1/namespaces/[^/]+/pods/([^/]+)/log", path):
            self._finish(found[1].removesuffix("-submitter"))
            return web.Response(text=self.log)
        if self.with_operator and request.resource == PODS and request.action == action.LIST:
            self._operate()
        return await super()._handle(request)

    def _held(self, kind: Any) -> dict[str, Any]:
        return {
            name: copy.deepcopy(held.raw)
            for (one, _, name), held in self.objects.items()
            if one == kind and not held.deleted
        }

    def _operate(self) -> None:
        """Make, advance and remove pods, one step for each question."""
        cluster, jobs = self._held(CLUSTERS).get(CLUSTER_NAME), self._held(JOBS)
        wanted = {}
        if cluster is not None:
            wanted = {one["metadata"]["name"]: one for one in ray_pods([cluster]).values()}
            self.hold(SECRETS, CLUSTER_NAME, {"metadata": self._owned(cluster)}, NAMESPACE)
            for name, job in jobs.items():
                pod = submitter_pod(job, cluster, name)
                pod["metadata"]["name"] = f"{name}-submitter"
                pod["metadata"]["labels"] |= {"job-name": name, "ray.io/cluster": CLUSTER_NAME}
                wanted[f"{name}-submitter"] = pod
        for name, pod in self._held(PODS).items():
            if name in wanted or "ray.io/cluster" not in pod["metadata"].get("labels", {}):
                continue
            if "deletionTimestamp" in pod["metadata"]:
                self.objects[PODS, NAMESPACE, name].delete()
            else:
                self.objects[PODS, NAMESPACE, name].patch(
                    {"metadata": {"deletionTimestamp": ENDING}}
                )
        if cluster is None and CLUSTER_NAME in self._held(SECRETS):
            self.objects[SECRETS, NAMESPACE, CLUSTER_NAME].delete()
        for name, pod in wanted.items():
            step = self.asked.get(name, 0)
            self.asked[name] = step + 1
            self.hold(PODS, name, pod | {"status": self._status(name, step)}, NAMESPACE)

    def _status(self, name: str, step: int) -> dict[str, Any]:
        if self.stuck is not None and "trainer" in name:
            lacks = {"type": "PodScheduled", "status": "False", "message": self.stuck}
            return {"phase": "Pending", "conditions": [lacks]}
        if step == 0:
            return {"phase": "Pending", "conditions": []}
        ready = {"type": "Ready", "status": "True" if step > 1 else "False"}
        return {"phase": "Running", "conditions": [ready]}

    @staticmethod
    def _owned(owner: dict[str, Any]) -> dict[str, Any]:
        reference = {"apiVersion": "ray.io/v1", "kind": owner["kind"], "uid": "0"}
        return {"ownerReferences": [reference | {"name": owner["metadata"]["name"]}]}

    def _finish(self, job: str) -> None:
        """The job itself: what it leaves in the pods, and how it ends."""
        run = f"20261130T010203-{job}"
        for role, text in (
            ("inference", "profile of the inference node"),
            ("trainer", "of the trainer"),
        ):
            pod = self.folder / f"{CLUSTER_NAME}-{role}-worker"
            for place, content in {
                f"runs/{run}/profile.txt": text,
                f"runs/{run}/run.json": json.dumps({"verdict": "FAIL" if self.fails else "PASS"}),
                "tmp/ray/session_latest/logs/raylet.out": f"raylet of {role}",
            }.items():
                (pod / place).parent.mkdir(parents=True, exist_ok=True)
                (pod / place).write_text(content)
        status = {"jobStatus": "FAILED" if self.fails else "SUCCEEDED"}
        self.objects[JOBS, NAMESPACE, job].patch({"status": status})


def _field(document: Any, path: str) -> Any:
    for key in path.split("."):
        document = document.get(key, {})
    return document


def _parse_path(path: str) -> Any:
    """kmock 0.8 takes the name of a namespace for the namespace of something else."""
    found = re.fullmatch(r"/api/v1/namespaces(?:/([^/]+))?", path)
    if found is None:
        return _kmocks_parse_path(path)
    return parsing.ParsedPath("", "v1", "namespaces", None, found[1], None)


_kmocks_parse_path, parsing.parse_path = parsing.parse_path, _parse_path


async def served(cluster: EmulatedCluster, work):
    """Run blocking work with the emulator's address."""
    async with cluster, Server(cluster) as server:
        return await asyncio.to_thread(work, str(server.url).rstrip("/"))


def write_client(folder: Path, url: str, kubectl: str) -> dict[str, str]:
    """A kubeconfig and a kubectl for the emulator; the variables that make a program use them."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "emulated",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "emulated", "context": {"cluster": "c", "user": "u"}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    program = folder / "bin" / "kubectl"
    program.parent.mkdir(exist_ok=True)
    text = KUBECTL.format(python=sys.executable, pods=str(folder / "pods"), kubectl=kubectl)
    program.write_text(text)
    program.chmod(0o755)
    return {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder)}

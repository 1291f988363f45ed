"""The deployment on Kubernetes: apply and wait, run one job and fetch its results, remove.

The manifests are the repository's `k8s/`; nothing here can do more than kubectl with them could.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rdt_e2e.cluster.kube_api import Answer, KubeApi
from rdt_e2e.cluster.kube_checks import missing_prerequisites
from rdt_e2e.cluster.kube_jobs import POLL_S, JobRunner
from rdt_e2e.cluster.kube_manifests import (
    CLUSTER_NAME,
    NAMESPACE,
    NODE_SELECTOR,
    ROLES,
    Document,
    ray_cluster,
    stub,
)
from rdt_e2e.cluster.kube_pods import StateLines, hopeless, is_ready, role_of, state_of
from rdt_e2e.cluster.kubectl import Kubectl
from rdt_e2e.console import Console
from rdt_e2e.errors import EnvironmentCheckError

PART_OF = "app.kubernetes.io/part-of"
OURS = f"{PART_OF}=rdt-e2e"
# Not those of the download job, which nobody here started.
OUR_PODS = "app.kubernetes.io/component in (ray-node,submitter)"
# Twice the grace that the Ray pods have.
PODS_END_TIMEOUT_S = 240.0


@dataclass
class KubernetesTarget:
    """One context, with what is deployed there.

    Attributes:
        api: Questions to the cluster.
        kubectl: Apply, delete and copy.
        console: For the lines printed.
        clock: Seconds from any fixed point.
        pause: Waits some seconds between two questions.
    """

    api: KubeApi
    kubectl: Kubectl
    console: Console
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep

    def check(self, documents: Sequence[Document]) -> None:
        """Check what must be there before anything is applied.

        Raises:
            EnvironmentCheckError: Something is missing; each thing was printed with its fix.
        """
        missing = missing_prerequisites(self.api, documents)
        # One command may mend several things.
        for fix in dict.fromkeys(one.fix for one in missing):
            for one in missing:
                if one.fix == fix:
                    self.console.info(f"missing: {one.what}")
            self.console.info(f"  fix: {fix}")
        if missing:
            things = "one thing" if len(missing) == 1 else f"{len(missing)} things"
            raise EnvironmentCheckError(
                f"the cluster lacks {things}, named above with the fix; nothing was applied"
            )
        self.console.info("cluster: KubeRay, nodes and resources are there")

    def deploy(self, documents: Sequence[Document], timeout_s: float) -> None:
        """Apply the documents and wait until every Ray node is ready.

        Args:
            documents: What `load_manifests` gave.
            timeout_s: Longest wait for the pods, in seconds.

        Raises:
            EnvironmentCheckError: A prerequisite is missing, the cluster refused a document, or a pod
                does not get ready; the message says why.
        """
        self.check(documents)
        if self._namespace_of_others():
            # With our label on it, `down` would take it for ours.
            documents = [one for one in documents if one["kind"] != "Namespace"]
            self.console.info(f"namespace {NAMESPACE} is there and not ours: left as it is")
        for line in self.kubectl.apply(documents):
            self.console.info(f"  {line}")
        deadline = self.clock() + timeout_s
        lines = StateLines(self.console)
        while True:
            pods = {role_of(pod): pod for pod in self._nodes()}
            if all(role in pods and is_ready(pods[role]) for role in ROLES):
                break
            states = {
                role: state_of(self.api, pods[role]) if role in pods else self._without_pod()
                for role in ROLES
                if role not in pods or not is_ready(pods[role])
            }
            lines.say(states)
            for pod in pods.values():
                reason = hopeless(self.api, pod)
                if reason is not None:
                    raise EnvironmentCheckError(reason)
            if self.clock() > deadline:
                waits = "; ".join(f"{role}: {state}" for role, state in states.items())
                raise EnvironmentCheckError(f"not ready after {timeout_s:g} s: {waits}")
            self.pause(POLL_S)
        self.console.info(f"the RayCluster {CLUSTER_NAME} is ready: {', '.join(ROLES)}")

    def run_job(self, name: str, runs_dir: Path) -> Path | None:
        """Run one job of `k8s/jobs` on the cluster that is up; see `JobRunner.run`."""
        runner = JobRunner(self.api, self.kubectl, self.console, self.clock, self.pause)
        return runner.run(name, runs_dir)

    def down(self, documents: Sequence[Document]) -> None:
        """Remove the documents' objects and our jobs; a namespace that others use stays.

        Args:
            documents: What was applied.

        Raises:
            EnvironmentCheckError: The cluster refused, or something does not go away.
        """
        if self.api.namespace(NAMESPACE) is None:
            self.console.info("nothing was deployed")
            return
        jobs = [
            stub("RayJob", "ray.io/v1", one["metadata"]["name"])
            for one in self.api.ray_objects("rayjobs", NAMESPACE, OURS)
        ]
        rest = [one for one in reversed(documents) if one["kind"] != "Namespace"]
        # Jobs first: their drivers end in order while the cluster is still there.
        for line in [*(self.kubectl.delete(jobs) if jobs else []), *self.kubectl.delete(rest)]:
            self.console.info(f"  {line}")
        if self._namespace_of_others():
            self.console.info(f"namespace {NAMESPACE} was not made by this; it stays")
            return
        others = self._objects_once_pods_are_gone()
        if others:
            self.console.info(
                f"namespace {NAMESPACE} stays: it still holds {', '.join(others[:5])}"
            )
            return
        for line in self.kubectl.delete([stub("Namespace", "v1", NAMESPACE)]):
            self.console.info(f"  {line}")

    def _namespace_of_others(self) -> bool:
        """Whether our namespace exists, and was made by somebody else."""
        found = self.api.namespace(NAMESPACE)
        return found is not None and (found["metadata"].get("labels", {}).get(PART_OF) != "rdt-e2e")

    def _objects_once_pods_are_gone(self) -> list[str]:
        deadline = self.clock() + PODS_END_TIMEOUT_S
        lines = StateLines(self.console)
        # Those that are ending count: they hold GPUs, and may be writing results.
        while pods := self.api.pods(NAMESPACE, OUR_PODS):
            lines.say({"down": f"waits for {len(pods)} pods to end"})
            if self.clock() > deadline:
                break
            self.pause(POLL_S)
        return self.api.objects(NAMESPACE)

    def _nodes(self) -> list[Answer]:
        found = self.api.pods(NAMESPACE, NODE_SELECTOR)
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def _without_pod(self) -> str:
        """Why the operator has made no pod."""
        cluster = self.api.ray_object("rayclusters", NAMESPACE, CLUSTER_NAME) or {}
        for one in cluster.get("status", {}).get("conditions") or []:
            if one["type"] == "ReplicaFailure" and one["status"] == "True":
                return f"the operator cannot make its pod: {one.get('message', one.get('reason'))}"
        warnings = [
            str(one.get("message"))
            for one in self.api.events(NAMESPACE, CLUSTER_NAME)
            if one.get("type") == "Warning"
        ]
        return f"no pod yet: {warnings[-1]}" if warnings else "the operator has made no pod yet"


def describe_target(documents: Sequence[Document], context: str) -> str:
    """What is about to be applied where, in one line."""
    groups = ", ".join(
        one["groupName"] for one in ray_cluster(documents)["spec"]["workerGroupSpecs"]
    )
    return (
        f"{len(documents)} objects (RayCluster {CLUSTER_NAME}: head, {groups}) to context {context}"
    )

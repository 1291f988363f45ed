"""The deployment on Kubernetes: apply and wait, run one job and fetch its results, remove.

The manifests are the repository's `k8s/`; nothing here can do more than kubectl with them could.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rdt_e2e.cluster.kube_api import Answer, KubeApi
from rdt_e2e.cluster.kube_checks import missing_prerequisites
from rdt_e2e.cluster.kube_manifests import CLUSTER_NAME, Document, load_job, ray_cluster
from rdt_e2e.cluster.kube_pods import hopeless, is_ready, role_of, state_of
from rdt_e2e.cluster.kubectl import Kubectl
from rdt_e2e.console import Console
from rdt_e2e.errors import EnvironmentCheckError, SyncError, VerificationError

NAMESPACE = "rdt-e2e"
NODE_SELECTOR = f"ray.io/cluster={CLUSTER_NAME}"
PART_OF = "app.kubernetes.io/part-of"
OURS = f"{PART_OF}=rdt-e2e"
# Not those of the download job, which nobody here started.
OUR_PODS = "app.kubernetes.io/component in (ray-node,submitter)"
ROLES = ("head", "trainer", "inference")
RUNS_FOLDER = "/runs"
RAY_LOGS = "/tmp/ray/session_latest/logs"  # noqa: S108  # a folder in the pod
POLL_S = 2.0
JOB_START_TIMEOUT_S = 900.0
# Twice the grace that the Ray pods have.
PODS_END_TIMEOUT_S = 240.0
FINISHED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
ENDED_EARLY = frozenset({"Failed", "Complete"})


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
    _said: dict[str, str] = field(default_factory=dict)

    def check(self, documents: Sequence[Document]) -> None:
        """Check what must be there before anything is applied.

        Raises:
            EnvironmentCheckError: Something is missing; each thing was printed with its fix.
        """
        missing = missing_prerequisites(self.api, documents)
        for one in missing:
            self.console.info(f"missing: {one.what}\n  fix: {one.fix}")
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
        while True:
            pods = {role_of(pod): pod for pod in self._nodes()}
            if all(role in pods and is_ready(pods[role]) for role in ROLES):
                break
            states = {
                role: state_of(self.api, pods[role]) if role in pods else self._without_pod()
                for role in ROLES
                if role not in pods or not is_ready(pods[role])
            }
            self._say(states)
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
        """Run one job of `k8s/jobs` on the cluster that is up, print its output, fetch its results.

        Args:
            name: Name of the job's file.
            runs_dir: Local folder of run directories.

        Returns:
            The local run directory; None for a job that made none.

        Raises:
            EnvironmentCheckError: There is no ready cluster, or the job did not start.
            VerificationError: The text or a weight is wrong, says the run directory, fetched by then.
            SyncError: The job failed otherwise; what there is of its run directory was fetched too.
        """
        pods = {role_of(pod): pod for pod in self._nodes() if is_ready(pod)}
        for role in ROLES:
            if role not in pods:
                raise EnvironmentCheckError(
                    f"no {role} pod is ready in namespace {NAMESPACE}; deploy first: `make deploy "
                    "TARGET=k8s`"
                )
        driver = pods["inference"]["metadata"]["name"]
        before = set(self.kubectl.list_folder(NAMESPACE, driver, RUNS_FOLDER))
        run_name = f"{name}-{datetime.now(UTC):%Y%m%d%H%M%S}"
        image = pods["inference"]["spec"]["containers"][0]["image"]
        self.api.create_ray_job(NAMESPACE, load_job(name, run_name=run_name, image=image))
        self.console.info(f"RayJob {run_name} submitted")
        try:
            status = self._follow(run_name)
        except KeyboardInterrupt:
            self.console.info(f"stopping RayJob {run_name}")
            self.kubectl.delete([_stub("RayJob", "ray.io/v1", run_name)])
            raise
        folder = self._fetch(pods, before, runs_dir)
        if status.get("jobStatus") != "SUCCEEDED":
            if folder and _verdict(folder) == "FAIL":
                raise VerificationError(f"RayJob {run_name}: what arrived is wrong; see {folder}")
            where = f"; fetched: {folder}" if folder else ""
            said = status.get("message") or status.get("reason") or "see its output above"
            raise SyncError(
                f"RayJob {run_name} ended as {status.get('jobStatus') or 'not started'}: {said}{where}"
            )
        return folder

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
            _stub("RayJob", "ray.io/v1", one["metadata"]["name"])
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
        for line in self.kubectl.delete([_stub("Namespace", "v1", NAMESPACE)]):
            self.console.info(f"  {line}")

    def _namespace_of_others(self) -> bool:
        """Whether our namespace exists, and was made by somebody else."""
        found = self.api.namespace(NAMESPACE)
        return found is not None and (
            found["metadata"].get("labels", {}).get(PART_OF) != "rdt-e2e"
        )

    def _objects_once_pods_are_gone(self) -> list[str]:
        deadline = self.clock() + PODS_END_TIMEOUT_S
        # Those that are ending count: they hold GPUs, and may be writing results.
        while pods := self.api.pods(NAMESPACE, OUR_PODS):
            self._say({"down": f"waits for {len(pods)} pods to end"})
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

    def _say(self, states: dict[str, str]) -> None:
        """Print what has changed, and only that."""
        for role, state in states.items():
            if self._said.get(role) != state:
                self._said[role] = state
                self.console.info(f"  {role}: {state}")

    def _follow(self, run_name: str) -> Answer:
        """Print the job's output until it has ended; its status then."""
        pod = self._submitter(run_name)
        if pod is not None:
            for line in self.api.follow_log(NAMESPACE, pod):
                self.console.info(line)
        deadline = self.clock() + JOB_START_TIMEOUT_S
        while True:
            status = self._status(run_name)
            if (
                status.get("jobStatus") in FINISHED
                or status.get("jobDeploymentStatus") in ENDED_EARLY
            ):
                return status
            if self.clock() > deadline:
                raise EnvironmentCheckError(
                    f"RayJob {run_name} gave no more output and did not end within "
                    f"{JOB_START_TIMEOUT_S:g} s; see `kubectl -n {NAMESPACE} describe rayjob {run_name}`"
                )
            self.pause(POLL_S)

    def _submitter(self, run_name: str) -> str | None:
        """The pod whose log is the job's output; None when the job ended before it had one."""
        deadline = self.clock() + JOB_START_TIMEOUT_S
        while True:
            pods = self.api.pods(NAMESPACE, f"job-name={run_name}")
            started = [one for one in pods if one.get("status", {}).get("phase") != "Pending"]
            if started:
                return str(started[0]["metadata"]["name"])
            if self._status(run_name).get("jobDeploymentStatus") in ENDED_EARLY:
                return None
            for pod in pods:
                self._say({"submitter": state_of(self.api, pod)})
                reason = hopeless(self.api, pod)
                if reason is not None:
                    raise EnvironmentCheckError(reason)
            if self.clock() > deadline:
                raise EnvironmentCheckError(
                    f"RayJob {run_name} did not start within {JOB_START_TIMEOUT_S:g} s; see `kubectl -n "
                    f"{NAMESPACE} describe rayjob {run_name}`"
                )
            self.pause(POLL_S)

    def _status(self, run_name: str) -> Answer:
        job = self.api.ray_object("rayjobs", NAMESPACE, run_name)
        if job is None:
            raise SyncError(f"RayJob {run_name} was deleted while it ran")
        status: Answer = job.get("status") or {}
        return status

    def _fetch(self, pods: dict[str, Answer], before: set[str], runs_dir: Path) -> Path | None:
        """Copy the new run directory, and Ray's logs of both nodes into it."""
        driver = pods["inference"]["metadata"]["name"]
        new = sorted(set(self.kubectl.list_folder(NAMESPACE, driver, RUNS_FOLDER)) - before)
        if not new:
            return None
        folder = runs_dir / new[-1]
        self.kubectl.fetch_folder(NAMESPACE, driver, f"{RUNS_FOLDER}/{new[-1]}", folder)
        for role in ("trainer", "inference"):
            pod = pods[role]["metadata"]["name"]
            into = folder / "nodes" / role
            try:
                # The trainer's own part of the run, where it wrote one.
                if role == "trainer" and new[-1] in self.kubectl.list_folder(
                    NAMESPACE, pod, RUNS_FOLDER
                ):
                    self.kubectl.fetch_folder(NAMESPACE, pod, f"{RUNS_FOLDER}/{new[-1]}", into)
                self.kubectl.fetch_folder(NAMESPACE, pod, RAY_LOGS, into / "ray-logs")
            except EnvironmentCheckError as error:
                # A lost node is one of the things a run is about; the rest is worth having.
                self.console.info(f"  {role} node: {error}")
        self.console.info(f"fetched {folder}")
        return folder


def _verdict(folder: Path) -> str | None:
    """The verdict in a fetched run directory; None where the run did not get to write it."""
    try:
        content = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return None
    return str(content.get("verdict"))


def _stub(kind: str, api_version: str, name: str) -> dict[str, Any]:
    """As much of an object as it takes to delete it."""
    metadata = {"name": name}
    if kind != "Namespace":
        metadata["namespace"] = NAMESPACE
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def describe_target(documents: Sequence[Document], context: str) -> str:
    """What is about to be applied where, in one line."""
    groups = ", ".join(
        one["groupName"] for one in ray_cluster(documents)["spec"]["workerGroupSpecs"]
    )
    return (
        f"{len(documents)} objects (RayCluster {CLUSTER_NAME}: head, {groups}) to context {context}"
    )

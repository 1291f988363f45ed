"""One job of `k8s/jobs` on the cluster that is up: submit, follow, fetch what it wrote on both nodes."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rdt_e2e.cluster.kube_api import Answer, KubeApi
from rdt_e2e.cluster.kube_manifests import NAMESPACE, NODE_SELECTOR, ROLES, load_job, stub
from rdt_e2e.cluster.kube_pods import StateLines, hopeless, is_ready, role_of, state_of
from rdt_e2e.cluster.kubectl import Kubectl
from rdt_e2e.console import Console
from rdt_e2e.errors import EnvironmentCheckError, SyncError, VerificationError

RUNS_FOLDER = "/runs"
RAY_LOGS = "/tmp/ray/session_latest/logs"  # noqa: S108  # a folder in the pod
POLL_S = 2.0
JOB_START_TIMEOUT_S = 900.0
FINISHED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
ENDED_EARLY = frozenset({"Failed", "Complete"})


@dataclass
class JobRunner:
    """Runs jobs on one context.

    Attributes:
        api: Questions to the cluster.
        kubectl: Delete and copy.
        console: For the lines printed.
        clock: Seconds from any fixed point.
        pause: Waits some seconds between two questions.
    """

    api: KubeApi
    kubectl: Kubectl
    console: Console
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep

    def run(self, name: str, runs_dir: Path) -> Path | None:
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
        pods = {
            role_of(pod): pod for pod in self.api.pods(NAMESPACE, NODE_SELECTOR) if is_ready(pod)
        }
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
            self.kubectl.delete([stub("RayJob", "ray.io/v1", run_name)])
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
        states = StateLines(self.console)
        deadline = self.clock() + JOB_START_TIMEOUT_S
        while True:
            pods = self.api.pods(NAMESPACE, f"job-name={run_name}")
            started = [one for one in pods if one.get("status", {}).get("phase") != "Pending"]
            if started:
                return str(started[0]["metadata"]["name"])
            if self._status(run_name).get("jobDeploymentStatus") in ENDED_EARLY:
                return None
            for pod in pods:
                states.say({"submitter": state_of(self.api, pod)})
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

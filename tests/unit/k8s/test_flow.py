"""deploy, run_job and down against a fake cluster."""

import io
import tarfile
from typing import Any, cast

import pytest

from rdt_e2e.cluster.kube_checks import missing_prerequisites, quantity
from rdt_e2e.cluster.kube_manifests import load_manifests
from rdt_e2e.cluster.kubectl import Kubectl, unpack
from rdt_e2e.cluster.kubernetes import KubernetesTarget
from rdt_e2e.console import Console
from rdt_e2e.errors import ConfigError, EnvironmentCheckError, SyncError, VerificationError
from tests.unit.k8s.fake_cluster import (
    FakeApi,
    FakeKubectl,
    Time,
    archive,
    node,
    pod,
    unscheduled,
    waiting,
)
from tests.unit.k8s.variants import needs_kubectl

NODES = ("head", "trainer", "inference")


class Deployment:
    """A target on a fake cluster, with what it printed."""

    def __init__(self, **answers):
        self.api = FakeApi(**answers)
        self.kubectl = FakeKubectl(self.api)
        self.time = Time()
        self.output = io.StringIO()
        self.target = KubernetesTarget(
            self.api, cast("Any", self.kubectl), Console(self.output), self.time, self.time.pause
        )

    @property
    def said(self):
        return self.output.getvalue()


@pytest.mark.parametrize(
    ("answers", "what", "fix"),
    [
        ({"served": ()}, "rayclusters.ray.io is not installed", "helm upgrade"),
        ({"served": ("v1alpha1",)}, "serves v1alpha1, not v1", "server-side"),
        ({"known_fields": ("rayVersion", "entrypoint")}, "no authOptions", "server-side"),
        ({"operator_image": None}, "operator is not running", "helm upgrade"),
        ({"operator_image": "kuberay/operator:v1.1.0"}, "older than 1.6", "1.7.0"),
        (
            {"node_list": [node("b", "inference"), node("c")]},
            "no node has the label rdt-e2e/role=trainer",
            "kubectl label node c rdt-e2e/role=trainer",
        ),
        (
            {
                "node_list": [
                    node("a", "trainer", **{"nvidia.com/gpu": "4"}),
                    node("b", "inference"),
                ]
            },
            "node a (trainer) offers 4 nvidia.com/gpu, 8 is asked for",
            "label a larger node, or lower nvidia.com/gpu of the trainer group",
        ),
        (
            {
                "node_list": [
                    node("a", "trainer", **{"nvidia.com/gpu": None}),
                    node("b", "inference"),
                ]
            },
            "node a (trainer) offers 0 nvidia.com/gpu, 8 is asked for",
            "GPU Operator",
        ),
        (
            {"node_list": [node("a", "trainer"), node("b", "inference", **{"rdma/ib": None})]},
            "node b (inference) offers 0 rdma/ib",
            "OVERLAY",
        ),
        (
            {"node_list": [node("a", "trainer", memory="1000Gi"), node("b", "inference")]},
            "offers 1000Gi memory, 1500Gi",
            "lower memory of the trainer group",
        ),
    ],
)
def test_each_missing_prerequisite_has_its_fix(answers, what, fix, rendered):
    found = missing_prerequisites(FakeApi(**answers), rendered(None))
    assert [one for one in found if what in one.what and fix in one.fix], found


def test_a_ready_cluster_lacks_nothing(rendered):
    assert missing_prerequisites(FakeApi(), rendered(None)) == []
    # A site's own build of the operator says nothing of its release.
    assert missing_prerequisites(FakeApi(operator_image="site/op@sha256:0"), rendered(None)) == []


def test_cordoned_nodes_do_not_count(rendered):
    cordoned = node("a", "trainer")
    cordoned["spec"]["unschedulable"] = True
    found = missing_prerequisites(
        FakeApi(node_list=[cordoned, node("b", "inference")]), rendered(None)
    )
    assert "no node has the label" in found[0].what


@needs_kubectl
def test_overlays_need_what_they_use(rendered):
    found = missing_prerequisites(FakeApi(), rendered("sriov-multus"))
    assert "Multus is not installed" in found[0].what
    found = missing_prerequisites(FakeApi(), rendered("dra"))
    assert [one.what for one in found] == ["the API group resource.k8s.io (DRA) is not served"]
    assert not missing_prerequisites(FakeApi(groups={"resource.k8s.io"}), rendered("dra"))


@needs_kubectl
def test_cpu_overlay_needs_no_labels_and_no_gpus(rendered):
    laptop = {
        "metadata": {"name": "l"},
        "spec": {},
        "status": {"allocatable": {"cpu": "8", "memory": "16Gi"}},
    }
    assert missing_prerequisites(FakeApi(node_list=[laptop]), rendered("cpu")) == []


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("8", 8), ("1Ki", 1024), ("2k", 2000), ("1500Gi", 1500 * 2**30)],
)
def test_quantity(text, value):
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "8 GPUs", "1kB"])
def test_not_a_quantity(text):
    with pytest.raises(ValueError, match="not a Kubernetes quantity"):
        quantity(text)


def test_nothing_is_applied_where_something_is_missing(rendered):
    deployment = Deployment(served=())
    with pytest.raises(EnvironmentCheckError, match="lacks 2 things"):
        deployment.target.deploy(rendered(None), 60)
    assert deployment.kubectl.applied == []
    assert "fix: helm" in deployment.said


def test_deploy_applies_in_order_and_again_changes_nothing(rendered):
    deployment = Deployment()
    deployment.target.deploy(rendered(None), 60)
    assert deployment.kubectl.applied == rendered(None)
    assert deployment.kubectl.applied[0]["kind"] == "Namespace"
    assert "ready: head, trainer, inference" in deployment.said
    num_applied = len(deployment.kubectl.applied)
    deployment.target.deploy(rendered(None), 60)
    assert len(deployment.kubectl.applied) == num_applied


def test_deploy_waits_and_says_once_why(rendered):
    stuck = pod("trainer", **unscheduled("0/3 nodes: 1 Insufficient nvidia.com/gpu."))
    deployment = Deployment(pod_list=[pod("head"), stuck])

    def schedule():
        deployment.api.pod_list = [pod(role) for role in NODES]

    deployment.time.script[30] = schedule
    deployment.target.deploy(rendered(None), 60)
    assert deployment.said.count("Insufficient nvidia.com/gpu. (something else holds") == 1
    assert deployment.said.count("inference: the operator has made no pod yet") == 1


def test_deadline_names_each_pod_that_is_not_ready(rendered):
    stuck = pod("trainer", **unscheduled("1 node(s) had untolerated taint {x: y}"))
    deployment = Deployment(
        pod_list=[pod("head"), stuck], event_list={"rdt-e2e": ["quota exceeded"]}
    )
    with pytest.raises(EnvironmentCheckError) as error:
        deployment.target.deploy(rendered(None), 60)
    assert "trainer: not scheduled" in str(error.value)
    assert "add the taint to tolerations" in str(error.value)
    assert "inference: no pod yet: quota exceeded" in str(error.value)
    assert "head" not in str(error.value)


def test_replica_failure_is_told(rendered):
    conditions = [{"type": "ReplicaFailure", "status": "True", "message": "pods is forbidden"}]
    deployment = Deployment(pod_list=[], conditions=conditions)
    with pytest.raises(EnvironmentCheckError, match="cannot make its pod: pods is forbidden"):
        deployment.target.deploy(rendered(None), 10)


def test_image_that_cannot_be_had_ends_the_wait(rendered):
    deployment = Deployment(pod_list=[pod("head"), pod("trainer", **waiting("ImagePullBackOff"))])
    with pytest.raises(EnvironmentCheckError, match=r"cannot get its image .*IMAGE="):
        deployment.target.deploy(rendered(None), 6000)
    assert deployment.time.now == 0


def test_failed_doctor_is_shown(rendered):
    log = ["FAIL node.memlock: 64 KiB", "fix: LimitMEMLOCK=infinity"]
    stuck = pod("trainer", **waiting("CrashLoopBackOff", restarts=2))
    deployment = Deployment(pod_list=[pod("head"), stuck], previous_log=log)
    with pytest.raises(EnvironmentCheckError, match=r"ended 2 times.*node\.memlock.*LimitMEMLOCK"):
        deployment.target.deploy(rendered(None), 6000)


def test_job_is_followed_and_its_results_are_fetched(tmp_path):
    deployment = Deployment(log=["[1/8] checkpoint", "verdict   PASS"])
    deployment.kubectl.folders["rdt-e2e-inference", "/runs"] = ["old"]
    deployment.kubectl.new_run = "20261130T010203-kimi-k2"
    folder = deployment.target.run_job("sync", tmp_path)
    assert folder is not None
    assert folder == tmp_path / "20261130T010203-kimi-k2"
    ((name, job),) = deployment.api.jobs.items()
    assert name.startswith("sync-")
    assert len(name) <= 47
    submitter = job["spec"]["submitterPodTemplate"]["spec"]["containers"][0]
    assert submitter["image"] == "reg/rdt-e2e:0.1.0-cuda"
    assert "verdict   PASS" in deployment.said
    assert (folder / "from").read_text() == f"rdt-e2e-inference:/runs/{folder.name}"
    assert (folder / "nodes/trainer/from").read_text() == f"rdt-e2e-trainer:/runs/{folder.name}"
    for role in ("trainer", "inference"):
        fetched = (folder / "nodes" / role / "ray-logs/from").read_text()
        assert fetched == f"rdt-e2e-{role}:/tmp/ray/session_latest/logs"


def test_failed_job_is_an_error_after_its_results_are_here(tmp_path):
    status = {"jobStatus": "FAILED", "message": "exit code 3"}
    deployment = Deployment(statuses=[{"jobStatus": "RUNNING"}, {"jobStatus": "RUNNING"}, status])
    deployment.kubectl.new_run = "run"
    with pytest.raises(SyncError, match=r"ended as FAILED: exit code 3; fetched: .*run"):
        deployment.target.run_job("sync", tmp_path)
    assert (tmp_path / "run/from").exists()


def test_wrong_weights_are_told_apart_from_a_failed_run(tmp_path):
    deployment = Deployment(statuses=[{"jobStatus": "FAILED"}])
    deployment.kubectl.new_run = "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text('{"verdict": "FAIL"}')
    with pytest.raises(VerificationError) as error:
        deployment.target.run_job("sync", tmp_path)
    assert error.value.exit_code == 3


def test_job_that_never_starts_says_where_to_look(tmp_path):
    ended = [{"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"}]
    deployment = Deployment(statuses=ended, submits=False)
    with pytest.raises(SyncError, match="not started: DeadlineExceeded"):
        deployment.target.run_job("sync", tmp_path)


def test_job_without_a_run_directory_fetches_nothing(tmp_path):
    assert Deployment().target.run_job("doctor", tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_job_needs_a_deployment(tmp_path):
    deployment = Deployment(pod_list=[pod("head"), pod("trainer", ready=False)])
    with pytest.raises(EnvironmentCheckError, match=r"no trainer pod is ready.*make deploy"):
        deployment.target.run_job("sync", tmp_path)
    assert deployment.api.jobs == {}


def test_interrupt_deletes_the_job(tmp_path):
    deployment = Deployment(interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        deployment.target.run_job("sync", tmp_path)
    assert deployment.kubectl.deleted == [("RayJob", next(iter(deployment.api.jobs)))]


def test_down_removes_jobs_first_and_the_namespace_last(rendered, tmp_path):
    deployment = Deployment()
    deployment.target.run_job("doctor", tmp_path)
    deployment.target.down(rendered(None))
    kinds = [kind for kind, _ in deployment.kubectl.deleted]
    assert kinds[0] == "RayJob"
    assert kinds[1] == "RayCluster"
    assert kinds[-1] == "Namespace"
    names = {(one["kind"], one["metadata"]["name"]) for one in rendered(None)}
    assert set(deployment.kubectl.deleted[1:]) == names
    deployment.target.down(rendered(None))
    assert "nothing was deployed" in deployment.said


def test_down_waits_for_pods_that_are_ending(rendered):
    deployment = Deployment()
    ending = pod("trainer")
    ending["metadata"]["deletionTimestamp"] = "now"

    def gone():
        deployment.api.pod_list = []

    def delete(documents):
        deployment.api.pod_list = [ending]
        return []

    cast("Any", deployment.kubectl).delete = delete
    deployment.time.script[60] = gone
    deployment.target.down(rendered(None))
    assert 60 <= deployment.time.now < 70
    assert deployment.said.count("waits for 1 pods to end") == 1


def test_namespace_of_others_gets_no_label_of_ours(rendered):
    deployment = Deployment(namespaces={"rdt-e2e": {"team": "a"}})
    deployment.target.deploy(rendered(None), 60)
    assert "Namespace" not in [one["kind"] for one in deployment.kubectl.applied]
    assert "not ours" in deployment.said


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"left": ["pod/other"]}, "still holds pod/other"),
        ({"namespaces": {"rdt-e2e": {}}}, "was not made by this"),
    ],
)
def test_down_leaves_a_namespace_that_others_use(answers, says, rendered):
    deployment = Deployment(**answers)
    deployment.target.down(rendered(None))
    assert "Namespace" not in [kind for kind, _ in deployment.kubectl.deleted]
    assert says in deployment.said


def test_unknown_overlay_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'azure'.*cpu, dra, efa"):
        load_manifests("azure", Kubectl())


def test_missing_kubectl_is_named():
    with pytest.raises(EnvironmentCheckError, match="there is no no-such-kubectl on PATH"):
        Kubectl(program="no-such-kubectl").apply([])


def test_unpack_writes_files_and_leaves_links_out(tmp_path):
    stream = archive({"./run.json": "{}", "nodes/a/log": "text"}, link="evil")
    assert unpack(stream, tmp_path) == 2
    assert (tmp_path / "nodes/a/log").read_text() == "text"
    assert not (tmp_path / "evil").is_symlink()


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil"])
def test_unpack_refuses_names_that_leave_the_folder(name, tmp_path):
    with pytest.raises(tarfile.TarError, match="outside of the folder"):
        unpack(archive({name: "x"}), tmp_path / "in")
    assert not list(tmp_path.glob("evil"))

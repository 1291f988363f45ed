"""What every pod of the manifests keeps to; each exception is named here with its reason."""

import re

import pytest

from rdt_e2e.cluster.kube_checks import quantity
from rdt_e2e.cluster.kube_manifests import pod_specs, ray_cluster
from tests.unit.k8s.variants import GPU_VARIANTS, VARIANTS

MAY_BE_ROOT = {
    "ray-worker": "Kubernetes gives a user other than root no effective IPC_LOCK",
    "download": "the node's model folder belongs to root",
}
MAY_ADD = {"ray-worker": ["IPC_LOCK"]}
"""RDMA registers memory, which has to be locked. No root file system is read-only: Ray, vLLM and torch
write below /tmp and the home folder."""
MAY_MOUNT_HOST = {
    "models": "a terabyte belongs on a disk of the node",
    "runs": "results outlive the pods",
    "nvidia": "GKE keeps the driver on the host",
    "gib": "GKE keeps NCCL's plugin on the host",
}


def pods(documents):
    return [pod for document in documents for pod in pod_specs(document)]


@pytest.mark.parametrize("overlay", VARIANTS)
def test_pods_keep_to_the_rules(overlay, rendered, jobs):
    for pod in pods([*rendered(overlay), *jobs.values()]):
        assert lint(pod) == []


def lint(pod):
    """Faults of one pod."""
    found = []
    if pod.get("automountServiceAccountToken") is not False:
        found.append("mounts a token")
    if not pod.get("serviceAccountName"):
        found.append("runs as the default account")
    if pod.get("hostPID") or pod.get("hostIPC"):
        found.append("shares the host's processes")
    if pod.get("securityContext", {}).get("seccompProfile") != {"type": "RuntimeDefault"}:
        found.append("no seccomp profile")
    found += [
        f"mounts {volume['hostPath']['path']} of the host"
        for volume in pod.get("volumes", [])
        if "hostPath" in volume and volume["name"] not in MAY_MOUNT_HOST
    ]
    names = {volume["name"] for volume in pod.get("volumes", [])}
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        found += lint_container(container)
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        if mounted - names:
            found.append(f"mounts volumes that do not exist: {mounted - names}")
    return found


def lint_container(container):
    name = container["name"]
    security = container.get("securityContext", {})
    capabilities = security.get("capabilities", {})
    found = []
    if security.get("privileged") or security.get("allowPrivilegeEscalation") is not False:
        found.append(f"{name}: may gain privileges")
    if capabilities.get("drop") != ["ALL"]:
        found.append(f"{name}: keeps capabilities")
    if set(capabilities.get("add", [])) - set(MAY_ADD.get(name, [])):
        found.append(f"{name}: adds capabilities")
    if security.get("runAsUser") == 0 and name not in MAY_BE_ROOT:
        found.append(f"{name}: runs as root")
    if security.get("runAsUser") != 0 and not security.get("runAsNonRoot"):
        found.append(f"{name}: may run as root")
    if not re.search(r":\d[\w.-]*$", container["image"]):
        found.append(f"{name}: image {container['image']} has no release")
    resources = container.get("resources", {})
    if not {"cpu", "memory"} <= set(resources.get("requests", {})) & set(
        resources.get("limits", {})
    ):
        found.append(f"{name}: no requests or limits")
    elif resources["requests"]["memory"] != resources["limits"]["memory"]:
        found.append(f"{name}: memory requests are not its limits")
    return found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda pod: pod.pop("automountServiceAccountToken"), "mounts a token"),
        (lambda pod: pod.pop("serviceAccountName"), "default account"),
        (lambda pod: pod.update(hostIPC=True), "host's processes"),
        (lambda pod: pod.pop("securityContext"), "seccomp"),
        (
            lambda pod: pod["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
            "of the host",
        ),
        (lambda pod: pod["volumes"].pop(0), "do not exist"),
        (
            lambda pod: pod["containers"][0]["securityContext"].update(privileged=True),
            "may gain privileges",
        ),
        (
            lambda pod: pod["containers"][0]["securityContext"]["capabilities"].pop("drop"),
            "keeps capabilities",
        ),
        (
            lambda pod: pod["containers"][0]["securityContext"]["capabilities"]["add"].append(
                "SYS_ADMIN"
            ),
            "adds capabilities",
        ),
        (lambda pod: pod["containers"][0].update(name="other"), "runs as root"),
        (lambda pod: pod["containers"][0].update(image="rdt-e2e:latest"), "no release"),
        (lambda pod: pod["containers"][0]["resources"].pop("limits"), "no requests or limits"),
        (
            lambda pod: pod["containers"][0]["resources"]["limits"].update(memory="1Gi"),
            "are not its limits",
        ),
    ],
)
def test_each_fault_is_found(change, says, rendered):
    pod = ray_cluster(rendered(None))["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    # Requests and limits are one mapping in the file, and would change together.
    resources = pod["containers"][0]["resources"]
    resources["limits"] = dict(resources["limits"])
    change(pod)
    assert [fault for fault in lint(pod) if says in fault]


@pytest.mark.parametrize("overlay", VARIANTS)
def test_ray_pods_have_shared_memory_of_their_own_within_their_limit(overlay, rendered):
    cluster = ray_cluster(rendered(overlay))["spec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        container = pod["containers"][0]
        (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
        assert volume["emptyDir"]["medium"] == "Memory"
        size = quantity(volume["emptyDir"]["sizeLimit"])
        store = int(group["rayStartParams"]["object-store-memory"])
        # Ray's object store lies in it, and it counts as the container's memory.
        assert store < size < quantity(container["resources"]["limits"]["memory"]) / 2


@pytest.mark.parametrize("overlay", GPU_VARIANTS)
def test_gpu_pods_are_whole_nodes_apart(overlay, rendered):
    groups = ray_cluster(rendered(overlay))["spec"]["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == ["trainer", "inference"]
    for group in groups:
        pod = group["template"]["spec"]
        resources = pod["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]
        assert pod["nodeSelector"] == {"rdt-e2e/role": group["groupName"]}
        assert {t["key"] for t in pod["tolerations"]} == {"nvidia.com/gpu"}
        (term,) = pod["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        (rule,) = term["labelSelector"]["matchExpressions"]
        assert group["template"]["metadata"]["labels"][rule["key"]] in rule["values"]
        assert pod["terminationGracePeriodSeconds"] >= 60
        # One kind of RDMA resource, or claims in its place.
        rdma = [
            name
            for name in resources["limits"]
            if name not in ("cpu", "memory", "nvidia.com/gpu", "hugepages-2Mi")
        ]
        annotated = "networking.gke.io/interfaces" in group["template"]["metadata"].get(
            "annotations", {}
        )
        assert len(rdma) + bool(resources.get("claims")) + annotated == 1

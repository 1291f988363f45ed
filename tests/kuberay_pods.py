"""The pods that KubeRay's operator would make of these manifests.

Follows what KubeRay 1.7 adds in ray-operator/controllers/ray/common (pod.go, job.go), as far as it
concerns a cluster without autoscaling, TLS, fault tolerance and history server. Nothing else can run or
check the pods here: there is no operator without an API server.
"""

import copy
import json
from typing import Any

from rdt_e2e.cluster.kube_checks import quantity
from rdt_e2e.cluster.kube_manifests import ray_cluster

Document = dict[str, Any]

GCS_PORT, DASHBOARD_PORT, METRICS_PORT, AGENT_PORT = 6379, 8265, 8080, 52365
KUBERNETES_DOMAIN = "svc.cluster.local"
WAIT_LIMITS = {"cpu": "200m", "memory": "256Mi"}


def head_service(cluster: Document) -> str:
    """Full name of the service that KubeRay makes for the head."""
    metadata = cluster["metadata"]
    return f"{metadata['name']}-head-svc.{metadata['namespace']}.{KUBERNETES_DOMAIN}"


def ray_pods(documents: list[Document]) -> dict[str, Document]:
    """Role to pod: the head, and one pod for each worker group.

    Args:
        documents: Manifests with one RayCluster.
    """
    cluster = ray_cluster(documents)
    pods = {"head": _node(cluster, cluster["spec"]["headGroupSpec"], None)}
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["replicas"] == 1
        pods[group["groupName"]] = _node(cluster, group, group["groupName"])
    return pods


def submitter_pod(job: Document, cluster: Document, job_id: str) -> Document:
    """The pod of the Kubernetes Job that submits a RayJob in K8sJobMode."""
    spec = job["spec"]
    template = copy.deepcopy(spec["submitterPodTemplate"])
    container = template["spec"]["containers"][0]
    address = f"http://{head_service(cluster)}:{DASHBOARD_PORT}"
    submit = ["ray job submit --address", address, "--no-wait --submission-id", job_id]
    if "entrypointNumCpus" in spec:
        submit += ["--entrypoint-num-cpus", f"{spec['entrypointNumCpus']:f}"]
    if "entrypointResources" in spec:
        submit += ["--entrypoint-resources", json.dumps(spec["entrypointResources"])]
    submit += ["--", spec["entrypoint"].strip()]
    container["command"] = ["/bin/bash", "-ce", "--"]
    container["args"] = [
        f"if ! ray job status --address {address} {job_id} >/dev/null 2>&1 ; then "
        f"{' '.join(submit)} ; fi ; ray job logs --address {address} --follow {job_id}"
    ]
    container["env"] = [
        *container.get("env", []),
        {"name": "RAY_DASHBOARD_ADDRESS", "value": address.removeprefix("http://")},
        {"name": "RAY_JOB_SUBMISSION_ID", "value": job_id},
    ]
    return _pod(f"{job['metadata']['name']}-submitter", cluster, template)


def _node(cluster: Document, group: Document, worker_group: str | None) -> Document:
    template = copy.deepcopy(group["template"])
    container = template["spec"]["containers"][0]
    service = head_service(cluster)
    start = _start_command(group, container, None if worker_group is None else service)
    token = _token_variables(cluster)
    if worker_group is not None:
        template["spec"].setdefault("initContainers", []).append(
            _wait_container(container, service, token)
        )
    labels = template["metadata"].setdefault("labels", {})
    # The template's own labels win, but for these three.
    defaults = {
        "ray.io/is-ray-node": "yes",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    fixed = {
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/node-type": "head" if worker_group is None else "worker",
        "ray.io/group": worker_group or "headgroup",
    }
    template["metadata"]["labels"] = defaults | labels | fixed
    overwrite = "ray.io/overwrite-container-cmd"
    if cluster["metadata"].get("annotations", {}).get(overwrite) == "true":
        template["metadata"].setdefault("annotations", {})[overwrite] = "true"
    else:
        container["command"] = ["/bin/bash", "-c", "--"]
        container["args"] = [f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {start}"]
    ports = container.setdefault("ports", [])
    ports.append({"name": "metrics", "containerPort": METRICS_PORT})
    head_address = "127.0.0.1" if worker_group is None else service
    own = {
        "RAY_NODE_TYPE_NAME": fixed["ray.io/group"],
        "RAY_CLUSTER_NAME": cluster["metadata"]["name"],
        "RAY_CLUSTER_NAMESPACE": cluster["metadata"]["namespace"],
        "KUBERAY_GEN_RAY_START_CMD": start,
        "RAY_PORT": str(GCS_PORT),
        "RAY_ADDRESS": f"{head_address}:{GCS_PORT}",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
    }
    if worker_group is not None:
        own |= {"FQ_RAY_IP": service, "RAY_IP": service.partition(".")[0]}
    held = container.setdefault("env", [])
    names = {one["name"] for one in held}
    held += [one for one in token if one["name"] not in names]
    held += [{"name": name, "value": value} for name, value in own.items() if name not in names]
    name = "head" if worker_group is None else f"{worker_group}-worker"
    return _pod(f"{cluster['metadata']['name']}-{name}", cluster, template)


def _pod(name: str, cluster: Document, template: Document) -> Document:
    metadata = template.get("metadata", {})
    namespace = cluster["metadata"]["namespace"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "name": name, "namespace": namespace},
        "spec": template["spec"],
    }


def _start_command(group: Document, container: Document, service: str | None) -> str:
    parameters = dict(group.get("rayStartParams", {}))
    custom = {}
    for name, text in group.get("resources", {}).items():
        option = {"cpu": "num-cpus", "gpu": "num-gpus", "memory": "memory"}.get(name.lower())
        if option is None:
            custom[name] = quantity(text)
        else:
            parameters[option] = str(int(quantity(text)))
    if custom:
        parameters["resources"] = f"'{json.dumps(custom, separators=(',', ':'))}'"
    if service is None:
        parameters.setdefault("dashboard-host", "0.0.0.0")  # noqa: S104  # KubeRay's own default
    else:
        parameters.setdefault("address", f"{service}:{GCS_PORT}")
    limits = container["resources"]["limits"]
    parameters.setdefault("num-cpus", str(int(quantity(limits["cpu"]))))
    parameters.setdefault("memory", str(int(quantity(limits["memory"]))))
    if "nvidia.com/gpu" in limits:
        parameters.setdefault("num-gpus", limits["nvidia.com/gpu"])
    parameters |= {"metrics-export-port": str(METRICS_PORT)}
    parameters |= {"dashboard-agent-listen-port": str(AGENT_PORT)}
    options = [f"--{name}={value}" for name, value in parameters.items()] + ["--block"]
    return " ".join(["ray start", *(["--head"] if service is None else []), *sorted(options)])


def _token_variables(cluster: Document) -> list[Document]:
    if cluster["spec"].get("authOptions", {}).get("mode") != "token":
        return []
    reference = {"name": cluster["metadata"]["name"], "key": "auth_token"}
    return [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": reference}},
    ]


def _wait_container(container: Document, service: str, token: list[Document]) -> Document:
    """What holds a worker until the head answers; it gets `env`, and not `envFrom`."""
    check = f"ray health-check --address {service}:{GCS_PORT}"
    return {
        "name": "wait-gcs-ready",
        "image": container["image"],
        "imagePullPolicy": container["imagePullPolicy"],
        "command": ["/bin/bash", "-c", "--"],
        "args": [
            "SECONDS=0\nwhile true; do\n"
            f"  if {check}; then echo GCS is ready.; break; fi\n"
            "  echo $SECONDS seconds elapsed: waiting for GCS to be ready.; sleep 5\ndone"
        ],
        "securityContext": copy.deepcopy(container["securityContext"]),
        "env": [*copy.deepcopy(container.get("env", [])), *copy.deepcopy(token)],
        "volumeMounts": copy.deepcopy(container["volumeMounts"]),
        "resources": {"limits": dict(WAIT_LIMITS), "requests": dict(WAIT_LIMITS)},
    }

"""What a Kubernetes cluster must have before the manifests are applied, each with what provides it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rdt_e2e.cluster.kube_api import Answer, KubeApi
from rdt_e2e.cluster.kube_manifests import (
    Document,
    GroupNeeds,
    group_needs,
    ray_cluster,
    ray_job_files,
)

MIN_OPERATOR = (1, 6)
"""First line of KubeRay's releases that these manifests are meant for; written against 1.7.0."""
OPERATOR_FIX = (
    "helm upgrade --install kuberay-operator kuberay-operator --version 1.7.0 "
    "--repo https://ray-project.github.io/kuberay-helm/ --namespace kuberay-system --create-namespace"
)
# Helm installs types once and never updates them; they are too large for a client-side apply.
TYPES_FIX = (
    "kubectl apply --server-side --force-conflicts -k "
    "'https://github.com/ray-project/kuberay/ray-operator/config/crd?ref=v1.7.0'"
)
MULTUS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"
MULTUS_CRD = "network-attachment-definitions.k8s.cni.cncf.io"
DRA_GROUP = "resource.k8s.io"

_PLUGINS = {
    "nvidia.com/gpu": "install NVIDIA's GPU Operator, or the provider's GPU driver and device plugin",
    "rdma/": "install the Network Operator with its RDMA shared device plugin or SR-IOV",
    "nvidia.com/mlnxnics": "make an SriovNetworkNodePolicy for the NICs (Network Operator)",
    "vpc.amazonaws.com/efa": "install the EFA device plugin (aws-efa-k8s-device-plugin)",
    "hugepages-": "reserve huge pages on the nodes, and restart kubelet",
}


@dataclass(frozen=True)
class Missing:
    """Something that the cluster lacks.

    Attributes:
        what: What was looked for and what was found.
        fix: The command, or the thing to install.
    """

    what: str
    fix: str


def missing_prerequisites(api: KubeApi, documents: Sequence[Document]) -> list[Missing]:
    """Compare a cluster with what the documents ask of it.

    Args:
        api: The cluster.
        documents: What is to be applied.

    Returns:
        What is missing, in the order in which to mend it; empty when all is there.
    """
    cluster = ray_cluster(documents)
    found = [*_types(api, cluster), *_operator(api), *_extensions(api, documents)]
    nodes = [node for node in api.nodes() if not node["spec"].get("unschedulable")]
    for needs in group_needs(cluster):
        found += _node(needs, nodes)
    return found


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number, such as 1500Gi as bytes or 500m as 0.5.

    Raises:
        ValueError: It is not one.
    """
    match = re.fullmatch(
        r"([0-9.]+(?:[eE][0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?", text.strip()
    )
    if match is None:
        raise ValueError(f"{text!r} is not a Kubernetes quantity")
    number, suffix = float(match[1]), match[2] or ""
    if suffix == "m":
        return number / 1000
    power = "kMGTPE".index(suffix[0].replace("K", "k")) + 1 if suffix else 0
    return number * (1024.0 if suffix.endswith("i") else 1000.0) ** power


def _types(api: KubeApi, cluster: Document) -> list[Missing]:
    """KubeRay's types, and the fields of them that are used here."""
    jobs = ray_job_files().values()
    used = {
        "rayclusters.ray.io": set(cluster["spec"]),
        "rayjobs.ray.io": {field for job in jobs for field in job["spec"]},
    }
    found = []
    for name, fields in used.items():
        crd = api.crd(name)
        if crd is None:
            found.append(Missing(f"the type {name} is not installed", OPERATOR_FIX))
            continue
        served = {one["name"]: one for one in crd["spec"]["versions"] if one.get("served")}
        if "v1" not in served:
            what = f"the type {name} serves {', '.join(served) or 'nothing'}, not v1"
            found.append(Missing(what, TYPES_FIX))
            continue
        schema = served["v1"].get("schema", {}).get("openAPIV3Schema", {}).get("properties", {})
        # The API server drops a field that it does not know, such as the one that asks for a token.
        unknown = fields - set(schema.get("spec", {}).get("properties", fields))
        if unknown:
            what = f"the type {name} is older than its use here: no {', '.join(sorted(unknown))}"
            found.append(Missing(what, TYPES_FIX))
    return found


def _operator(api: KubeApi) -> list[Missing]:
    deployments = api.operators()
    if not deployments:
        return [Missing("KubeRay's operator is not running", OPERATOR_FIX)]
    (first, *_) = deployments
    place = f"{first['metadata']['namespace']}/{first['metadata']['name']}"
    if not first.get("status", {}).get("readyReplicas"):
        fix = f"kubectl -n {first['metadata']['namespace']} describe deployment {first['metadata']['name']}"
        return [Missing(f"KubeRay's operator {place} has no ready pod", fix)]
    image = str(first["spec"]["template"]["spec"]["containers"][0]["image"])
    match = re.search(r":v?(\d+)\.(\d+)", image)
    # A site's own tag says nothing about the release; the types were looked at above.
    if match is not None and (int(match[1]), int(match[2])) < MIN_OPERATOR:
        wanted = ".".join(map(str, MIN_OPERATOR))
        return [Missing(f"KubeRay's operator is {image}, older than {wanted}", OPERATOR_FIX)]
    return []


def _extensions(api: KubeApi, documents: Sequence[Document]) -> list[Missing]:
    found = []
    groups = ray_cluster(documents)["spec"]["workerGroupSpecs"]
    annotated = [
        group["groupName"]
        for group in groups
        if MULTUS_ANNOTATION in group["template"].get("metadata", {}).get("annotations", {})
    ]
    if annotated and api.crd(MULTUS_CRD) is None:
        what = f"groups {', '.join(annotated)} ask for Multus networks, and Multus is not installed"
        found.append(Missing(what, "install the Network Operator with Multus, or another overlay"))
    claims = any(one["kind"] == "ResourceClaimTemplate" for one in documents)
    if claims and DRA_GROUP not in api.api_groups():
        fix = "Kubernetes 1.34 or newer and DRA drivers for GPUs and NICs, or another overlay"
        found.append(Missing(f"the API group {DRA_GROUP} (DRA) is not served", fix))
    return found


def _node(needs: GroupNeeds, nodes: Sequence[Answer]) -> list[Missing]:
    """What keeps a group from every node; the node that comes nearest is the one that is named."""
    labelled = [node for node in nodes if _has_labels(node, needs)]
    if not labelled:
        labels = " ".join(f"{key}={value}" for key, value in needs.node_selector.items())
        free = [one for one in nodes if not _lacking(one, needs) and not _has_role(one, needs)]
        name = free[0]["metadata"]["name"] if free else "NODE"
        what = f"no node has the label {labels} for the {needs.role} pod"
        return [Missing(what, f"kubectl label node {name} {labels}")]
    best = min(labelled, key=lambda node: len(_lacking(node, needs)))
    name = best["metadata"]["name"]
    return [
        Missing(f"node {name} ({needs.role}) offers {have} {resource}, {want} is asked for", fix)
        for resource, (have, want, fix) in _lacking(best, needs).items()
    ]


def _has_labels(node: Answer, needs: GroupNeeds) -> bool:
    labels = node["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in needs.node_selector.items())


def _has_role(node: Answer, needs: GroupNeeds) -> bool:
    """Whether it is labelled for another group already."""
    return any(key in node["metadata"].get("labels", {}) for key in needs.node_selector)


def _lacking(node: Answer, needs: GroupNeeds) -> dict[str, tuple[str, str, str]]:
    """Resource to what the node offers, what is asked for and how to mend it."""
    offered = node["status"].get("allocatable", {})
    found = {}
    for resource, want in needs.requests.items():
        have = str(offered.get(resource, "0"))
        if quantity(have) < quantity(want):
            found[resource] = (have, want, _fix(resource, needs.role, have))
    return found


def _fix(resource: str, role: str, have: str) -> str:
    for prefix, fix in _PLUGINS.items():
        if resource.startswith(prefix) and quantity(have) == 0:
            return f"{fix}; or another overlay (OVERLAY=...), where the resource has another name"
    return f"label a larger node, or lower {resource} of the {role} group in k8s/70-raycluster.yaml"

"""Checks of the Kubernetes cluster, where kubectl reaches one."""

import json

from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Finding, Theme, fail, ok, skip, warn

THEME = Theme("k8s", "Kubernetes")

OPERATOR_FIX = "helm upgrade --install kuberay-operator kuberay/kuberay-operator --version 1.7.0  # brings the CRDs"
_CRDS = ("rayclusters.ray.io", "rayjobs.ray.io")


@THEME.check(
    "operator",
    "KubeRay's types are served",
    looks_at="kubectl get crd rayclusters.ray.io rayjobs.ray.io",
    why="The manifests need KubeRay's ray.io/v1. Its definitions are too large for a client-side apply: "
    "`metadata.annotations: Too long`.",
    sources=("kuberay#410", "kuberay#504", "aibrix#1151"),
)
def _operator(context: Context) -> Finding:
    if context.host.which("kubectl") is None:
        return skip("there is no kubectl here")
    answer = context.host.run(
        ["kubectl", "get", "crd", *_CRDS, "-o", "json", "--request-timeout=4s"]
    )
    if answer.code is None or ("NotFound" not in answer.stderr and answer.code != 0):
        return skip("kubectl reaches no cluster, or may not list its types")
    if answer.code != 0:
        return fail("the types are not installed", OPERATOR_FIX)
    items = json.loads(answer.stdout)["items"]
    old = [
        item["metadata"]["name"]
        for item in items
        if not any(v["name"] == "v1" and v["served"] for v in item["spec"]["versions"])
    ]
    if old:
        return fail(f"v1 is not served for {', '.join(old)}", OPERATOR_FIX)
    return ok(f"{', '.join(_CRDS)} serve v1")


@THEME.check(
    "allocatable",
    "Nodes offer GPUs and RDMA",
    looks_at="kubectl get nodes: allocatable nvidia.com/gpu and rdma resources",
    why="Without the device plugins a pod stays pending, or starts without its NICs; the RDMA resource "
    "is named differently by each provider.",
    sources=("kuberay#1414", "kuberay#2528", "k8s-rdma-shared-dev-plugin#297"),
)
def _allocatable(context: Context) -> Finding:
    if context.host.which("kubectl") is None:
        return skip("there is no kubectl here")
    answer = context.host.run(["kubectl", "get", "nodes", "-o", "json", "--request-timeout=4s"])
    if answer.code != 0:
        return skip("kubectl reaches no cluster, or may not list its nodes")
    offers = [node["status"].get("allocatable", {}) for node in json.loads(answer.stdout)["items"]]
    wanted = (context.config.trainer.num_ranks, context.config.num_consumers)
    gpus = sorted((int(offer.get("nvidia.com/gpu", 0)) for offer in offers), reverse=True)
    text = f"GPUs per node: {', '.join(map(str, gpus))}"
    fix = "install the GPU Operator and the Network Operator, or your provider's device plugins"
    if len(gpus) < 2 or any(
        g < w for g, w in zip(gpus, sorted(wanted, reverse=True), strict=False)
    ):
        return fail(f"{text}; two nodes with {wanted[0]} and {wanted[1]} are needed", fix)
    rdma = sorted({name for offer in offers for name in offer if _is_rdma(name)})
    return ok(f"{text}; {', '.join(rdma)}") if rdma else warn(f"{text}; no RDMA resource", fix)


def _is_rdma(resource: str) -> bool:
    return resource.startswith("rdma/") or resource.split("/")[-1] in {"mlnxnics", "efa"}

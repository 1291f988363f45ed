"""Write every object of the manifests, and every pod that comes of them, for a linter to read.

python -m tests.k8s_objects FOLDER
"""

import sys
from pathlib import Path

import yaml

from rdt_e2e.cluster.kube_manifests import (
    Document,
    load_manifests,
    manifests_dir,
    overlay_names,
    ray_cluster,
)
from rdt_e2e.cluster.kubectl import Kubectl
from tests.kuberay_pods import ray_pods, submitter_pod

ROOT = (
    "CKV_K8S_23",
    "runs as root: a user other than root gets no effective IPC_LOCK from Kubernetes",
)
EXCUSED = {
    "rdt-e2e-trainer-worker": [
        ROOT,
        ("CKV_K8S_25", "adds IPC_LOCK alone: RDMA locks the memory that it registers"),
    ],
    "download": [("CKV_K8S_23", "runs as root: the model folder of the node belongs to root")],
}
EXCUSED["rdt-e2e-inference-worker"] = EXCUSED["rdt-e2e-trainer-worker"]
HOST_NETWORK = ("CKV_K8S_19", "is what this overlay is for")
"""Object to the checks of checkov that it is excused from, each with its reason."""


def objects(overlay: str | None) -> list[Document]:
    """What a cluster holds after `k8s/`, or one of its overlays, and after all jobs."""
    documents = load_manifests(overlay, Kubectl())
    jobs = [yaml.safe_load(path.read_text()) for path in (manifests_dir() / "jobs").glob("*.yaml")]
    found = [one for one in [*documents, *jobs] if not one["apiVersion"].startswith("ray.io/")]
    found += ray_pods(documents).values()
    cluster = ray_cluster(documents)
    found += [_submitter_job(one, cluster) for one in jobs if one["kind"] == "RayJob"]
    return [_excused(one, overlay) for one in found]


def _submitter_job(job: Document, cluster: Document) -> Document:
    """The Job that the operator makes of a RayJob."""
    pod = submitter_pod(job, cluster, "id")
    template = {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": pod["spec"]}
    spec = {"backoffLimit": job["spec"]["submitterConfig"]["backoffLimit"], "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": job["metadata"], "spec": spec}


def _excused(document: Document, overlay: str | None) -> Document:
    excuses = list(EXCUSED.get(document["metadata"]["name"], []))
    if overlay == "cpu" and document["kind"] == "Pod":
        excuses = []  # Its pods need no RDMA, and so no exception.
    elif overlay == "host-network" and excuses and document["kind"] == "Pod":
        excuses.append(HOST_NETWORK)
    notes = {f"checkov.io/skip{i}": "=".join(one) for i, one in enumerate(excuses, start=1)}
    if not notes:
        return document
    metadata = document["metadata"]
    annotations = metadata.get("annotations", {}) | notes
    return document | {"metadata": metadata | {"annotations": annotations}}


def main() -> None:
    """Write one file for each variant of the manifests."""
    folder = Path(sys.argv[1])
    num_pods = 0
    for overlay in (None, *overlay_names()):
        held = objects(overlay)
        num_pods += len([one for one in held if one["kind"] in ("Pod", "Job")])
        (folder / f"{overlay or 'plain'}.yaml").write_text(yaml.safe_dump_all(held))
    print(f"{len(overlay_names()) + 1} variants, {num_pods} pods")  # noqa: T201


if __name__ == "__main__":
    main()

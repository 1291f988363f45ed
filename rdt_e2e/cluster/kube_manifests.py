"""The Kubernetes manifests of this repository as documents: rendered, and read for what they ask.

`kubectl` renders the overlays, so that what is applied is what a user would get by hand.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rdt_e2e.cluster.kubectl import Kubectl
from rdt_e2e.errors import ConfigError

Document = dict[str, Any]

CLUSTER_NAME = "rdt-e2e"
"""Name of the RayCluster; KubeRay names the head's service and the token's Secret after it."""
NAMESPACE = "rdt-e2e"
NODE_SELECTOR = f"ray.io/cluster={CLUSTER_NAME}"
"""What finds the pods of the RayCluster: KubeRay labels them so."""
ROLES = ("head", "trainer", "inference")
BASE = "base"
"""The folder below `k8s/overlays` that only collects the plain manifests."""


@dataclass(frozen=True)
class GroupNeeds:
    """What one worker group asks of a node.

    Attributes:
        role: Name of the group, trainer or inference.
        node_selector: Labels that the node must have.
        requests: Resource to quantity, as written in the manifest.
    """

    role: str
    node_selector: Mapping[str, str]
    requests: Mapping[str, str]


def manifests_dir() -> Path:
    """The repository's `k8s` folder; an installed copy has none.

    Raises:
        ConfigError: The program does not run from a clone of the repository.
    """
    folder = Path(__file__).parents[2] / "k8s"
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; the Kubernetes target runs from a clone of the repository"
        )
    return folder


def overlay_names() -> tuple[str, ...]:
    """Names that OVERLAY may take, sorted."""
    folders = (manifests_dir() / "overlays").iterdir()
    return tuple(sorted(one.name for one in folders if one.is_dir() and one.name != BASE))


def load_manifests(
    overlay: str | None, kubectl: Kubectl, image: str | None = None
) -> list[Document]:
    """The documents to apply, in order.

    Args:
        overlay: Name of an overlay, or None for the plain manifests.
        kubectl: Renders the overlay.
        image: Image of every container, in place of the one in the manifests.

    Raises:
        ConfigError: There is no such overlay.
        EnvironmentCheckError: kubectl is missing or cannot render it.
    """
    if overlay is None:
        texts = [path.read_text() for path in sorted(manifests_dir().glob("*.yaml"))]
    elif overlay in overlay_names():
        texts = [kubectl.kustomize(manifests_dir() / "overlays" / overlay)]
    else:
        raise ConfigError(
            f"no overlay {overlay!r} (OVERLAY); overlays: {', '.join(overlay_names())}"
        )
    documents = [one for text in texts for one in yaml.safe_load_all(text) if one]
    return [with_image(document, image) for document in documents]


def ray_job_files() -> dict[str, Document]:
    """Stem of the file to document, for each RayJob in `k8s/jobs`, sorted."""
    paths = sorted((manifests_dir() / "jobs").glob("*.yaml"))
    held = {path.stem: yaml.safe_load(path.read_text()) for path in paths}
    return {stem: one for stem, one in held.items() if one["kind"] == "RayJob"}


def load_job(name: str, *, run_name: str, image: str) -> Document:
    """A RayJob of `k8s/jobs`, under a name of its own.

    Args:
        name: Name of the file.
        run_name: Name of the object; a finished RayJob does not run again.
        image: Image of the submitter, the cluster's.

    Raises:
        ConfigError: There is no such job, or it is not a RayJob.
    """
    jobs = ray_job_files()
    if name not in jobs:
        raise ConfigError(f"no RayJob {name!r} (JOB) in k8s/jobs; there are {', '.join(jobs)}")
    job = with_image(jobs[name], image)
    job["metadata"]["name"] = run_name
    return job


def with_image(document: Document, image: str | None) -> Document:
    """A copy in which every container has this image; the document itself without one."""
    if image is None:
        return document
    changed = copy.deepcopy(document)
    for pod in pod_specs(changed):
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            container["image"] = image
    return changed


def pod_specs(document: Document) -> Iterator[Document]:
    """Pod specifications inside a document, at any depth: they are what has `containers`."""
    pending: list[Any] = [document]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            if isinstance(part.get("containers"), list):
                yield part
            pending += part.values()


def ray_cluster(documents: Sequence[Document]) -> Document:
    """The one RayCluster.

    Raises:
        ConfigError: There is none, or several.
    """
    found = [one for one in documents if one["kind"] == "RayCluster"]
    if len(found) != 1:
        raise ConfigError(f"the manifests hold {len(found)} RayClusters; exactly one is needed")
    return found[0]


def group_needs(cluster: Document) -> list[GroupNeeds]:
    """What each worker group of a RayCluster asks of its node."""
    needs = []
    for group in cluster["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        requests = pod["containers"][0]["resources"].get("requests", {})
        needs.append(GroupNeeds(group["groupName"], pod.get("nodeSelector", {}), requests))
    return needs


def stub(kind: str, api_version: str, name: str) -> Document:
    """As much of an object as it takes to delete it."""
    metadata = {"name": name}
    if kind != "Namespace":
        metadata["namespace"] = NAMESPACE
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}

"""The few questions that are put to a Kubernetes cluster, through its official client.

Answers are plain dictionaries in the form of the API (camelCase), so that a test can be one.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import urllib3

from rdt_e2e.errors import EnvironmentCheckError

Answer = dict[str, Any]
RAY_GROUP, RAY_VERSION = "ray.io", "v1"
REQUEST_TIMEOUT_S = 30
NOT_FOUND = 404


class KubeApi(Protocol):
    """What `rdt_e2e.cluster.kubernetes` asks of a cluster."""

    def crd(self, name: str) -> Answer | None:
        """A custom resource's definition, or None."""

    def operators(self) -> list[Answer]:
        """Deployments of KubeRay's operator, in any namespace."""

    def api_groups(self) -> set[str]:
        """Names of the API groups that are served."""

    def nodes(self) -> list[Answer]:
        """All nodes."""

    def pods(self, namespace: str, selector: str) -> list[Answer]:
        """Pods with these labels."""

    def events(self, namespace: str, name: str) -> list[Answer]:
        """Events about the object of this name, oldest first."""

    def objects(self, namespace: str) -> list[str]:
        """What would be lost with a namespace, as kind/name, but for what Kubernetes puts there."""

    def namespace(self, name: str) -> Answer | None:
        """A namespace, or None."""

    def follow_log(self, namespace: str, pod: str) -> Iterator[str]:
        """Lines of a pod's log, until its container ends."""

    def log_tail(self, namespace: str, pod: str, num_lines: int, *, previous: bool) -> list[str]:
        """Last lines of a pod's container, or of the one before its restart."""

    def ray_object(self, plural: str, namespace: str, name: str) -> Answer | None:
        """A RayCluster or RayJob, or None."""

    def ray_objects(self, plural: str, namespace: str, selector: str) -> list[Answer]:
        """RayClusters or RayJobs with these labels; all for an empty selector."""

    def create_ray_job(self, namespace: str, job: Answer) -> None:
        """Create a RayJob."""


def contexts() -> tuple[list[str], str]:
    """Names of the contexts in the kubeconfig, and the current one.

    Raises:
        EnvironmentCheckError: There is no kubeconfig, or it cannot be read.
    """
    from kubernetes import config

    try:
        found, active = config.list_kube_config_contexts(config_file=_kubeconfig())
    except config.ConfigException as error:
        raise EnvironmentCheckError(
            f"no usable kubeconfig: {error}; set KUBECONFIG, or get one from your provider"
        ) from error
    return [str(one["name"]) for one in found], str(active["name"])


def _kubeconfig() -> str:
    """The files that kubectl would read; the client would look at the variable at its import only."""
    return os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


class OfficialApi:
    """`KubeApi` over the official client, on one context.

    Args:
        context: Name of the context.
    """

    def __init__(self, context: str) -> None:
        # Imported here: it takes a second, and only this target needs it.
        from kubernetes import client, config

        self._client = config.new_client_from_config(config_file=_kubeconfig(), context=context)
        self._errors = client.ApiException
        self._core = client.CoreV1Api(self._client)
        self._apps = client.AppsV1Api(self._client)
        self._batch = client.BatchV1Api(self._client)
        self._apis = client.ApisApi(self._client)
        self._crds = client.ApiextensionsV1Api(self._client)
        self._custom = client.CustomObjectsApi(self._client)

    def crd(self, name: str) -> Answer | None:
        """A custom resource's definition, or None."""
        return self._one(self._crds.read_custom_resource_definition, name)

    def operators(self) -> list[Answer]:
        """Deployments of KubeRay's operator: Helm's and kustomize's labels differ."""
        return self._items(
            self._apps.list_deployment_for_all_namespaces,
            label_selector="app.kubernetes.io/name in (kuberay-operator,kuberay)",
        )

    def api_groups(self) -> set[str]:
        """Names of the API groups that are served."""
        return {str(one["name"]) for one in self._ask(self._apis.get_api_versions)["groups"]}

    def nodes(self) -> list[Answer]:
        """All nodes."""
        return self._items(self._core.list_node)

    def pods(self, namespace: str, selector: str) -> list[Answer]:
        """Pods with these labels."""
        return self._items(self._core.list_namespaced_pod, namespace, label_selector=selector)

    def events(self, namespace: str, name: str) -> list[Answer]:
        """Events about the object of this name, oldest first."""
        found = self._items(
            self._core.list_namespaced_event,
            namespace,
            field_selector=f"involvedObject.name={name}",
        )
        return sorted(found, key=lambda event: str(event.get("lastTimestamp") or ""))

    def objects(self, namespace: str) -> list[str]:
        """What would be lost with a namespace, as kind/name, but for what Kubernetes puts there."""
        lists = {
            "pod": self._core.list_namespaced_pod,
            "service": self._core.list_namespaced_service,
            "persistentvolumeclaim": self._core.list_namespaced_persistent_volume_claim,
            "secret": self._core.list_namespaced_secret,
            "configmap": self._core.list_namespaced_config_map,
            "job": self._batch.list_namespaced_job,
            "deployment": self._apps.list_namespaced_deployment,
            "statefulset": self._apps.list_namespaced_stateful_set,
        }
        found = [(kind, one) for kind, ask in lists.items() for one in self._items(ask, namespace)]
        for plural in ("rayclusters", "rayjobs"):
            found += [(plural[:-1], one) for one in self.ray_objects(plural, namespace, "")]
        return [f"{kind}/{one['metadata']['name']}" for kind, one in found if not _built_in(one)]

    def namespace(self, name: str) -> Answer | None:
        """A namespace, or None."""
        return self._one(self._core.read_namespace, name)

    def follow_log(self, namespace: str, pod: str) -> Iterator[str]:
        """Lines of a pod's log, until its container ends."""
        response = self._core.read_namespaced_pod_log(
            pod, namespace, follow=True, _preload_content=False
        )
        pending = b""
        for part in response.stream():
            *lines, pending = (pending + part).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        if pending:
            yield pending.decode(errors="replace")

    def log_tail(self, namespace: str, pod: str, num_lines: int, *, previous: bool) -> list[str]:
        """Last lines of a pod's container, or of the one before its restart."""
        try:
            text = self._core.read_namespaced_pod_log(
                pod, namespace, tail_lines=num_lines, previous=previous
            )
        except self._errors:
            return []  # No container has run yet, or its log is gone.
        return str(text).splitlines()

    def ray_object(self, plural: str, namespace: str, name: str) -> Answer | None:
        """A RayCluster or RayJob, or None."""
        ask = self._custom.get_namespaced_custom_object
        return self._one(ask, RAY_GROUP, RAY_VERSION, namespace, plural, name)

    def ray_objects(self, plural: str, namespace: str, selector: str) -> list[Answer]:
        """RayClusters or RayJobs with these labels."""
        ask = self._custom.list_namespaced_custom_object
        found = self._ask(ask, RAY_GROUP, RAY_VERSION, namespace, plural, label_selector=selector)
        return list(found["items"])

    def create_ray_job(self, namespace: str, job: Answer) -> None:
        """Create a RayJob."""
        ask = self._custom.create_namespaced_custom_object
        self._ask(ask, RAY_GROUP, RAY_VERSION, namespace, "rayjobs", job)

    def _items(self, ask: Any, *arguments: Any, **options: Any) -> list[Answer]:
        return list(self._ask(ask, *arguments, **options).get("items") or [])

    def _one(self, ask: Any, *arguments: Any) -> Answer | None:
        try:
            return self._plain(ask(*arguments, _request_timeout=REQUEST_TIMEOUT_S))
        except self._errors as error:
            if error.status == NOT_FOUND:
                return None
            raise self._refused(error) from error
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error) from error

    def _ask(self, ask: Any, *arguments: Any, **options: Any) -> Answer:
        try:
            return self._plain(ask(*arguments, **options, _request_timeout=REQUEST_TIMEOUT_S))
        except self._errors as error:
            raise self._refused(error) from error
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error) from error

    def _plain(self, answer: Any) -> Answer:
        plain: Answer = self._client.sanitize_for_serialization(answer)
        return plain

    @staticmethod
    def _refused(error: Any) -> EnvironmentCheckError:
        return EnvironmentCheckError(
            f"the cluster refused a request ({error.status} {error.reason}); check the context and "
            "the rights of its user: `kubectl auth can-i --list`"
        )

    def _unreachable(self, error: Exception) -> EnvironmentCheckError:
        return EnvironmentCheckError(
            f"the cluster at {self._client.configuration.host} does not answer ({error}); check the "
            "context, the network and `kubectl cluster-info`"
        )


def _built_in(found: Answer) -> bool:
    """Whether Kubernetes makes this object in each namespace, or KubeRay for a cluster or job."""
    metadata = found["metadata"]
    owners = [str(one.get("apiVersion")) for one in metadata.get("ownerReferences") or []]
    return (
        any(owner.startswith(f"{RAY_GROUP}/") for owner in owners)
        or metadata["name"] in ("kube-root-ca.crt", "openshift-service-ca.crt")
        or found.get("type") == "kubernetes.io/service-account-token"
    )

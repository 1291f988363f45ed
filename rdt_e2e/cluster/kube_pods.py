"""What a pod waits for or died of, in one line, from what Kubernetes says about it."""

from dataclasses import dataclass, field

from rdt_e2e.cluster.kube_api import Answer, KubeApi
from rdt_e2e.console import Console

LOG_LINES = 8
_FATAL = frozenset({"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"})
_FATAL_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError"})
_HINTS = {
    "Insufficient nvidia.com/gpu": "something else holds the GPUs: `kubectl describe nodes`",
    "Insufficient rdma/": "the RDMA resource has another name here, or is taken: choose an overlay",
    "didn't match Pod's node affinity/selector": "label the node: kubectl label node NODE rdt-e2e/role=...",
    "untolerated taint": "add the taint to tolerations in k8s/70-raycluster.yaml",
    "didn't match pod anti-affinity rules": "trainer and inference need a node each",
    "Insufficient memory": "lower memory in k8s/70-raycluster.yaml to what the node offers",
    "Insufficient cpu": "lower cpu in k8s/70-raycluster.yaml to what the node offers",
}


@dataclass
class StateLines:
    """Prints what has changed since the last time, and only that."""

    console: Console
    _said: dict[str, str] = field(default_factory=dict)

    def say(self, states: dict[str, str]) -> None:
        """Print each state that is new.

        Args:
            states: Who to what.
        """
        for who, state in states.items():
            if self._said.get(who) != state:
                self._said[who] = state
                self.console.info(f"  {who}: {state}")


def role_of(pod: Answer) -> str:
    """The node of ours that a pod is: head, trainer or inference."""
    return str(pod["metadata"].get("labels", {}).get("rdt-e2e/node", "unknown"))


def is_ready(pod: Answer) -> bool:
    """Whether the pod is running and passes its probe, and is not being deleted."""
    if pod["metadata"].get("deletionTimestamp"):
        return False
    conditions = pod.get("status", {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def state_of(api: KubeApi, pod: Answer) -> str:
    """Why a pod is not ready yet, with a hint where there is a usual reason."""
    status = pod.get("status", {})
    for one in status.get("conditions") or []:
        if one["type"] == "PodScheduled" and one["status"] == "False":
            message = str(one.get("message", "waits for a node"))
            hints = [hint for text, hint in _HINTS.items() if text in message]
            return f"not scheduled: {message}" + "".join(f" ({hint})" for hint in hints[:1])
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return f"{container['name']}: {waiting['reason']}: {waiting.get('message', '')}".rstrip(
                ": "
            )
    warnings = [
        str(event.get("message", ""))
        for event in api.events(pod["metadata"]["namespace"], pod["metadata"]["name"])
        if event.get("type") == "Warning"
    ]
    if warnings:
        return f"{status.get('phase', 'Pending')}: {warnings[-1]}"
    if status.get("phase") == "Running":
        return "running, its Ray node is not ready yet"
    return str(status.get("phase", "Pending"))


def hopeless(api: KubeApi, pod: Answer) -> str | None:
    """What will not mend by waiting: an image that cannot be had, or a container that keeps ending.

    Returns:
        The reason with the end of the pod's log, or None while there is hope.
    """
    metadata = pod["metadata"]
    for container in _containers(pod):
        reason = container.get("state", {}).get("waiting", {}).get("reason")
        if reason in _FATAL:
            return (
                f"pod {metadata['name']} cannot get its image {container.get('image')} ({reason}); push "
                "the image to a registry that the nodes reach, and name it with IMAGE=..."
            )
        if reason in _FATAL_CONFIG:
            return f"pod {metadata['name']} cannot start: {state_of(api, pod)}"
        if container.get("restartCount", 0) >= 2:
            lines = api.log_tail(metadata["namespace"], metadata["name"], LOG_LINES, previous=True)
            said = " | ".join(line.strip() for line in lines if line.strip()) or "it wrote no log"
            return (
                f"pod {metadata['name']} ended {container['restartCount']} times while starting. Its "
                f"last lines: {said}"
            )
    return None


def _containers(pod: Answer) -> list[Answer]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]

"""Rules of KubeRay's operator, and of Ray, that the CRD schemas do not hold.

Source: the validation and pod code of KubeRay v1.7.0 (ray-operator/controllers/ray/utils/validation.go
and common/pod.go), and its issues #410, #1738 and #2063.
"""

import json
import re
from typing import Any

MAX_CLUSTER_NAME = 53
MAX_JOB_NAME = 47
MODES = ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
ALPHA = ("networkPolicy", "tlsOptions", "historyServerOptions")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_OF_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
_AUTH_SINCE = (2, 52)


def broken_rules(document: dict[str, Any]) -> list[str]:
    """What the operator would refuse or silently not do; empty for a document of another kind."""
    if document["kind"] == "RayCluster":
        return _cluster(document)
    if document["kind"] == "RayJob":
        return _job(document)
    return []


def _name(document: dict[str, Any], limit: int) -> list[str]:
    name = document["metadata"]["name"]
    found = []
    if _DNS_1035.fullmatch(name) is None:
        found.append(f"name {name}: not DNS-1035")
    if len(name) > limit:
        found.append(f"name {name}: longer than {limit}")
    return found


def _cluster(document: dict[str, Any]) -> list[str]:
    spec = document["spec"]
    found = _name(document, MAX_CLUSTER_NAME)
    found += [f"{key}: an alpha gate, off by default" for key in ALPHA if key in spec]
    if "authOptions" in spec:
        release = tuple(int(part) for part in spec.get("rayVersion", "0.0").split(".")[:2])
        if spec["authOptions"].get("mode") != "token":
            found.append("authOptions: does nothing without mode: token")
        if release < _AUTH_SINCE:
            found.append("authOptions: needs rayVersion 2.52.0 or newer")
    for name, group in _groups(spec):
        params = group.get("rayStartParams", {})
        if group.get("resources") and set(params) & set(_OF_RESOURCES):
            found.append(f"{name}: resources beside rayStartParams of the same meaning")
        if "labels" in params:
            found.append(f"{name}: rayStartParams.labels is refused")
        if name != "head":
            counts = [group.get(key) for key in ("replicas", "minReplicas", "maxReplicas")]
            if counts != [counts[0]] * 3 or not counts[0]:
                found.append(f"{name}: replicas {counts}; not fixed, or the default of 0")
        variables = {
            one["name"] for one in group["template"]["spec"]["containers"][0].get("env", [])
        }
        if "RAY_REDIS_ADDRESS" in variables and "gcsFaultToleranceOptions" not in spec:
            found.append(f"{name}: a redis address without gcsFaultToleranceOptions")
        found += _pod(name, group["template"]["spec"])
    return found


def _groups(spec: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    workers = [(group["groupName"], group) for group in spec.get("workerGroupSpecs", [])]
    return [("head", spec["headGroupSpec"]), *workers]


def _pod(name: str, pod: dict[str, Any]) -> list[str]:
    found = []
    first = pod["containers"][0]["name"]
    if not first.startswith("ray-"):
        found.append(f"{name}: container 0 is {first}; it must be Ray's")
    if pod.get("hostNetwork"):
        if pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
            found.append(f"{name}: hostNetwork without dnsPolicy ClusterFirstWithHostNet")
        required = pod.get("affinity", {}).get("podAntiAffinity", {})
        if not required.get("requiredDuringSchedulingIgnoredDuringExecution"):
            found.append(f"{name}: hostNetwork without required anti-affinity: ports clash")
    return found


def _job(document: dict[str, Any]) -> list[str]:
    spec = document["spec"]
    found = _name(document, MAX_JOB_NAME)
    mode = spec.get("submissionMode", "K8sJobMode")
    selector = spec.get("clusterSelector")
    rules = spec.get("deletionStrategy", {}).get("deletionRules", [])
    shutdown, ttl = spec.get("shutdownAfterJobFinishes"), spec.get("ttlSecondsAfterFinished", 0)
    if mode not in MODES:
        found.append(f"submissionMode {mode}: none of {', '.join(MODES)}")
    if bool(selector) == ("rayClusterSpec" in spec):
        found.append("one of clusterSelector and rayClusterSpec is needed")
    if ttl and not shutdown:
        found.append("ttlSecondsAfterFinished needs shutdownAfterJobFinishes")
    if rules and (shutdown or ttl):
        found.append("deletionRules exclude shutdownAfterJobFinishes and ttlSecondsAfterFinished")
    if selector and (shutdown or any(rule["policy"] == "DeleteWorkers" for rule in rules)):
        found.append("a selected cluster is not this job's to delete")
    if selector and spec.get("backoffLimit"):
        found.append("a retry makes a new cluster, which clusterSelector excludes")
    if mode == "SidecarMode" and (selector or "submitterPodTemplate" in spec):
        found.append("SidecarMode excludes clusterSelector and submitterPodTemplate")
    found += _ordered(rules)
    if "entrypointResources" in spec:
        try:
            json.loads(spec["entrypointResources"])
        except ValueError:
            found.append("entrypointResources is not JSON")
    if "submitterPodTemplate" in spec:
        policy = spec["submitterPodTemplate"]["spec"].get("restartPolicy")
        if policy not in ("Never", "OnFailure"):
            found.append("submitterPodTemplate: restartPolicy must be Never or OnFailure")
    return found


def _ordered(rules: list[dict[str, Any]]) -> list[str]:
    """Workers must not outlive their cluster, nor the cluster its job."""
    ttl = {rule["policy"]: rule["condition"].get("ttlSeconds", 0) for rule in rules}
    order = [ttl[one] for one in ("DeleteWorkers", "DeleteCluster", "DeleteSelf") if one in ttl]
    return [] if order == sorted(order) else ["deletionRules: TTLs out of order"]

"""Rules of KubeRay's operator, and of Ray, that the CRD schemas do not hold.

Source: the validation and pod code of KubeRay v1.7.0 (ray-operator/controllers/ray/utils/validation.go
and common/pod.go), and its issues #410, #1738 and #2063.
"""

import json
import re
from typing import Any

import yaml

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
    autoscaled = spec.get("enableInTreeAutoscaling", False)
    for name, group in _groups(spec):
        if not group["template"]["spec"].get("containers"):
            found.append(f"{name}: no container")
            continue
        params = group.get("rayStartParams", {})
        if "redis-username" in params:
            found.append(f"{name}: the redis user is set in gcsFaultToleranceOptions")
        labels = group.get("labels", {}).items()
        found += [f"{name}: label {k}={v} is none" for k, v in labels if not _is_label(k, v)]
        if group.get("suspend") and autoscaled:
            found.append(f"{name}: suspended while autoscaled")
        if autoscaled and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            found.append(f"{name}: autoscaling wants restartPolicy Never")
        if group.get("resources") and set(params) & set(_OF_RESOURCES):
            found.append(f"{name}: resources beside rayStartParams of the same meaning")
        if "labels" in params:
            found.append(f"{name}: rayStartParams.labels is refused")
        if name != "head":
            counts = [group.get(key) for key in ("replicas", "minReplicas", "maxReplicas")]
            if counts != [counts[0]] * 3 or not counts[0]:
                found.append(f"{name}: replicas {counts}; not fixed, or the default of 0")
        variables = {
            one["name"]: one.get("value")
            for one in group["template"]["spec"]["containers"][0].get("env", [])
        }
        if not autoscaled and variables.get("RAY_enable_autoscaler_v2") in ("1", "true"):
            found.append(f"{name}: the autoscaler's variable without enableInTreeAutoscaling")
        if "RAY_REDIS_ADDRESS" in variables and "gcsFaultToleranceOptions" not in spec:
            found.append(f"{name}: a redis address without gcsFaultToleranceOptions")
        found += _pod(name, group["template"]["spec"])
    return found


def _is_label(key: str, value: str) -> bool:
    name = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
    known = re.fullmatch(rf"([a-z0-9.-]{{1,253}}/)?{name}", key)
    return known is not None and re.fullmatch(f"({name})?", value) is not None


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
    if selector and not selector.get("ray.io/cluster"):
        found.append("clusterSelector names no ray.io/cluster")
    if spec.get("suspend") and (selector or not shutdown):
        found.append("suspend excludes clusterSelector, and needs shutdownAfterJobFinishes")
    if ttl < 0 or spec.get("activeDeadlineSeconds", 1) <= 0 or spec.get("backoffLimit", 0) < 0:
        found.append("a limit is negative, or no time at all")
    try:
        yaml.safe_load(spec.get("runtimeEnvYAML", ""))
    except yaml.YAMLError:
        found.append("runtimeEnvYAML is not YAML")
    if mode == "InteractiveMode" and spec.get("backoffLimit"):
        found.append("InteractiveMode is not tried again")
    if bool(selector) == ("rayClusterSpec" in spec):
        found.append("one of clusterSelector and rayClusterSpec is needed")
    if ttl and not shutdown:
        found.append("ttlSecondsAfterFinished needs shutdownAfterJobFinishes")
    if rules and (shutdown or ttl):
        found.append("deletionRules exclude shutdownAfterJobFinishes and ttlSecondsAfterFinished")
    theirs = ("DeleteWorkers", "DeleteCluster")
    if selector and (shutdown or any(rule["policy"] in theirs for rule in rules)):
        found.append("a selected cluster is not this job's to delete")
    if selector and spec.get("backoffLimit"):
        found.append("a retry makes a new cluster, which clusterSelector excludes")
    of_submitter = {"submitterPodTemplate", "submitterConfig"} & set(spec)
    if mode == "SidecarMode" and (selector or of_submitter):
        found.append("SidecarMode excludes clusterSelector and a submitter of one's own")
    head = spec.get("rayClusterSpec", {}).get("headGroupSpec", {}).get("template", {})
    if mode == "SidecarMode" and head.get("spec", {}).get("restartPolicy", "Never") != "Never":
        found.append("SidecarMode wants the head's restartPolicy Never")
    scaled = spec.get("rayClusterSpec", {}).get("enableInTreeAutoscaling")
    if scaled and any(rule["policy"] == "DeleteWorkers" for rule in rules):
        found.append("DeleteWorkers excludes autoscaling")
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
    found = []
    for status in {rule["condition"].get("jobStatus") for rule in rules}:
        of_status = [one for one in rules if one["condition"].get("jobStatus") == status]
        ttl = {one["policy"]: one["condition"].get("ttlSeconds", 0) for one in of_status}
        order = [ttl[one] for one in ("DeleteWorkers", "DeleteCluster", "DeleteSelf") if one in ttl]
        if order != sorted(order):
            found.append("deletionRules: TTLs out of order")
        if len(ttl) != len(of_status):
            found.append(f"deletionRules: two of one policy for {status}")
        if min(order) < 0:
            found.append("deletionRules: a negative TTL")
    return found

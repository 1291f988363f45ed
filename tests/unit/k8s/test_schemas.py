"""Every document against its schema and the operator's rules, and every rule against a bad example."""

import copy
import functools
import json

import kubernetes_validate
import pytest
import yaml

from rdt_e2e.cluster.kube_manifests import pod_specs, ray_cluster
from tests.kuberay_pods import ray_pods, submitter_pod
from tests.unit.k8s import operator_rules
from tests.unit.k8s.crd_schema import errors
from tests.unit.k8s.variants import K8S, VARIANTS

KUBERNETES = "1.37"


@functools.cache
def check_built_in(text):
    """Overlays share most documents, and reading Kubernetes' schemas takes a while."""
    kubernetes_validate.validate(json.loads(text), KUBERNETES, strict=True)


@pytest.mark.parametrize("overlay", VARIANTS)
def test_documents_of_kubernetes_own_kinds_are_valid(overlay, rendered, jobs):
    documents = [*rendered(overlay), *jobs.values()]
    built_in = [one for one in documents if not one["apiVersion"].startswith("ray.io/")]
    assert len(built_in) >= 10
    for document in built_in:
        check_built_in(json.dumps(document))


@pytest.mark.parametrize("overlay", VARIANTS)
def test_documents_of_kuberays_kinds_are_valid(overlay, rendered, jobs, ray_schemas):
    documents = [*rendered(overlay), *jobs.values()]
    of_ray = [one for one in documents if one["apiVersion"].startswith("ray.io/")]
    assert len(of_ray) >= 5
    for document in of_ray:
        schema = ray_schemas[document["apiVersion"], document["kind"]]
        assert errors(schema, document) == []


@pytest.mark.parametrize("overlay", VARIANTS)
def test_pods_are_valid_for_kubernetes_too(overlay, rendered, jobs):
    documents = [*rendered(overlay), *jobs.values()]
    pods = [pod for document in documents for pod in pod_specs(document)]
    assert len(pods) >= 3 + len(jobs)
    for spec in pods:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
        check_built_in(json.dumps(pod))


@pytest.mark.parametrize("overlay", VARIANTS)
def test_pods_that_the_operator_makes_are_valid(overlay, rendered, jobs):
    documents = rendered(overlay)
    made = ray_pods(documents)
    assert list(made) == ["head", "trainer", "inference"]
    submitter = submitter_pod(jobs["sync"], ray_cluster(documents), "id")
    for pod in [*made.values(), submitter]:
        check_built_in(json.dumps(pod))


@pytest.mark.parametrize("overlay", VARIANTS)
def test_operator_rules_hold(overlay, rendered, jobs):
    for document in [*rendered(overlay), *jobs.values()]:
        assert operator_rules.broken_rules(document) == []


def test_plain_manifests_are_what_apply_takes():
    files = sorted(K8S.iterdir())
    assert files[0].name == "00-namespace.yaml"
    assert {path.suffix for path in files if path.is_file()} == {".yaml"}
    assert not [path for path in files if "kustomization" in path.name.lower()]
    for path in files:
        if path.is_file():
            for document in yaml.safe_load_all(path.read_text()):
                # Too large for a client-side apply, and the operator's to bring.
                assert document["kind"] != "CustomResourceDefinition"


def change(document, path, value):
    """A copy with one field set, or removed for None; a path is keys and indices."""
    changed = copy.deepcopy(document)
    part = changed
    for key in path[:-1]:
        part = part.setdefault(key, {}) if isinstance(part, dict) else part[key]
    if value is None:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return changed


WORKER = ("spec", "workerGroupSpecs", 0)
HEAD = ("spec", "headGroupSpec")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("metadata", "name"), "Rdt", "DNS-1035"),
        (("metadata", "name"), "a" * 54, "longer than 53"),
        (("spec", "networkPolicy"), {}, "alpha"),
        (("spec", "tlsOptions"), {}, "alpha"),
        (("spec", "authOptions"), {}, "mode: token"),
        (("spec", "rayVersion"), "2.51.0", "2.52.0"),
        (("spec", "rayVersion"), None, "2.52.0"),
        ((*WORKER, "rayStartParams", "num-gpus"), "8", "of the same meaning"),
        ((*HEAD, "rayStartParams", "num-cpus"), "0", "of the same meaning"),
        ((*WORKER, "rayStartParams", "labels"), "a=b", "labels is refused"),
        ((*WORKER, "replicas"), None, "default of 0"),
        ((*WORKER, "maxReplicas"), 3, "not fixed"),
        (
            (*WORKER, "template", "spec", "containers", 0, "env"),
            [{"name": "RAY_REDIS_ADDRESS", "value": "r:6379"}],
            "redis",
        ),
        ((*WORKER, "template", "spec", "containers", 0, "name"), "sidecar", "must be Ray's"),
        ((*WORKER, "template", "spec", "hostNetwork"), True, "ClusterFirstWithHostNet"),
        ((*WORKER, "template", "spec", "containers"), [], "no container"),
        ((*WORKER, "labels"), {"a b": "c"}, "label a b=c is none"),
        ((*HEAD, "rayStartParams", "redis-username"), "r", "redis user"),
        (
            (*HEAD, "template", "spec", "containers", 0, "env"),
            [{"name": "RAY_enable_autoscaler_v2", "value": "1"}],
            "autoscaler's variable",
        ),
    ],
)
def test_each_cluster_rule_catches_its_fault(path, value, says, rendered):
    broken = operator_rules.broken_rules(change(ray_cluster(rendered(None)), path, value))
    assert [rule for rule in broken if says in rule]


def test_autoscaling_excludes_what_it_cannot_restart(rendered):
    scaled = change(ray_cluster(rendered(None)), ("spec", "enableInTreeAutoscaling"), True)
    assert operator_rules.broken_rules(scaled) == []
    broken = change(scaled, (*WORKER, "suspend"), True)
    assert operator_rules.broken_rules(broken) == ["trainer: suspended while autoscaled"]
    broken = change(scaled, (*HEAD, "template", "spec", "restartPolicy"), "Always")
    assert operator_rules.broken_rules(broken) == ["head: autoscaling wants restartPolicy Never"]


def test_host_network_needs_anti_affinity(rendered):
    pod = (*WORKER, "template", "spec")
    changed = change(ray_cluster(rendered(None)), (*pod, "hostNetwork"), True)
    changed = change(changed, (*pod, "dnsPolicy"), "ClusterFirstWithHostNet")
    assert operator_rules.broken_rules(changed) == []
    changed = change(changed, (*pod, "affinity"), None)
    assert "ports clash" in operator_rules.broken_rules(changed)[0]


def rules(**ttl):
    return [
        {"policy": policy, "condition": {"jobStatus": "SUCCEEDED", "ttlSeconds": seconds}}
        for policy, seconds in ttl.items()
    ]


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("metadata", "name"), "a" * 48, "longer than 47"),
        (("spec", "submissionMode"), "Sidecar", "none of"),
        (("spec", "submissionMode"), "SidecarMode", "SidecarMode excludes"),
        (("spec", "clusterSelector"), None, "one of clusterSelector"),
        (("spec", "clusterSelector"), {"app": "x"}, "names no ray.io/cluster"),
        (("spec", "suspend"), True, "suspend excludes clusterSelector"),
        (("spec", "activeDeadlineSeconds"), 0, "no time at all"),
        (("spec", "backoffLimit"), -1, "a limit is negative"),
        (("spec", "runtimeEnvYAML"), "a: [", "not YAML"),
        (
            ("spec", "deletionStrategy", "deletionRules"),
            rules(DeleteSelf=-1),
            "negative TTL",
        ),
        (
            ("spec", "deletionStrategy", "deletionRules"),
            rules(DeleteSelf=1) * 2,
            "two of one policy",
        ),
        (("spec", "rayClusterSpec"), {}, "one of clusterSelector"),
        (("spec", "ttlSecondsAfterFinished"), 60, "needs shutdownAfterJobFinishes"),
        (("spec", "shutdownAfterJobFinishes"), True, "not this job's to delete"),
        (("spec", "backoffLimit"), 1, "new cluster"),
        (("spec", "entrypointResources"), "inference: 1", "not JSON"),
        (("spec", "submitterPodTemplate", "spec", "restartPolicy"), "Always", "restartPolicy"),
        (
            ("spec", "deletionStrategy", "deletionRules"),
            rules(DeleteWorkers=900),
            "not this job's to delete",
        ),
        (
            ("spec", "deletionStrategy", "deletionRules"),
            rules(DeleteCluster=60, DeleteSelf=30),
            "out of order",
        ),
    ],
)
def test_each_job_rule_catches_its_fault(path, value, says, jobs):
    broken = operator_rules.broken_rules(change(jobs["sync"], path, value))
    assert [rule for rule in broken if says in rule]


def test_rules_of_a_job_with_a_cluster_of_its_own(jobs, rendered):
    own = change(jobs["sync"], ("spec", "clusterSelector"), None)
    own = change(own, ("spec", "rayClusterSpec"), ray_cluster(rendered(None))["spec"])
    assert operator_rules.broken_rules(own) == []
    scaled = change(own, ("spec", "rayClusterSpec", "enableInTreeAutoscaling"), True)
    scaled = change(scaled, ("spec", "deletionStrategy", "deletionRules"), rules(DeleteWorkers=9))
    assert operator_rules.broken_rules(scaled) == ["DeleteWorkers excludes autoscaling"]
    sidecar = change(own, ("spec", "submissionMode"), "SidecarMode")
    for field in ("submitterPodTemplate", "submitterConfig"):
        assert [one for one in operator_rules.broken_rules(sidecar) if "of one's own" in one]
        sidecar = change(sidecar, ("spec", field), None)
    assert operator_rules.broken_rules(sidecar) == []
    head = ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "restartPolicy")
    broken = operator_rules.broken_rules(change(sidecar, head, "Always"))
    assert broken == ["SidecarMode wants the head's restartPolicy Never"]
    interactive = change(own, ("spec", "submissionMode"), "InteractiveMode")
    broken = operator_rules.broken_rules(change(interactive, ("spec", "backoffLimit"), 1))
    assert broken == ["InteractiveMode is not tried again"]


def test_deletion_rules_exclude_a_ttl(jobs):
    changed = change(
        jobs["sync"], ("spec", "deletionStrategy", "deletionRules"), rules(DeleteSelf=9)
    )
    assert operator_rules.broken_rules(changed) == []
    changed = change(changed, ("spec", "ttlSecondsAfterFinished"), 60)
    assert [one for one in operator_rules.broken_rules(changed) if one.startswith("deletionRules")]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*WORKER, "rayStartParams", "object-store-memory"), 1),
        ((*WORKER, "replica"), 1),
        ((*WORKER, "template", "spec", "nodeSelectors"), {}),
        (("spec", "authOptions", "mode"), "none"),
    ],
)
def test_schema_catches_a_wrong_type_or_field(path, value, rendered, ray_schemas):
    changed = change(ray_cluster(rendered(None)), path, value)
    assert errors(ray_schemas["ray.io/v1", "RayCluster"], changed)


def test_kubernetes_schema_is_strict(rendered):
    policy = next(one for one in rendered(None) if one["kind"] == "NetworkPolicy")
    with pytest.raises(kubernetes_validate.ValidationError):
        check_built_in(json.dumps(change(policy, ("spec", "policyType"), [])))

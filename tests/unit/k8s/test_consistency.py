"""Names, labels, keys, ports and counts that several files must agree on."""

import json
import re
from pathlib import PurePosixPath

import pytest
import yaml

from rdt_e2e import __version__
from rdt_e2e.cluster.kube_jobs import RUNS_FOLDER
from rdt_e2e.cluster.kube_manifests import (
    CLUSTER_NAME,
    NAMESPACE,
    load_job,
    pod_specs,
    ray_cluster,
    with_image,
)
from rdt_e2e.config import Config, load_config
from rdt_e2e.doctor.registry import THEMES
from rdt_e2e.environment import ray_environment
from rdt_e2e.errors import ConfigError
from tests.kuberay_pods import ray_pods
from tests.unit.k8s.variants import GPU_VARIANTS, OVERLAYS, ROOT, VARIANTS, needs_kubectl

ADDRESS = f"{CLUSTER_NAME}-head-svc:6379"
"""KubeRay names the head's service after the RayCluster."""


def config_map(documents, name):
    (found,) = [
        one for one in documents if one["kind"] == "ConfigMap" and one["metadata"]["name"] == name
    ]
    return found["data"]


def groups(documents):
    return ray_cluster(documents)["spec"]["workerGroupSpecs"]


def run_file(documents, name):
    return yaml.safe_load(config_map(documents, "rdt-e2e-config")[name])


def test_environment_is_that_of_the_package(rendered):
    config = load_config("kimi-k2", {"cluster.address": ADDRESS})
    assert config_map(rendered(None), "rdt-e2e-environment") == ray_environment(config)


@needs_kubectl
def test_environment_of_the_cpu_overlay_too(rendered):
    assert config_map(rendered("cpu"), "rdt-e2e-environment") == ray_environment(
        load_config("local")
    )


@pytest.mark.parametrize("overlay", VARIANTS)
def test_each_run_fits_the_environment_it_gets(overlay, rendered):
    documents = rendered(overlay)
    variables = config_map(documents, "rdt-e2e-environment")
    for name in config_map(documents, "rdt-e2e-config"):
        config = Config.model_validate(run_file(documents, name))
        # Read when Ray starts: a run cannot have another limit than the cluster's.
        wanted = ray_environment(config)["RAY_rdt_fetch_fail_timeout_milliseconds"]
        assert variables["RAY_rdt_fetch_fail_timeout_milliseconds"] == wanted
        assert config.cluster.address == ADDRESS


def test_site_map_overrides_the_environment(rendered):
    # Of two sources with one name, Kubernetes takes the later.
    for group in groups(rendered(None)):
        sources = group["template"]["spec"]["containers"][0]["envFrom"]
        names = [one["configMapRef"]["name"] for one in sources]
        assert names == ["rdt-e2e-environment", "rdt-e2e-site"]


def test_run_is_the_profile_with_this_clusters_address(rendered):
    run = run_file(rendered(None), "run.yaml")
    profile = yaml.safe_load((ROOT / "configs/kimi-k2.yaml").read_text())
    assert run["cluster"].pop("address") == ADDRESS
    assert run == profile


@needs_kubectl
def test_cpu_run_is_the_local_profile_on_this_cluster(rendered):
    run = run_file(rendered("cpu"), "mini-kimi.yaml")
    profile = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    assert run["cluster"].pop("address") == ADDRESS
    assert run | {"name": "local", "cluster": run["cluster"] | {"target": "local"}} == profile


@pytest.mark.parametrize("overlay", VARIANTS)
def test_gpu_counts_fit_every_run(overlay, rendered):
    documents = rendered(overlay)
    gpus = {group["groupName"]: int(group["resources"]["GPU"]) for group in groups(documents)}
    for name in config_map(documents, "rdt-e2e-config"):
        config = Config.model_validate(run_file(documents, name))
        assert config.trainer.num_ranks <= gpus["trainer"]
        assert config.num_consumers <= gpus["inference"]


@pytest.mark.parametrize("overlay", GPU_VARIANTS)
def test_ray_has_the_gpus_of_the_pod(overlay, rendered):
    documents = rendered(overlay)
    config = Config.model_validate(run_file(documents, "run.yaml"))
    assert (config.trainer.num_ranks, config.num_consumers) == (8, 8)
    for group in groups(documents):
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert group["resources"]["GPU"] == "8"
        assert int(group["resources"]["CPU"]) <= int(limits["cpu"])
        if overlay == "dra":
            claims = [one for one in documents if one["kind"] == "ResourceClaimTemplate"]
            requests = claims[0]["spec"]["spec"]["devices"]["requests"]
            assert [one["exactly"]["count"] for one in requests] == [8, 8]
            used = group["template"]["spec"]["resourceClaims"][0]["resourceClaimTemplateName"]
            assert used == claims[0]["metadata"]["name"]
        else:
            assert limits["nvidia.com/gpu"] == "8"


@pytest.mark.parametrize("overlay", VARIANTS)
def test_roles_are_ray_resources(overlay, rendered, jobs):
    roles = {group["groupName"] for group in groups(rendered(overlay))}
    assert roles == {"trainer", "inference"}
    for group in groups(rendered(overlay)):
        assert roles & set(group["resources"]) == {group["groupName"]}
    for job in jobs.values():
        if job["kind"] == "RayJob":
            # The driver of several data-parallel ranks has to be on the inference node.
            assert set(json.loads(job["spec"]["entrypointResources"])) == {"inference"}


@pytest.mark.parametrize("overlay", VARIANTS)
def test_everything_is_in_the_namespace_and_labelled(overlay, rendered, jobs):
    for document in [*rendered(overlay), *jobs.values()]:
        metadata = document["metadata"]
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "rdt-e2e"
        if document["kind"] == "Namespace":
            assert metadata["name"] == NAMESPACE
        else:
            assert metadata["namespace"] == NAMESPACE


@pytest.mark.parametrize("overlay", VARIANTS)
def test_what_is_referred_to_exists(overlay, rendered, jobs):
    documents = rendered(overlay)
    names = {(one["kind"], one["metadata"]["name"]) for one in documents}
    for pod in [pod for one in [*documents, *jobs.values()] for pod in pod_specs(one)]:
        assert ("ServiceAccount", pod["serviceAccountName"]) in names
        for volume in pod.get("volumes", []):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
        for container in pod["containers"]:
            for source in container.get("envFrom", []):
                assert ("ConfigMap", source["configMapRef"]["name"]) in names
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference and not reference.get("optional"):
                    # The operator's own Secret.
                    assert reference == {"name": CLUSTER_NAME, "key": "auth_token"}
    for job in jobs.values():
        selector = job["spec"].get("clusterSelector", {"ray.io/cluster": CLUSTER_NAME})
        assert selector == {"ray.io/cluster": CLUSTER_NAME}


@pytest.mark.parametrize("overlay", VARIANTS)
def test_configuration_files_are_mounted_where_they_are_read(overlay, rendered, jobs):
    documents = rendered(overlay)
    files = set(config_map(documents, "rdt-e2e-config"))
    for group in groups(documents):
        mounts = {
            mount["name"]: mount["mountPath"]
            for mount in group["template"]["spec"]["containers"][0]["volumeMounts"]
        }
        assert mounts["config"] == "/etc/rdt-e2e"
        assert mounts["runs"] == RUNS_FOLDER
    site = config_map(documents, "rdt-e2e-site")
    assert PurePosixPath(site["CHECK_CONFIG"]).name in files
    known = {theme.group for theme in THEMES}
    assert set(site["CHECK_GROUPS"].split()) <= known
    if overlay != "cpu":
        for name, job in jobs.items():
            for read in re.findall(r"/etc/rdt-e2e/(\S+)", job["spec"].get("entrypoint", "")):
                assert read in files, name


def test_selectors_of_policies_and_budget_match_pods(rendered, jobs):
    documents = rendered(None)
    cluster = ray_cluster(documents)["spec"]
    templates = [cluster["headGroupSpec"]["template"]]
    templates += [group["template"] for group in cluster["workerGroupSpecs"]]
    for job in jobs.values():
        templates.append(job["spec"].get("submitterPodTemplate") or job["spec"]["template"])
    labels = [template["metadata"]["labels"] for template in templates]
    for document in documents:
        if document["kind"] not in ("NetworkPolicy", "PodDisruptionBudget"):
            continue
        spec = document["spec"]
        selector = (spec.get("podSelector") or spec.get("selector") or {}).get("matchLabels", {})
        matching = [one for one in labels if selector.items() <= one.items()]
        assert matching, document["metadata"]["name"]
        if document["kind"] == "PodDisruptionBudget":
            assert spec["minAvailable"] == len(matching)
    # Every peer that a policy of ours names is a pod of ours, but for the operator.
    peers = [
        peer
        for document in documents
        if document["kind"] == "NetworkPolicy"
        for rule in [*document["spec"].get("ingress", []), *document["spec"].get("egress", [])]
        for peer in [*rule.get("from", []), *rule.get("to", [])]
        if "namespaceSelector" not in peer
    ]
    for peer in peers:
        wanted = peer["podSelector"]["matchLabels"].items()
        assert [one for one in labels if wanted <= one.items()]


def test_no_policy_admits_ray_pods_of_other_namespaces(rendered):
    documents = rendered(None)
    # What KubeRay puts on the pods of anybody's cluster.
    labels = ray_pods(documents)["trainer"]["metadata"]["labels"]
    theirs = {key: value for key, value in labels.items() if not key.startswith("rdt-e2e/")}
    theirs |= {"app.kubernetes.io/part-of": "x", "app.kubernetes.io/component": "x"}
    admitted = [
        peer["podSelector"]["matchLabels"]
        for document in documents
        if document["kind"] == "NetworkPolicy"
        for rule in document["spec"].get("ingress", [])
        for peer in rule["from"]
        if "namespaceSelector" in peer
    ]
    assert len(admitted) == 1
    assert not admitted[0].items() <= theirs.items()


def test_ports_of_the_policies_are_the_heads(rendered):
    documents = rendered(None)
    head = ray_cluster(documents)["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert ports["gcs-server"] == int(ADDRESS.rpartition(":")[2])
    for name in ("dashboard", "submitter"):
        (policy,) = [
            one
            for one in documents
            if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == name
        ]
        (rule,) = policy["spec"].get("ingress") or policy["spec"]["egress"]
        assert [port["port"] for port in rule["ports"]] == [ports["dashboard"]]


@pytest.mark.parametrize("overlay", VARIANTS)
def test_images_are_this_release_of_one_lock(overlay, rendered):
    documents = rendered(overlay)
    images = {c["image"] for one in documents for pod in pod_specs(one) for c in pod["containers"]}
    assert images == {f"rdt-e2e:{__version__}-{'cpu' if overlay == 'cpu' else 'cuda'}"}


def test_image_tags_of_jobs_and_ray_release(rendered, jobs):
    for job in jobs.values():
        for pod in pod_specs(job):
            assert pod["containers"][0]["image"] == f"rdt-e2e:{__version__}-cuda"
    lock = (ROOT / "requirements/cuda.lock").read_text()
    (ray,) = re.findall(r"^ray==(\S+)", lock, re.MULTILINE)
    assert ray_cluster(rendered(None))["spec"]["rayVersion"] == ray


def test_download_is_of_the_runs_model_into_the_mounted_cache(rendered, jobs):
    config = Config.model_validate(run_file(rendered(None), "run.yaml"))
    container = jobs["download"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][2] == config.model.source
    assert container["command"][-1] == config.model.revision
    dockerfile = (ROOT / "Dockerfile").read_text()
    (home,) = re.findall(r"HF_HOME=(\S+)", dockerfile)
    (mount,) = container["volumeMounts"]
    assert home.startswith(mount["mountPath"])
    on_node = jobs["download"]["spec"]["template"]["spec"]["volumes"][0]["hostPath"]
    for group in groups(rendered(None)):
        (volume,) = [v for v in group["template"]["spec"]["volumes"] if v["name"] == "models"]
        assert volume["hostPath"] == on_node


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_changes_something(overlay, rendered):
    plain, changed = rendered(None), rendered(overlay)
    assert ray_cluster(plain) != ray_cluster(changed)
    assert {one["kind"] for one in plain} <= {one["kind"] for one in changed}


def test_programs_named_in_manifests_are_in_the_image(rendered, jobs):
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^COPY \. ", dockerfile, re.MULTILINE)
    for pod in [pod for one in rendered(None) for pod in pod_specs(one)]:
        command = pod["containers"][0]["command"]
        assert command[0] == "/usr/bin/tini"
        assert (ROOT / command[2].removeprefix("/opt/rdt-e2e/")).is_file()
        probe = pod["containers"][0]["readinessProbe"]["exec"]["command"]
        assert probe == [command[2], "health"]
    for job in jobs.values():
        assert job["spec"].get("entrypoint", "rdt-e2e ").startswith("rdt-e2e ")


def test_what_a_job_writes_is_in_a_folder_of_its_own(jobs):
    # New folders are what is fetched after a job.
    written = re.findall(r"/runs/(\S.*)", jobs["bench"]["spec"]["entrypoint"])
    assert [one.count("/") for one in written] == [1]
    assert "$(date" in written[0].partition("/")[0]


def test_with_image_changes_every_container_and_not_the_original(jobs):
    changed = with_image(jobs["sync"], "registry.example/rdt-e2e:2")
    assert next(pod_specs(changed))["containers"][0]["image"] == "registry.example/rdt-e2e:2"
    assert next(pod_specs(jobs["sync"]))["containers"][0]["image"] != "registry.example/rdt-e2e:2"


def test_unknown_job_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'download'.*bench, doctor, mini-kimi, sync"):
        load_job("download", run_name="x", image="y")

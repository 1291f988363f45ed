"""Manifests as documents, and the KubeRay schemas where there are any."""

import copy

import pytest
import yaml

from rdt_e2e.cluster.kube_manifests import load_manifests
from rdt_e2e.cluster.kubectl import Kubectl
from tests.unit.k8s.crd_schema import load_schemas
from tests.unit.k8s.variants import CRD_DIR, K8S


@pytest.fixture(scope="session")
def ray_schemas():
    """Schema of each KubeRay kind; they are too large to be kept in this repository."""
    if not CRD_DIR.is_dir():
        pytest.skip(f"needs KubeRay's CRDs in {CRD_DIR}; RDT_E2E_CRD_DIR names another folder")
    return load_schemas(CRD_DIR)


@pytest.fixture(scope="session")
def rendered():
    """Documents of an overlay, or of the plain manifests for None."""
    cache = {}

    def render(overlay):
        if overlay not in cache:
            cache[overlay] = load_manifests(overlay, Kubectl())
        return copy.deepcopy(cache[overlay])

    return render


@pytest.fixture(scope="session")
def jobs():
    """File stem to document, of k8s/jobs."""
    return {path.stem: yaml.safe_load(path.read_text()) for path in (K8S / "jobs").glob("*.yaml")}

"""Where the manifests are, in which variants they come, and where KubeRay's schemas may be."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from rdt_e2e.cluster.kube_manifests import overlay_names

ROOT = Path(__file__).parents[3]
K8S = ROOT / "k8s"

_named = os.environ.get("RDT_E2E_CRD_DIR")
CRD_DIR = Path(_named) if _named else ROOT.parent / "shared" / "kuberay-crds"
"""KubeRay's definitions, a megabyte each and not ours: kept beside the repository, if at all."""

# The one of `make kubectl` before any other: its version is known.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl: `make kubectl`"
)

OVERLAYS = [pytest.param(name, marks=needs_kubectl) for name in overlay_names()]
VARIANTS = [pytest.param(None, id="plain"), *OVERLAYS]
GPU_VARIANTS = [one for one in VARIANTS if one.values[0] != "cpu"]

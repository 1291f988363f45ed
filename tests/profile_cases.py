"""Stand-ins for what a profile watches, with the method names of Ray 2.60, NIXL 1.5 and vLLM 0.32.

They call each other as the real ones do; no time in them matters.
"""

import json
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from rdt_e2e.config import load_config
from rdt_e2e.profiling.build import Material, build_iteration, build_profile
from rdt_e2e.profiling.columns import CONSUMER_COLUMNS, PRODUCER_COLUMNS
from rdt_e2e.profiling.lines import RECORD_VERSION
from rdt_e2e.profiling.reading import ClockOffset, NodeReading
from rdt_e2e.trainer.producer import ProducerMixin

NODES = {"aaaa": "10.0.0.1", "bbbb": "10.0.0.2"}
TRAINER_NODE, INFERENCE_NODE = NODES


class Descriptors:
    def descCount(self):  # noqa: N802 - NIXL's own name
        return 3


class Agent:
    """A NIXL agent whose transfers are done at the second look."""

    def __init__(self):
        self.looks = 0

    def register_memory(self, regions, mem_type=None):
        return regions

    def deregister_memory(self, registration):
        pass

    def get_xfer_descs(self, tensors, mem_type=None):
        return Descriptors()

    def get_serialized_descs(self, descriptors):
        return b""

    def deserialize_descs(self, raw):
        return Descriptors()

    def get_agent_metadata(self):
        return b""

    def add_remote_agent(self, metadata):
        return "peer"

    def remove_remote_agent(self, name):
        pass

    def initialize_xfer(self, operation, local, remote, name, message):
        self.looks = 0
        return object()

    def transfer(self, handle):
        return "PROC"

    def check_xfer_state(self, handle):
        self.looks += 1
        return "DONE" if self.looks > 1 else "PROC"


class Transport:
    """Ray's NIXL transport on the 2.60 path."""

    def __init__(self):
        self._nixl_agent = Agent()

    def actor_has_tensor_transport(self, actor):
        return True

    def extract_tensor_transport_metadata(self, object_id, tensors):
        descriptors = self._nixl_agent.get_xfer_descs(tensors)
        self._nixl_agent.get_agent_metadata()
        return self._nixl_agent.get_serialized_descs(descriptors)

    def fetch_multiple_tensors(self, object_id, metadata, communicator, target_buffers=None):
        agent = self._nixl_agent
        agent.deserialize_descs(b"")
        local, remote = agent.get_xfer_descs([]), agent.get_xfer_descs([])
        agent.add_remote_agent(b"")
        handle = agent.initialize_xfer("READ", local, remote, "peer", b"")
        agent.transfer(handle)
        return types.SimpleNamespace(xfer_handle=handle)

    def wait_fetch_complete(self, request, timeout=-1):
        while self._nixl_agent.check_xfer_state(request.xfer_handle) == "PROC":
            pass


def copy_into_kernel_storage(layer):
    """Stands for the function that the CPU consumer's module holds."""


@dataclass
class Chunk:
    seq: int
    owner: int = 0
    pack_bytes: int = 1000


class Engine:
    """A weight transfer engine that processes inline."""

    def __init__(self, transport, rank=0):
        self.transport = transport
        self._router = types.SimpleNamespace(consumer_id=rank)
        self.device = torch.device("cpu")

    def receive_weights(self, chunks):
        for chunk in chunks:
            self._complete_pull(self._issue_pull(chunk, 0))
            self._process_item(types.SimpleNamespace(chunk=chunk))

    def drain_pending(self):
        pass

    def _issue_pull(self, chunk, slot):
        self.transport.actor_has_tensor_transport(None)
        return object()

    def _complete_pull(self, pending):
        self._read_pull(pending, None)
        return {}

    def _read_pull(self, pending, chunk):
        request = self.transport.fetch_multiple_tensors("id", None, None)
        self.transport.wait_fetch_complete(request, timeout=5)

    def _process_item(self, item):
        self._sum_landed(item)
        self._materialize(None)
        self._finish_layer(None)

    def _materialize(self, chunk):
        pass

    def _sum_landed(self, item):
        pass

    def _finish_layer(self, layer):
        copy_into_kernel_storage(layer)


class Shards:
    """One gathered tensor of one group; nothing is owned."""

    gathers = True

    def __init__(self, layout, groups):
        self.layout = layout
        self.groups = groups

    def gather_group(self, group):
        return {name: torch.ones(16) for name in group.names}

    def owned(self):
        return {}


class Worker(ProducerMixin):
    """A trainer rank with the real producer, on made-up shards."""

    producer_rank = 0
    device = torch.device("cpu")

    def __init__(self, layout, monkeypatch):
        from rdt_e2e.trainer import producer as module

        monkeypatch.setattr(module, "register", lambda _tensor: None)
        monkeypatch.setattr("rdt_e2e.trainer.serve_ring.ROUND_BYTES", 1024)
        shards: Any = Shards(layout, layout.groups)
        self.sync_profile: Any = None
        self.start_producer(shards, load_config("local"), self.device)


def row_record(role, rank, node, columns, **extra):
    known = CONSUMER_COLUMNS if role == "consumer" else PRODUCER_COLUMNS
    filled = dict.fromkeys(known, 0.0) | columns
    return record(
        "row", role, rank, node, host="h", pid=100 + rank, nic=None, columns=filled, num_dropped=0,
        **extra,
    )  # fmt: skip


def record(kind, role, rank, node, iteration=2, **fields):
    return {
        "v": RECORD_VERSION, "kind": kind, "iteration": iteration, "role": role, "rank": rank,
        "node": node, **fields,
    }  # fmt: skip


def consumer_record(rank, *, rdma_s=1.0, num_bytes=1e9, pull_s=1.0, process_s=0.25, **columns):
    return row_record(
        "consumer", rank, INFERENCE_NODE,
        {
            "pulls": 2, "bytes": num_bytes, "rdma_s": rdma_s, "transfer_s": rdma_s,
            "pull_s": pull_s, "process_s": process_s, "receive_s": rdma_s + 0.125,
            "produce_wait_s": 0.5, **columns,
        },
    )  # fmt: skip


def producer_record(rank, **columns):
    return row_record(
        "producer", rank, TRAINER_NODE, {"pulls": 2, "method_s": 0.25, "wait_s": 0.125, **columns}
    )


def sample(boot_id="boot", nics=None, rates=None):
    return {
        "taken": 0.0, "boot_id": boot_id, "memory_used_bytes": 1, "memory_total_bytes": 2,
        "nics": nics or {}, "nic_rates_gbps": rates or {}, "gpus": [],
    }  # fmt: skip


def reading(node, records=(), *, error=None, **sampled):
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    if error is not None:
        return NodeReading(node, NODES[node], error)
    return NodeReading(node, NODES[node], None, sample(**sampled), lines)


@dataclass
class Case:
    """Material of one warm sync, to be varied."""

    consumers: list[Any] = field(default_factory=lambda: [consumer_record(0), consumer_record(1)])
    producers: list[Any] = field(default_factory=lambda: [producer_record(0), producer_record(1)])
    seconds: dict[str, float] = field(
        default_factory=lambda: {"pause": 0.1, "start": 0.2, "update": 1.5, "finish": 0.1}
    )
    wall_s: float = 2.0
    iteration: int = 2

    def material(self, **changes):
        values: dict[str, Any] = {
            "iteration": self.iteration,
            "cold": self.iteration == 1,
            "seconds": self.seconds,
            "wall_s": self.wall_s,
            "began": 100.0,
            "consumers": (0, 1),
            "producers": (0, 1),
            "before": [reading(node) for node in NODES],
            "after": [
                reading(TRAINER_NODE, self.producers), reading(INFERENCE_NODE, self.consumers)
            ],
            "offsets": {node: ClockOffset(0.0, 0.0) for node in NODES},
        }  # fmt: skip
        return Material(**(values | changes))


RUN = {
    "started": "2026-01-01T00:00:00+00:00",
    "config": {
        "trainer": {"num_ranks": 2, "device": "cpu"},
        "inference": {"data_parallel": 2, "tensor_parallel": 1, "num_replicas": 1},
    },
    "versions": {"ray": "2.60.0"},
    "hardware": {"cpu": "a cpu", "cores": 2},
    "checkpoint": {"source": "mini-kimi", "num_names": 9, "num_groups": 3, "num_bytes": 1_000_000},
    "texts": {"before": [{"prompt": "The <b>capital</b>", "text": "noise & more"}]},
    "verdict": "PASS",
    "error": None,
}


def pull(rank, start):
    return record(
        "pull", "consumer", rank, INFERENCE_NODE, seq=0, producer=1, bytes=10,
        issue=(start, start + 0.25), get=(start + 0.25, start + 1), receive=None,
        transfer=(start + 0.5, start + 0.75),
    )  # fmt: skip


def profile_of(wall_s=2.0, **consumer):
    case = Case(wall_s=wall_s)
    case.consumers = [consumer_record(0, **consumer), consumer_record(1), pull(0, 100.5)]
    cold = build_iteration(
        Case(iteration=1, wall_s=8.0).material(
            after=[reading(INFERENCE_NODE, error="it is gone")], consumers=(0,), producers=()
        )
    )
    # Through JSON, as every reader gets it.
    built = build_profile("some-run", "summary", 1.5, [cold, build_iteration(case.material())])
    return json.loads(json.dumps(built))


def written(folder, wall_s=2.0):
    folder.mkdir()
    (folder / "profile.json").write_text(json.dumps(profile_of(wall_s)))
    (folder / "run.json").write_text(json.dumps(RUN))
    return folder

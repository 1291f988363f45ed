"""Profiles of a consumer's and a producer's process, on stand-ins for Ray, NIXL and vLLM."""

import threading

import pytest

from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.inference.extension import WeightCheck
from rdt_e2e.profiling.columns import CONSUMER_COLUMNS, PRODUCER_COLUMNS
from rdt_e2e.profiling.consumer import ConsumerProfile, SyncProfile
from rdt_e2e.profiling.lines import MAX_LINE_BYTES, read_records
from rdt_e2e.profiling.place import Place
from rdt_e2e.profiling.producer import ProducerProfile, end_producer, stop_producer
from tests import synthetic
from tests.profile_cases import Chunk, Engine, Transport, Worker


def place(folder, level="summary"):
    return Place(str(folder), "run", level)


def records_of(folder, iteration=1):
    lines = [
        line for file in sorted(folder.rglob("*.jsonl")) for line in file.read_text().splitlines()
    ]
    assert all(len(line) < MAX_LINE_BYTES for line in lines)
    records, num_damaged = read_records(lines, iteration)
    assert not num_damaged
    return records


def row_of(records):
    (row,) = [one for one in records if one["kind"] == "row"]
    return row


@pytest.fixture
def consumer(tmp_path):
    engine = Engine(Transport(), rank=3)
    profile = ConsumerProfile(engine, place(tmp_path), "node-a", engine.transport)
    yield engine, profile
    profile.stop()


def test_every_consumer_column_is_measured(consumer, tmp_path):
    engine, profile = consumer
    profile.begin(1)
    engine.receive_weights([Chunk(0), Chunk(1)])
    engine.drain_pending()
    profile.end()
    columns = row_of(records_of(tmp_path))["columns"]
    assert list(columns) == list(CONSUMER_COLUMNS)
    assert [name for name, value in columns.items() if value is None] == []
    assert columns["pulls"] == 2
    assert columns["bytes"] == 2000
    assert columns["transfer_calls"] == columns["add_agent_calls"] == 2
    assert columns["check_calls"] == 4
    assert columns["descriptors"] == 6
    assert columns["register_calls"] == 0
    assert 0 < columns["transfer_s"] <= columns["receive_s"] <= columns["pull_s"]
    assert columns["rdma_s"] == pytest.approx(columns["transfer_s"])
    stages = ("checksum_s", "materialize_s", "scatter_s", "post_load_s", "kernel_copy_s")
    assert sum(columns[one] for one in stages) == pytest.approx(columns["process_s"])
    assert columns["produce_wait_s"] >= columns["meta_wait_s"] > 0


def test_each_pull_and_its_processing_is_a_record(consumer, tmp_path):
    engine, profile = consumer
    profile.begin(1)
    engine.receive_weights([Chunk(0, owner=1)])
    engine.drain_pending()
    profile.end()
    records = records_of(tmp_path)
    (pull,) = [one for one in records if one["kind"] == "pull"]
    assert (pull["rank"], pull["producer"], pull["bytes"]) == (3, 1, 1000)
    assert pull["issue"][0] <= pull["get"][0] <= pull["receive"][0] <= pull["transfer"][0]
    assert pull["transfer"][1] <= pull["receive"][1] <= pull["get"][1]
    kinds = {one["kind"] for one in records}
    assert {"pull", "process", "span", "row", "memory"} == kinds
    assert row_of(records)["node"] == "node-a"


def test_a_second_sync_starts_from_nothing(consumer, tmp_path):
    engine, profile = consumer
    for iteration in (1, 2):
        profile.begin(iteration)
        engine.receive_weights([Chunk(0)])
        profile.end()
    assert records_of(tmp_path, 1) == []
    assert row_of(records_of(tmp_path, 2))["columns"]["pulls"] == 1


def test_full_keeps_single_calls(tmp_path):
    engine = Engine(Transport())
    profile = ConsumerProfile(engine, place(tmp_path, "full"), "node", engine.transport)
    profile.begin(1)
    engine.receive_weights([Chunk(0)])
    profile.end()
    profile.stop()
    events = {one["stage"] for one in records_of(tmp_path) if one["kind"] == "event"}
    assert {"issue_pull", "transfer", "wait_fetch", "kernel_copy"} <= events


@pytest.mark.parametrize(
    ("method", "lost"),
    [
        ("fetch_multiple_tensors", {"receive_s", "produce_wait_s", "meta_wait_s"}),
        ("actor_has_tensor_transport", {"control_s"}),
    ],
)
def test_a_ray_that_moved_a_method_costs_its_columns(method, lost, tmp_path, monkeypatch):
    original = getattr(Transport, method)
    monkeypatch.delattr(Transport, method)
    transport = Transport()
    engine = Engine(transport)
    profile = ConsumerProfile(engine, place(tmp_path), "node", transport)
    # What Ray itself still calls, unseen by the profile.
    monkeypatch.setattr(Transport, method, original, raising=False)
    profile.begin(1)
    engine.receive_weights([Chunk(0)])
    engine.drain_pending()
    profile.end()
    profile.stop()
    columns = row_of(records_of(tmp_path))["columns"]
    assert {name for name, value in columns.items() if value is None} == lost


def test_a_ray_that_no_longer_calls_a_method_costs_its_columns_too(tmp_path):
    engine = Engine(Transport())
    profile = ConsumerProfile(engine, place(tmp_path), "node", engine.transport)
    profile.begin(1)
    engine._complete_pull(engine._issue_pull(Chunk(0), 0))
    profile.end()
    profile.stop()
    columns = row_of(records_of(tmp_path))["columns"]
    assert columns["pulls"] == 1
    assert columns["process_s"] is None
    assert columns["transfer_s"] is not None


def test_a_wait_that_is_cut_short_and_repeated_is_one_receive(tmp_path):
    class Impatient(Transport):
        waits = 0

        def wait_fetch_complete(self, request, timeout=-1):
            self.waits += 1
            if self.waits == 1:
                raise TimeoutError
            super().wait_fetch_complete(request, timeout)

    class Patient(Engine):
        def _read_pull(self, pending, chunk):
            request = self.transport.fetch_multiple_tensors("id", None, None)
            with pytest.raises(TimeoutError):
                self.transport.wait_fetch_complete(request, timeout=0)
            self.transport.wait_fetch_complete(request, timeout=5)

    engine = Patient(Impatient())
    profile = ConsumerProfile(engine, place(tmp_path), "node", engine.transport)
    profile.begin(1)
    engine._complete_pull(engine._issue_pull(Chunk(0), 0))
    profile.end()
    profile.stop()
    (pull,) = [one for one in records_of(tmp_path) if one["kind"] == "pull"]
    assert pull["receive"][0] <= pull["transfer"][0] < pull["transfer"][1] <= pull["receive"][1]


def test_the_worker_extension_hooks_in_once_and_out_completely(tmp_path, monkeypatch):
    monkeypatch.setattr("rdt_e2e.profiling.nodes.this_node_id", lambda: "node")
    transport = Transport()
    monkeypatch.setattr("rdt_e2e.profiling.consumer.nixl_transport", lambda: transport)
    assert issubclass(WeightCheck, SyncProfile)
    worker = SyncProfile()
    worker.weight_transfer_engine = engine = Engine(transport)
    untouched = [dict(vars(one)) for one in (engine, transport, transport._nixl_agent)]
    for iteration in (1, 2):
        worker.sync_profile_begin(str(tmp_path), "run", "summary", iteration)
        engine.receive_weights([Chunk(0)])
        worker.sync_profile_end()
        assert row_of(records_of(tmp_path, iteration))["columns"]["pulls"] == 1
    # A run whose driver was lost did not stop its profile: the next one replaces it.
    worker.sync_profile_begin(str(tmp_path), "next", "summary", 1)
    engine.receive_weights([Chunk(0)])
    worker.sync_profile_end()
    assert row_of(records_of(tmp_path / "next"))["columns"]["pulls"] == 1
    worker.sync_profile_stop()
    transport._nixl_agent.looks = 0
    assert [dict(vars(one)) for one in (engine, transport, transport._nixl_agent)] == untouched


def test_the_worker_extension_never_raises(tmp_path, caplog):
    worker = SyncProfile()
    worker.sync_profile_begin(str(tmp_path), "run", "summary", 1)  # No engine at all.
    worker.sync_profile_end()
    worker.sync_profile_stop()
    assert "not measured" in caplog.text


@pytest.fixture
def producer(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    layout = build_layout(read_index(synthetic.write_checkpoint(folder).root))
    worker = Worker(layout, monkeypatch)
    transport = Transport()
    profile = ProducerProfile(worker, place(tmp_path / "out"), "node-b", transport)
    worker.sync_profile = profile
    return worker, transport


def serve_one_sync(worker, transport):
    """One consumer pulls the first gathered name of each group."""
    worker._num = 0
    worker.begin_sync([0])
    worker.reserve_serve_buffer(0, 64, None)
    gathers = threading.Thread(target=worker.run_gathers)
    gathers.start()
    for seq, group in enumerate(worker._groups):
        blob = worker.rdt_produce_weights_batched([(group.names[0], ())], consumer_id=0, seq=seq)
        transport.extract_tensor_transport_metadata("id", blob)
        worker.free_group(group.index)
    gathers.join(30)
    assert not gathers.is_alive()


def test_every_producer_column_is_measured(producer, tmp_path):
    worker, transport = producer
    worker.sync_profile.begin(1)
    serve_one_sync(worker, transport)
    end_producer(worker)
    records = records_of(tmp_path / "out")
    columns = row_of(records)["columns"]
    num_groups = len(worker._groups)
    assert list(columns) == list(PRODUCER_COLUMNS)
    assert [name for name, value in columns.items() if value is None] == []
    assert columns["pulls"] == columns["specs"] == columns["groups"] == num_groups
    assert columns["bytes"] == worker._counters.num_bytes == 64 * num_groups
    parts = ("wait_s", "slice_s", "pack_s", "checksum_s")
    assert 0 < sum(columns[one] for one in parts) <= columns["method_s"]
    assert 0 < columns["held_max_s"] <= columns["held_s"]
    assert columns["device_sync_s"] <= columns["extract_s"]
    serves = [one for one in records if one["kind"] == "serve"]
    assert [one["seq"] for one in serves] == list(range(num_groups))
    assert {"wait_s", "slice_s", "pack_s", "bytes"} <= set(serves[0])
    assert sum(one["kind"] == "held" for one in records) == num_groups
    stop_producer(worker)
    stop_producer(worker)  # Twice does no harm.
    assert worker.sync_profile is None


def test_a_stopped_producer_profile_leaves_the_rank_as_it_was(producer):
    from rdt_e2e.trainer import producer as module

    worker, transport = producer
    stop_producer(worker)
    assert "_replay_all" not in vars(worker)
    assert "_gather" not in vars(worker)
    assert not {"get", "publish", "served", "_free_if_done"} & set(vars(worker._cache))
    assert not {"check", "claim"} & set(vars(worker._rings))
    assert "_pack" not in vars(worker)
    assert vars(module)["checksum"].__module__ == "rdt_e2e.fabric.checksum"
    assert set(vars(transport)) == {"_nixl_agent"}
    serve_one_sync(worker, transport)


def test_installed_ray_and_nixl_have_every_hook():
    """A Ray or NIXL that moved one of these fails here, and not with n/a on somebody's cluster."""
    from ray.experimental.rdt.nixl_tensor_transport import NixlTensorTransport

    stand_in = {name for name in vars(Transport) if not name.startswith("__")}
    assert {name for name in stand_in if not hasattr(NixlTensorTransport, name)} == set()
    assert NixlTensorTransport()._nixl_agent is None
    nixl = pytest.importorskip("nixl._api", reason="NIXL is not installed")
    from tests.profile_cases import Agent

    methods = {name for name in vars(Agent) if not name.startswith("__")}
    assert {name for name in methods if not hasattr(nixl.nixl_agent, name)} == set()


def test_installed_vllm_has_every_hook():
    from rdt_e2e.inference.plugin import cpu_consumer
    from rdt_e2e.inference.plugin.internals import ShardedRDTWeightTransferEngine

    stages = ("_issue_pull", "_complete_pull", "_process_item", "_run_quant", "drain_pending")
    assert all(hasattr(ShardedRDTWeightTransferEngine, one) for one in stages)
    for method in ("_finish_layer", "_materialize", "_sum_landed"):
        assert hasattr(cpu_consumer.CpuConsumer, method)
    assert hasattr(cpu_consumer, "copy_into_kernel_storage")

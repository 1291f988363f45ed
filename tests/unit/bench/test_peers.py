import asyncio
import pickle
import threading
from base64 import b64decode
from typing import Any

import pytest

from rdt_e2e.bench.k2_slice import TINY, write_slice
from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.checkpoint.synthetic import named_tensors
from rdt_e2e.config import load_config
from rdt_e2e.errors import EngineError, SyncError
from tests.synthetic import raw_bytes

pytest.importorskip("vllm")
from rdt_e2e.bench.nccl_symbols import check_enabled
from rdt_e2e.bench.peer_trainer import HeldSource, PeerTrainer
from rdt_e2e.bench.peers import _Peer, _portable


@pytest.fixture
def folder(tmp_path):
    write_slice(tmp_path, TINY, 2, seed=1)
    return tmp_path


def test_source_gives_every_tensor_in_the_groups_that_vllm_makes(folder):
    index = read_index(folder)
    source = HeldSource(build_layout(index), "cpu")
    source.load(folder)
    expected = dict(named_tensors(index, "cpu"))
    names = [meta.name for meta in source.metadata()]
    assert sorted(names) == sorted(expected)
    assert [name for group in source.groups() for name in group] == names
    for (name, tensor), meta in zip(source, source.metadata(), strict=True):
        assert (name, tensor.dtype, tuple(tensor.shape)) == (meta.name, meta.dtype, meta.shape)
        assert raw_bytes(tensor) == raw_bytes(expected[name])


class Engine:
    """A trainer engine that does what vLLM's do with their client."""

    def __init__(self, client):
        self.client = client

    def send_weights(self):
        self.client.start_weight_update()
        self.client.update_weights({"names": ["a"], "packed": None})
        self.client.finish_weight_update()


class Fleet:
    def __init__(self, fail_in=None):
        self.calls: list[Any] = []
        self.fail_in = fail_in

    async def init_transfer(self, info):
        self.calls.append(("init", info))

    async def start_sync(self):
        self.calls.append("start")

    async def update(self, info):
        self.calls.append(("update", info))
        if self.fail_in == "update":
            raise EngineError("no memory")

    async def finish_sync(self, version):
        self.calls.append("finish")


class Remote:
    """Calls an object's methods on threads of their own, as an actor does."""

    def __init__(self, target):
        self.target = target

    def __getattr__(self, name):
        method = getattr(self.target, name)

        class Method:
            @staticmethod
            def remote(*args):
                return asyncio.get_running_loop().run_in_executor(None, method, *args)

        return Method


def trainer(monkeypatch):
    made: Any = PeerTrainer(load_config("local"))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    from rdt_e2e.bench.peer_trainer import _RelayClient

    made._engine = Engine(_RelayClient(made._commands, made._answers, timeout_s=10))
    return made


def drive(monkeypatch, fleet):
    async def run():
        remote: Any = Remote(trainer(monkeypatch))
        peer = _Peer(remote, fleet, load_config("local"))
        await peer.drive(remote.send.remote())
        return peer

    return asyncio.run(run())


def test_engine_calls_reach_the_fleet_in_order_and_are_timed(monkeypatch):
    fleet = Fleet()
    peer = drive(monkeypatch, fleet)
    assert fleet.calls == ["start", ("update", {"names": ["a"]}), "finish"]
    assert set(peer.seconds) == {"start", "update", "finish"}


def test_a_failed_update_ends_the_row_with_its_cause(monkeypatch):
    fleet = Fleet(fail_in="update")
    before = threading.active_count()
    with pytest.raises(EngineError, match="no memory"):
        drive(monkeypatch, fleet)
    assert fleet.calls[-1] == ("update", {"names": ["a"]})
    assert threading.active_count() <= before + 1


def test_handles_travel_as_text():
    handles = {"uuid": (1, b"raw")}
    sent = _portable({"names": ["a"], "ipc_handles": handles, "ipc_handles_pickled": None})
    assert sent.pop("ipc_handles_pickled") is not None
    assert sent == {"names": ["a"]}
    again = _portable({"ipc_handles": handles})["ipc_handles_pickled"]
    assert pickle.loads(b64decode(again)) == handles  # noqa: S301 - made three lines above


def test_a_communicator_that_moves_nothing_is_refused():
    class Communicator:
        disabled = True

    with pytest.raises(SyncError, match="turned itself off"):
        check_enabled(Communicator())
    check_enabled(None)

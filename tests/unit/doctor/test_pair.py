"""How the measurement between two nodes is put together; the stack tests run it on a real Ray."""

import time

import pytest

from rdt_e2e.config import load_config
from rdt_e2e.doctor import pair
from rdt_e2e.doctor.pair_facts import NodeFacts
from rdt_e2e.errors import BackendUnavailableError
from rdt_e2e.fabric.peer import Offer, ReadResult
from rdt_e2e.fabric.pinning import NicChoice
from tests.doctor_cases import K2


class Method:
    """A method of an actor: `remote` gives what the stand-in for `ray.get` calls."""

    def __init__(self, call):
        self._call = call

    def remote(self, *arguments):
        return lambda: self._call(*arguments)


class End:
    """An end of the measurement, without Ray."""

    def __init__(self, host, *, ahead_s=0.0, nic=None, speed=40e9, fault=None):
        self._sent = {"mlx5_0:1": 1000, "mlx5_8:1": 5}
        self.log = []
        self.describe = Method(lambda address: NodeFacts(address, host, {}, {}, {}))
        self.pinned = Method(lambda: NicChoice(nic, "", "a reason"))
        self.now = Method(lambda: time.time() + ahead_s)
        self.sent = Method(lambda: dict(self._sent))
        self.offer = Method(self._offer)
        self.read = Method(self._read)
        self._speed, self._fault = speed, fault

    def _offer(self, device, seed):
        self.log.append((device, seed))
        if self._fault is not None:
            raise self._fault
        return Offer(b"", b"", 1 << 20, seed)

    def _read(self, device, offer):
        self._sent["mlx5_0:1"] += offer.num_bytes
        return ReadResult(offer.num_bytes, offer.num_bytes / self._speed, True, ("rc_mlx5/x:1",))


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.setattr(pair, "_get", lambda refs, what: [ref() for ref in refs])

    def call(trainers, inference, profile="kimi-k2"):
        config = load_config(profile, K2 if profile == "kimi-k2" else {})
        ends = {"trainer": trainers, "inference": inference}
        return pair._measure(config, ends, {"trainer": "10.0.0.1", "inference": "10.0.0.2"})

    return call


def test_all_pairs_read_both_ways(measure):
    trainers = [End("a", nic="mlx5_0:1") for _ in range(3)]
    facts = measure(trainers, [End("b", nic="mlx5_0:1", speed=10e9) for _ in range(3)])
    seen = [(read.direction, read.device, len(read.gb_per_s)) for read in facts.reads]
    assert seen == [
        ("trainer -> inference", "cpu", 1),
        ("inference -> trainer", "cpu", 1),
        ("trainer -> inference", "cuda", 3),
        ("inference -> trainer", "cuda", 3),
    ]
    # The reader's speed is what counts.
    assert facts.reads[2].gb_per_s == pytest.approx([10, 10, 10])
    assert facts.reads[3].gb_per_s == pytest.approx([40, 40, 40])
    assert (facts.trainer.host, facts.inference.address) == ("a", "10.0.0.2")
    assert facts.nics["trainer 2"] == "mlx5_0:1 (a reason)"
    assert facts.num_unpinned == 0


def test_no_two_buffers_of_a_direction_hold_the_same(measure):
    trainer, inference = End("a"), End("b")
    measure([trainer], [inference])
    pairs = zip(trainer.log, inference.log, strict=True)
    assert all(left[0] == right[0] and left[1] != right[1] for left, right in pairs)


def test_traffic_is_of_the_ranks_own_ports(measure):
    facts = measure([End("a", nic="mlx5_0:1")], [End("b", nic="mlx5_0:1")])
    assert facts.traffic == {"trainer mlx5_0:1": 1 << 20, "inference mlx5_0:1": 1 << 20}
    facts = measure([End("a")], [End("b")])
    assert set(facts.traffic) == {
        "trainer mlx5_0:1",
        "trainer mlx5_8:1",
        "inference mlx5_0:1",
        "inference mlx5_8:1",
    }
    assert facts.num_unpinned == 2


def test_without_gpus_only_host_memory_is_read(measure):
    facts = measure([End("a")], [End("b")], "local")
    assert {read.device for read in facts.reads} == {"cpu"}
    assert facts.traffic == {}


def test_the_offset_of_two_clocks(measure):
    facts = measure([End("a", ahead_s=-2.0)], [End("b", ahead_s=1.5)])
    assert abs(facts.clock_offset_s - 3.5) <= facts.clock_error_s + 1e-6


def test_a_read_that_fails_does_not_hide_the_rest(measure):
    fault = BackendUnavailableError("no agent")
    facts = measure([End("a", fault=fault)], [End("b")])
    assert {read.error for read in facts.reads} == {"no agent"}
    assert facts.trainer.host == "a"

"""Messages and one-sided reads between two real NIXL agents, in a process of their own."""

import json
import os
import subprocess
import sys

import pytest
import torch

from rdt_e2e.errors import BackendUnavailableError, PullTimeoutError, SyncError
from rdt_e2e.fabric.direct import DirectAgent, RemoteSlots

CPU = torch.device("cpu")

SCRIPT = """
import json, uuid
import torch
from rdt_e2e.errors import PullTimeoutError
from rdt_e2e.fabric.direct import DirectAgent
from nixl._api import nixl_agent, nixl_agent_config

def agent():
    raw = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=["UCX"]))
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    raw.register_memory(memory)
    return DirectAgent(torch.device("cpu"), raw), list(memory.view(4, -1))

def limits(what):
    return {"limit_s": 30, "what": what, "check": lambda: None}

(producer, ring), (consumer, targets) = agent(), agent()
slots = producer.describe(ring)
to_producer, to_consumer = consumer.meet(slots.metadata), producer.meet(consumer.metadata)
results = []
for seq in range(6):
    ring[seq % 4].fill_(seq + 1)
    ring[seq % 4][:3] = torch.tensor([7, 8, 9])
    producer.send(to_consumer, b"ready %d" % seq)
    consumer.await_message(to_producer, b"ready %d" % seq, 30, "a message", lambda: None)
    target = targets[seq % 2][: 1000 + seq]
    consumer.read(target, to_producer, slots, seq % 4, b"done %d" % seq, **limits("a read"))
    producer.await_message(to_consumer, b"done %d" % seq, 30, "a message", lambda: None)
    results.append(bool((target[3:] == seq + 1).all()) and target[:3].tolist() == [7, 8, 9])
    # What lies behind what was read stays as it was.
    results.append(targets[seq % 2][1000 + seq].item() == 0)
    targets[seq % 2].zero_()
producer.send(to_consumer, b"left over")
consumer.await_message(to_producer, b"left over", 30, "a message", lambda: None)
try:
    consumer.await_message(to_producer, b"left over", 0.05, "nothing more", lambda: None)
except PullTimeoutError as error:
    results.append("nothing more" in str(error))
print(json.dumps(results))
"""


def test_bytes_and_messages_arrive(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"UCX_TLS": "tcp,self", "UCX_MODULES": "^efa"},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.strip().splitlines()[-1])
    assert results == [True] * 13


class FakeAgent:
    """An agent whose reads end as told, and whose messages are those put into `incoming`."""

    def __init__(self, *states):
        self.states = list(states)
        self.incoming = {}
        self.released = 0

    def get_new_notifs(self):
        found, self.incoming = self.incoming, {}
        return found

    def get_xfer_descs(self, descs, mem_type):
        return descs, mem_type

    def initialize_xfer(self, *_arguments):
        return object()

    def transfer(self, _handle, _message):
        return self._next()

    def check_xfer_state(self, _handle):
        return self._next()

    def _next(self):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def release_xfer_handle(self, _handle):
        self.released += 1

    def add_remote_agent(self, metadata):
        if metadata == b"not an agent":
            raise RuntimeError("NIXL_ERR_MISMATCH")
        return metadata

    def send_notif(self, peer, _message):
        raise RuntimeError(f"NIXL_ERR_NOT_FOUND {peer}")


SLOTS = RemoteSlots(b"", [4096, 8192], 100, "cpu", 0)


def read(fake, num_bytes=100, limit_s=5.0, check=lambda: None):
    agent = DirectAgent(CPU, fake)
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    agent.read(target, "peer", SLOTS, 1, b"done", limit_s=limit_s, what="pull 3", check=check)


@pytest.mark.parametrize("states", [["DONE"], ["PROC", "PROC", "DONE"]])
def test_a_read_ends_when_the_transfer_does(states):
    fake = FakeAgent(*states)
    read(fake)
    assert fake.released == 1


@pytest.mark.parametrize("states", [["ERR"], ["PROC", "ERR"]])
def test_a_transfer_that_failed_names_the_pull(states):
    fake = FakeAgent(*states)
    with pytest.raises(SyncError, match="pull 3: the read from agent peer failed"):
        read(fake)
    assert fake.released == 1


def test_a_read_that_does_not_end_is_given_up():
    fake = FakeAgent("PROC")
    with pytest.raises(PullTimeoutError, match=r"pull 3: waited 0\.05 s"):
        read(fake, limit_s=0.05)
    assert fake.released == 1


def test_what_went_wrong_elsewhere_ends_a_wait():
    def check():
        raise SyncError("the producer gave up")

    with pytest.raises(SyncError, match="the producer gave up"):
        read(FakeAgent("PROC"), check=check)


def test_more_than_a_slot_is_refused():
    with pytest.raises(SyncError, match="101 bytes are more than a slot"):
        read(FakeAgent("DONE"), num_bytes=101)


def test_only_the_message_itself_is_taken():
    fake = FakeAgent()
    agent = DirectAgent(CPU, fake)
    fake.incoming = {"peer": [b"ready 1 10", b"ready 1 1"], "other": [b"ready 1 2"]}
    agent.await_message("peer", b"ready 1 1", 1, "pull 1", lambda: None)
    agent.await_message("peer", b"ready 1 10", 1, "pull 10", lambda: None)
    with pytest.raises(PullTimeoutError, match="pull 2"):
        agent.await_message("peer", b"ready 1 2", 0.02, "pull 2", lambda: None)


def test_forgotten_messages_do_not_count():
    fake = FakeAgent()
    agent = DirectAgent(CPU, fake)
    fake.incoming = {"peer": [b"ready 1 1"]}
    agent.forget("peer")
    with pytest.raises(PullTimeoutError):
        agent.await_message("peer", b"ready 1 1", 0.02, "pull 1", lambda: None)


def test_an_agent_that_cannot_be_reached_is_an_error_of_ours():
    agent = DirectAgent(CPU, FakeAgent())
    assert agent.meet(b"peer") == "peer"
    with pytest.raises(BackendUnavailableError, match="NIXL_ERR_MISMATCH"):
        agent.meet(b"not an agent")
    with pytest.raises(SyncError, match="no message could be sent to agent peer"):
        agent.send("peer", b"ready 1 1")

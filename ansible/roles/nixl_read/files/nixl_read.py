"""One NIXL read between two hosts, outside of Ray: does the transport work, and how fast is it.

``nixl_read.py serve --port P --bytes N`` registers memory and waits for one reader, with a deadline;
``nixl_read.py read --host H --port P`` reads it, checks every byte and prints JSON. The two ends
exchange NIXL's metadata over one TCP connection. GPU memory is used where there is a GPU.
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import sys
import time
from typing import Any

import torch
from nixl._api import nixl_agent, nixl_agent_config

DEADLINE_S = 60.0
PATTERN = 251
"""Bytes count modulo this prime, so that a shifted or repeated piece is seen."""


def send(peer: socket.socket, payload: bytes) -> None:
    """Send one message: its length in 8 bytes, then itself."""
    peer.sendall(struct.pack("!Q", len(payload)) + payload)


def receive(peer: socket.socket) -> bytes:
    """Receive one message.

    Raises:
        ConnectionError: The other end closed the connection.
    """

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = peer.recv(count - len(data))
            if not piece:
                raise ConnectionError("the other end closed the connection")
            data += piece
        return data

    (length,) = struct.unpack("!Q", exactly(8))
    return exactly(length)


def make_agent(name: str, num_bytes: int) -> tuple[nixl_agent, torch.Tensor, Any]:
    """An agent with UCX and one registered tensor of bytes.

    Raises:
        RuntimeError: UCX did not come up, or the memory cannot be registered.
    """
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    registered = agent.register_memory([memory])
    if not registered:
        raise RuntimeError(f"NIXL cannot register {num_bytes} bytes on {device}")
    return agent, memory, registered


def pattern(num_bytes: int, device: torch.device) -> torch.Tensor:
    """The bytes that are served."""
    return (torch.arange(num_bytes, device=device) % PATTERN).to(torch.uint8)


def serve(port: int, num_bytes: int) -> dict[str, object]:
    """Serve one reader; gives up after `DEADLINE_S`."""
    agent, memory, registered = make_agent("server", num_bytes)
    memory.copy_(pattern(num_bytes, memory.device))
    with socket.create_server(("", port)) as listener:
        listener.settimeout(DEADLINE_S)
        peer, _ = listener.accept()
    with peer:
        peer.settimeout(DEADLINE_S)
        descriptors = agent.get_serialized_descs(registered.trim())
        send(peer, json.dumps({"bytes": num_bytes}).encode())
        send(peer, agent.get_agent_metadata())
        send(peer, descriptors)
        receive(peer)
    agent.deregister_memory(registered)
    return {"served": num_bytes}


def read(host: str, port: int) -> dict[str, object]:
    """Read what a server offers: once to warm up, once against the clock.

    Raises:
        RuntimeError: A transfer failed or did not end, or a byte is wrong.
    """
    with _connect(host, port) as peer:
        num_bytes = json.loads(receive(peer))["bytes"]
        agent, memory, registered = make_agent("reader", num_bytes)
        server = agent.add_remote_agent(receive(peer))
        remote = agent.deserialize_descs(receive(peer))
        for _ in range(2):
            memory.zero_()
            handle = agent.initialize_xfer("READ", registered.trim(), remote, server)
            seconds = _transfer(agent, handle)
            agent.release_xfer_handle(handle)
        correct = bool(torch.equal(memory, pattern(num_bytes, memory.device)))
        agent.remove_remote_agent(server)
        agent.deregister_memory(registered)
        send(peer, b"done")
    if not correct:
        raise RuntimeError(f"{num_bytes} bytes were read and some are wrong")
    rate = num_bytes * 8 / seconds / 1e9
    return {"bytes": num_bytes, "seconds": seconds, "gbps": rate, "device": memory.device.type}


def _connect(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=DEADLINE_S)
        except ConnectionRefusedError:
            # The server imports torch first.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _transfer(agent: nixl_agent, handle: object) -> float:
    start = time.monotonic()
    state = agent.transfer(handle)
    while state == "PROC":
        if time.monotonic() - start > DEADLINE_S:
            raise RuntimeError(f"the read did not end within {DEADLINE_S:g} s")
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"the read ended as {state}")
    return time.monotonic() - start


def main() -> None:
    """Read the command line and do one side's part."""
    parser = argparse.ArgumentParser(description="One NIXL read between two hosts.")
    parser.add_argument("side", choices=["serve", "read"])
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    given = parser.parse_args()
    done = serve(given.port, given.bytes) if given.side == "serve" else read(given.host, given.port)
    sys.stdout.write(json.dumps(done) + "\n")


if __name__ == "__main__":
    main()

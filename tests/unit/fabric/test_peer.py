"""Two real NIXL agents in a process of their own, reading from one another."""

import json
import os
import subprocess
import sys

TIMEOUT_S = 120

SCRIPT = """
import json, pathlib, sys
import torch
from rdt_e2e.fabric.peer import Peer

cpu, folder = torch.device("cpu"), pathlib.Path(sys.argv[1])
first, second = (Peer(cpu, 1 << 20, "UCX", folder) for _ in range(2))
results = []
for source, reader, seed in ((first, second, 1), (second, first, 2), (first, second, 3)):
    read = reader.read(source.offer(seed), repeats=2, timeout_s=30)
    results.append([read.num_bytes, read.is_same, read.seconds > 0, read.gb_per_s > 0])
offer = first.offer(4)
first._buffer[7] += 1
results.append([second.read(offer, repeats=1, timeout_s=30).is_same])
print(json.dumps(results))
"""


def test_reads_arrive_and_changed_bytes_are_seen(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=os.environ | {"UCX_TLS": "tcp,self", "UCX_MODULES": "^efa"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    *reads, changed = json.loads(done.stdout.strip().splitlines()[-1])
    assert reads == [[1 << 20, True, True, True]] * 3
    assert changed == [False]
    assert "UCX" in (tmp_path / "ucx.log").read_text()


def test_a_backend_that_is_missing_names_the_fix(tmp_path):
    code = (
        "import pathlib, sys, torch\n"
        "from rdt_e2e.errors import BackendUnavailableError\n"
        "from rdt_e2e.fabric.peer import Peer\n"
        "try:\n"
        "    Peer(torch.device('cpu'), 4096, 'NOSUCH', pathlib.Path(sys.argv[1]))\n"
        "except BackendUnavailableError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert "NIXL cannot register 4096 bytes on cpu over NOSUCH" in done.stdout, done.stderr
    assert "rdt-e2e doctor" in done.stdout

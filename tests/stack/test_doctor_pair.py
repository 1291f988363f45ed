"""The doctor between two real Ray nodes of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 300


def test_two_local_nodes_read_from_one_another(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rdt_e2e.cli", "doctor", "--pair", "--group", "pair", "--json"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        # A cluster of its own, beside the one that other tests share.
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    content = json.loads(done.stdout)
    assert content["ok"]
    found = {check["id"]: check for check in content["checks"]}
    assert found["pair.nodes"]["found"].startswith("trainer 127.0.0.2, inference 127.0.0.3")
    # Passed means that the bytes arrived as they were sent, in both directions.
    assert found["pair.read-cpu"]["status"] == "pass"
    assert "tcp/" in found["pair.transport"]["found"]

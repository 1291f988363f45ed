"""The verb: what it prints, how it ends, and itself on this machine."""

import io
import json
import re
import subprocess
import sys
import types

import pytest

from rdt_e2e.config import load_config
from rdt_e2e.doctor import registry, report, run
from rdt_e2e.doctor.finding import Status
from rdt_e2e.errors import ConfigError, EnvironmentCheckError
from tests import machines
from tests.doctor_cases import K2

REAL_TIMEOUT_S = 120
"""For a whole doctor on a busy machine; a free one takes a few seconds."""


class Terminal(io.StringIO):
    """A stream that claims to be one."""

    def isatty(self):
        return True


def doctor(machine, stream=None, profile="local", **options):
    stream = io.StringIO() if stream is None else stream
    config = load_config(profile, K2 if profile == "kimi-k2" else {})
    code = run.run_doctor(config, stream, run.Options(**options), machine)
    return code, stream.getvalue()


@pytest.fixture
def sick(tmp_path):
    """A CPU node with a failure and a warning."""
    machine = machines.cpu_node(tmp_path)
    machine.limits["nofile"] = 100
    machine.programs = {"bash"}
    return machine


def test_a_sound_machine_is_quiet(tmp_path):
    code, out = doctor(machines.cpu_node(tmp_path))
    assert code == 0
    assert "fix:" not in out
    assert re.search(r"^\d+ checks: \d+ passed, \d+ skipped$", out, re.MULTILINE)
    assert "(image.python)" not in out


def test_verbose_shows_what_passed(tmp_path):
    _, out = doctor(machines.cpu_node(tmp_path), verbose=True)
    assert "  ok    Python release (image.python)\n        Python 3.12.9\n" in out
    assert "  skip  RDMA devices are here" in out


def test_failures_and_warnings_have_their_fix(sick):
    code, out = doctor(sick)
    assert code == run.EXIT_FAILED
    assert (
        "  FAIL  Open files (node.open-files)\n        100\n        fix: ulimit -n 65536\n" in out
    )
    assert "\n             docker: --ulimit nofile=65536\n" in out
    assert "Image and packages: 1 with a warning" in out
    assert "rdt-e2e doctor --explain node.open-files" in out


def test_warnings_alone_do_not_fail(sick):
    sick.limits["nofile"] = 1 << 20
    code, out = doctor(sick)
    assert code == 0
    assert "WARN  bash and wget" in out


def test_colours_are_for_terminals(sick):
    assert "\033[31mFAIL\033[0m" in doctor(sick, Terminal())[1]
    assert "\033" not in doctor(sick)[1]


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit(width, tmp_path, monkeypatch):
    machine = machines.roce_node(tmp_path)
    machine.environ["UCX_IB_GID_INDEX"] = "0"
    monkeypatch.setattr(run, "terminal_width", lambda: width)
    _, out = doctor(machine, profile="kimi-k2", verbose=True)
    # A command stays whole, so that it can be copied, and so does a path.
    lines = [line for line in out.splitlines() if "fix: " not in line and " " in line.strip()]
    assert max(map(len, lines)) <= width
    assert len(out.splitlines()) > 100


def test_json_says_all(sick):
    code, out = doctor(sick, as_json=True)
    content = json.loads(out)
    assert (code, content["ok"]) == (1, False)
    assert content["counts"]["fail"] == 1
    by_id = {check["id"]: check for check in content["checks"]}
    assert set(by_id) == {c for c in registry.CHECKS if not c.startswith("pair.")}
    found = by_id["node.open-files"]
    assert found["status"] == "fail"
    assert set(found) == {
        "id",
        "group",
        "title",
        "status",
        "looked_at",
        "found",
        "fix",
        "sources",
    }
    assert {check["status"] for check in content["checks"]} <= {s.value for s in Status}


def test_groups(sick):
    code, out = doctor(sick, groups=("image", "ray"), as_json=True)
    assert code == 0
    assert {check["group"] for check in json.loads(out)["checks"]} == {"image", "ray"}
    with pytest.raises(ConfigError, match="--group disk is not a group of checks; there are image"):
        doctor(sick, groups=("disk",))


def test_image_and_pair_exclude_one_another(sick):
    with pytest.raises(ConfigError, match="exclude one another"):
        doctor(sick, at_build=True, with_pair=True)


def test_a_pair_that_cannot_be_measured_is_a_failure(sick, monkeypatch):
    monkeypatch.setattr(run, "_measure", lambda config: "no Ray head answers")
    code, out = doctor(sick, with_pair=True, groups=("pair",))
    assert code == 1
    assert "Two nodes for two fleets (pair.nodes)\n        no Ray head answers" in out


def test_explain():
    text = run.explain("rdma.affinity")
    check = registry.find("rdma.affinity")
    flat = " ".join(text.split())
    for part in (check.title, check.looks_at, check.why, *check.sources):
        assert part in flat
    with pytest.raises(
        ConfigError, match=r"no check 'rdma\.nic'; there are rdma\.devices, rdma\.links"
    ):
        run.explain("rdma.nic")
    with pytest.raises(ConfigError, match=r"no check 'x'; there are image\.\*"):
        run.explain("x")


def test_a_narrow_terminal_gets_what_can_be_read(tmp_path):
    text = report.explain(registry.find("rdma.affinity"), 10)
    assert max(map(len, text.splitlines())) <= report.MIN_WIDTH


def real(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "rdt_e2e.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=REAL_TIMEOUT_S,
    )


def test_this_environment_is_a_sound_image():
    done = real("--image", "--json")
    content = json.loads(done.stdout)
    assert (done.returncode, content["ok"]) == (0, True), content
    by_id = {check["id"]: check for check in content["checks"]}
    assert by_id["nixl.agent"]["status"] == "pass"


def test_this_machine_can_be_examined():
    done = real("--json")
    content = json.loads(done.stdout)
    assert done.returncode == (0 if content["ok"] else 1)
    assert not done.stderr
    # Whatever this machine lacks, every check understands it.
    assert not [c for c in content["checks"] if "the check itself failed" in c["found"]]


def test_bad_input_is_2():
    done = real("--group", "disk")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rdt-e2e: error: command line: --group disk")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EnvironmentCheckError("no Ray head answers"), "no Ray head answers"),
        (RuntimeError("the raylet died"), "RuntimeError: the raylet died"),
    ],
)
def test_a_cluster_that_breaks_is_a_finding(error, said, sick, monkeypatch):
    pair = types.ModuleType("rdt_e2e.doctor.pair")

    def measure_pair(config, console):
        raise error

    vars(pair)["measure_pair"] = measure_pair
    monkeypatch.setitem(sys.modules, pair.__name__, pair)
    code, out = doctor(sick, with_pair=True, groups=("pair",), as_json=True)
    found = {check["id"]: check for check in json.loads(out)["checks"]}
    assert code == 1
    assert (found["pair.nodes"]["status"], found["pair.nodes"]["found"]) == ("fail", said)
    assert found["pair.read-cpu"]["found"] == "was not measured; see pair.nodes"

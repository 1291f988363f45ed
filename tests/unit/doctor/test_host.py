"""The real host: bounded, and true to this machine."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from rdt_e2e.doctor.host import RealHost, Space

HOST = RealHost()


def test_a_program_is_run():
    result = HOST.run([sys.executable, "-c", "import sys; print('out'); sys.exit(3)"])
    assert (result.code, result.stdout) == (3, "out\n")


def test_a_program_gets_the_environment_it_is_given():
    show = "import os; print(os.environ.get('WHO'))"
    assert HOST.run([sys.executable, "-c", show], environ={"WHO": "me"}).stdout == "me\n"


def test_a_missing_program_is_no_error():
    result = HOST.run(["/no/such/program"])
    assert (result.code, result.stdout) == (None, "")
    assert "No such file" in result.stderr


def test_a_slow_program_is_ended_with_its_children(tmp_path):
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    result = HOST.run([sys.executable, "-c", code], timeout_s=3)
    assert result.code is None
    assert result.stderr == "no answer within 3 s"
    if note.exists():  # Else it was ended before it had a child.
        pid = int(note.read_text())
        deadline = time.monotonic() + 30
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_crash_is_told_by_its_signal():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert HOST.run([sys.executable, "-c", code]).code == -signal.SIGSEGV


def test_space_of_a_path_that_is_not_there_yet(tmp_path):
    found = HOST.space(tmp_path / "not" / "yet")
    assert isinstance(found, Space)
    assert 0 < found.free_bytes <= found.total_bytes


def test_limits_are_numbers_or_none():
    limit = HOST.limit("nofile")
    assert limit is None or limit > 0
    assert HOST.can_lock(4096) in (True, False)


def test_locking_leaves_nothing_locked():
    def locked():
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmLck:")[2].split()[0])

    before = locked()
    HOST.can_lock(1 << 20)
    assert locked() == before


def test_packages_by_normal_name():
    found = HOST.distributions()
    assert "pydantic-settings" in found
    folder = HOST.package_folder("pydantic")
    assert folder is not None
    assert folder.name == "pydantic"
    assert HOST.package_folder("no_such_package") is None
    assert HOST.which("no-such-program") is None


def test_a_listener_answers_and_a_closed_port_says_why():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert HOST.answers("127.0.0.1", port) is None
    assert "refused" in str(HOST.answers("127.0.0.1", port))


@pytest.mark.parametrize("name", ["root", "python"])
def test_it_is_this_machine(name):
    assert os.path.exists(getattr(HOST, name))

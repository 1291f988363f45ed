"""The bare target up to the point where Ansible or ssh is called, and what it makes of their answers."""

import io
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rdt_e2e.cli import app
from rdt_e2e.cluster.bare import (
    JOB,
    RUNS_FOLDER,
    TOKEN,
    TOKEN_VARIABLE,
    BareTarget,
    bare_target,
    find_ansible,
    make_token,
)
from rdt_e2e.console import Console
from rdt_e2e.errors import EnvironmentCheckError
from tests.ansible_modules import ANSIBLE

OVER_SSH = {
    "plugin": "ssh",
    "address": "10.0.0.11",
    "port": "",
    "user": "",
    "key": "",
    "options": " ",
}


class Machine:
    """Answers what the target calls, and keeps the calls."""

    def __init__(self, connection=OVER_SSH, status=0, listed=0, play=0, interrupted=False):
        self.calls = []
        self.environments = []
        self.connection = connection
        self.status = status
        self.listed = listed
        self.play = play
        self.interrupted = interrupted

    def __call__(self, command, env=None, **_):
        words = [str(word) for word in command]
        self.calls.append(words)
        self.environments.append(env)
        output, status = b"", 0
        if words[0].endswith("/ansible"):
            answer = {"changed": False, "msg": self.connection}
            output = f"inference-0 | SUCCESS => {json.dumps(answer, indent=4)}\n".encode()
        elif words[0].endswith("/ansible-playbook"):
            status = self.play
        elif "ls -1" in " ".join(words):
            status = self.listed
        return subprocess.CompletedProcess(words, status, output, b"")

    def start(self, command, **_):
        self.calls.append([str(word) for word in command])
        return self

    def wait(self):
        """The end of the job, or Ctrl-C before it."""
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        return self.status

    def of(self, word):
        return [call for call in self.calls if word in " ".join(call)]


def target(tmp_path, machine):
    programs = Path("/programs")
    console = Console(io.StringIO())
    return BareTarget(tmp_path, tmp_path / "hosts.yml", programs, console, machine, machine.start)


def test_deploy_hands_over_a_token_outside_of_the_command_line(tmp_path):
    machine = Machine()
    target(tmp_path, machine).deploy(["-e", "@secret.yml"], Path("/cache/v1"))
    (command,) = machine.calls
    token = (tmp_path / TOKEN).read_text()
    assert machine.environments[0][TOKEN_VARIABLE] == token
    assert token not in " ".join(command)
    assert command[0] == "/programs/ansible-playbook"
    assert command[-3:] == ["-e", "@secret.yml", str(tmp_path / "ansible/cluster.yml")]
    assert '{"cluster_mini_kimi": "/cache/v1"}' in command


def test_failed_playbook_is_named(tmp_path):
    with pytest.raises(EnvironmentCheckError, match=r"ansible/cluster.yml failed \(status 4\)"):
        target(tmp_path, Machine(play=4)).deploy([], Path("/cache"))


def test_down_forgets_the_token_once_the_hosts_have(tmp_path):
    make_token(tmp_path / TOKEN)
    with pytest.raises(EnvironmentCheckError):
        target(tmp_path, Machine(play=1)).down([])
    assert (tmp_path / TOKEN).exists()
    machine = Machine()
    target(tmp_path, machine).down([])
    assert "cluster_state=absent" in machine.calls[0]
    assert not (tmp_path / TOKEN).exists()


def test_job_runs_on_the_inference_host_and_its_status_is_passed_on(tmp_path):
    machine = Machine(status=3)
    arguments = ["--config", "kimi-k2", "--set", 'verify.prompts=["a b"]']
    assert target(tmp_path, machine).sync(arguments, tmp_path) == 3
    assert "inference[0]" in machine.calls[0]
    (job,) = [call for call in machine.of(JOB) if "ls -1" not in call[-1]]
    assert job[0] == "ssh"
    assert job[-2] == "10.0.0.11"
    # Quoted for the shell there.
    assert shlex.split(job[-1])[-6:] == [JOB, "sync", *arguments]


def test_connection_is_that_of_the_inventory(tmp_path):
    connection = OVER_SSH | {"port": 2222, "user": "ubuntu", "key": "/k", "options": "-J jump "}
    machine = Machine(connection)
    target(tmp_path, machine).sync([], tmp_path)
    words = " ".join(machine.of(JOB)[0])
    assert "-p 2222 -l ubuntu -i /k -J jump 10.0.0.11" in words
    # Nobody is there to answer a question.
    assert "BatchMode=yes" in words


def test_this_machine_needs_no_ssh(tmp_path):
    machine = Machine(OVER_SSH | {"plugin": "local"})
    target(tmp_path, machine).sync(["--iters", "1"], tmp_path)
    job = machine.of(f"{JOB} sync")[0]
    assert job[0] == "sh"
    assert job[-4:] == [JOB, "sync", "--iters", "1"]


def test_other_connections_say_what_to_do(tmp_path):
    machine = Machine(OVER_SSH | {"plugin": "podman"})
    with pytest.raises(EnvironmentCheckError, match=r"ansible_connection=podman.*on the host"):
        target(tmp_path, machine).sync([], tmp_path)


def test_job_needs_a_deployment(tmp_path):
    with pytest.raises(EnvironmentCheckError, match="inference-0: nothing is deployed there"):
        target(tmp_path, Machine(listed=1)).sync([], tmp_path)


def test_interrupt_ends_the_job_there(tmp_path):
    machine = Machine(interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        target(tmp_path, machine).sync([], tmp_path)
    assert len(machine.of("systemctl stop rdt-e2e-job.service")) == 1


def test_program_and_folder_are_those_of_the_role():
    tasks = (ANSIBLE / "roles/ray_node/tasks/started.yml").read_text()
    assert f"dest: {JOB}\n" in tasks
    variables = yaml.safe_load((ANSIBLE / "roles/ray_node/vars/main.yml").read_text())
    assert f"'RDT_E2E_PATHS__RUNS_DIR': '{RUNS_FOLDER}'" in variables["ray_node_variables"]
    knobs = (ANSIBLE / "group_vars/all/cluster.yml").read_text()
    assert f"lookup('ansible.builtin.env', '{TOKEN_VARIABLE}')" in knobs


def test_own_ansible_comes_before_that_of_the_path(tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(EnvironmentCheckError, match=r"scripts/setup\.sh ansible"):
        find_ansible(tmp_path)
    (programs / "ansible-playbook").touch(mode=0o755)
    assert find_ansible(tmp_path) == programs
    own = tmp_path / ".venv-ansible/bin"
    own.mkdir(parents=True)
    (own / "ansible-playbook").touch()
    assert find_ansible(tmp_path) == own


@pytest.mark.parametrize("verb", ["deploy", "sync", "down"])
def test_missing_inventory_is_named(verb, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["bare", verb, "--inventory", str(tmp_path / "none.yml")])
    assert done.exit_code == 2
    assert "ansible/inventory/example.yml" in done.output


def test_token_is_kept_and_closed_to_others(tmp_path):
    token = make_token(tmp_path / TOKEN)
    assert make_token(tmp_path / TOKEN) == token
    assert len(token) == 64
    assert os.stat(tmp_path / TOKEN).st_mode & 0o077 == 0


def test_target_has_this_repository(tmp_path, monkeypatch):
    # Ansible is set up by `make deploy TARGET=bare` and `make lint`, not for these tests.
    monkeypatch.setattr("rdt_e2e.cluster.bare.find_ansible", lambda root: root)
    (tmp_path / "hosts.yml").touch()
    assert bare_target(tmp_path / "hosts.yml", Console(io.StringIO())).root == ANSIBLE.parent

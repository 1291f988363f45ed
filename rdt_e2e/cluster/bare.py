"""The deployment on bare hosts: Ansible puts Ray there; a job runs on the inference host, over ssh."""

import json
import os
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rdt_e2e.cluster.kubectl import unpack
from rdt_e2e.console import Console
from rdt_e2e.errors import EnvironmentCheckError

PLAYBOOK = "cluster.yml"
JOB = "/usr/local/sbin/rdt-e2e-job"
"""Program of the role ray_node that runs rdt-e2e beside a host's Ray node."""
RUNS_FOLDER = "/var/lib/rdt-e2e/runs"
TOKEN = Path(".secrets/bare-ray-token")
TOKEN_VARIABLE = "CLUSTER_RAY_TOKEN"  # noqa: S105 - the name of a variable
CONNECTION = """{{ {
  'plugin': ansible_connection | default('ssh'),
  'address': ansible_host | default(inventory_hostname),
  'port': ansible_port | default(''),
  'user': ansible_user | default(''),
  'key': ansible_ssh_private_key_file | default(ansible_private_key_file | default('')),
  'options': [ansible_ssh_common_args | default(''), ansible_ssh_extra_args | default('')] | join(' ')
} }}"""
"""What of the inventory says how a host is reached."""

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
Start = Callable[..., "subprocess.Popen[bytes]"]


@dataclass(frozen=True)
class Host:
    """A host of the inventory.

    Attributes:
        name: Its name there.
        ssh: The ssh command up to the remote command; empty for this machine.
    """

    name: str
    ssh: Sequence[str]

    def command(self, *words: str) -> list[str]:
        """The local command that runs a command there as root."""
        as_root = 'if [ "$(id -u)" -eq 0 ]; then exec "$@"; else exec sudo -n "$@"; fi'
        whole = ["sh", "-c", as_root, "sh", *words]
        return [*self.ssh, shlex.join(whole)] if self.ssh else whole


@dataclass(frozen=True)
class BareTarget:
    """The hosts of an inventory.

    Attributes:
        root: Folder of the repository, which holds ansible/.
        inventory: File or folder with the groups trainer and inference.
        programs: Folder of Ansible's programs.
        console: For the lines printed.
        run: Runs a command to its end, as `subprocess.run` does.
        start: Starts a command, as `subprocess.Popen` does.
    """

    root: Path
    inventory: Path
    programs: Path
    console: Console
    run: Run = subprocess.run
    start: Start = subprocess.Popen

    def deploy(self, arguments: Sequence[str], mini_kimi: Path) -> None:
        """Install what is committed on every host, and start Ray there.

        Args:
            arguments: Further arguments of ansible-playbook.
            mini_kimi: Folder of the embedded model, which every host gets.

        Raises:
            EnvironmentCheckError: The playbook failed.
        """
        token = make_token(self.root / TOKEN)
        model = ("-e", json.dumps({"cluster_mini_kimi": str(mini_kimi)}))
        self._play([*model, *arguments], {TOKEN_VARIABLE: token})

    def sync(self, arguments: Sequence[str], runs_dir: Path) -> int:
        """Run one job on the inference host, and copy its run directory here.

        Args:
            arguments: Further arguments of `rdt-e2e sync`.
            runs_dir: Local folder of run directories.

        Returns:
            Exit status of the job.

        Raises:
            EnvironmentCheckError: The host cannot be reached, or nothing is deployed there.
        """
        host = self._inference_host()
        before = set(self._run_names(host))
        # In a session of its own: Ctrl-C is for this program, which then ends the job.
        job = self.start(
            host.command(JOB, "sync", *arguments), stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return job.wait()
        except KeyboardInterrupt:
            self.console.info(f"ending the job on {host.name}")
            self.run(host.command("systemctl", "stop", "rdt-e2e-job.service"))
            job.wait()
            raise
        finally:
            for name in sorted(set(self._run_names(host)) - before):
                num_files = self._fetch(host, name, runs_dir / name)
                self.console.info(f"fetched {runs_dir / name} ({num_files} files)")

    def down(self, arguments: Sequence[str]) -> None:
        """Stop Ray on every host and remove units, settings and token; package and runs stay.

        Args:
            arguments: Further arguments of ansible-playbook.

        Raises:
            EnvironmentCheckError: The playbook failed.
        """
        self._play(["-e", "cluster_state=absent", *arguments], {})
        (self.root / TOKEN).unlink(missing_ok=True)

    def _play(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        command = [*self._ansible("ansible-playbook"), *arguments, str(self._folder / PLAYBOOK)]
        status = self.run(command, env={**self._environment(), **variables}).returncode
        if status != 0:
            raise EnvironmentCheckError(
                f"ansible/{PLAYBOOK} failed (status {status}); what is wrong on which host is in its "
                "lines above"
            )

    def _inference_host(self) -> Host:
        """The first inference host: vLLM's front end must be where its ranks are."""
        command = [
            *(*self._ansible("ansible"), "inference[0]", "--playbook-dir", str(self._folder)),
            *("-m", "ansible.builtin.debug", "-a", json.dumps({"msg": CONNECTION})),
        ]
        as_json = {"ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
        done = self.run(command, env={**self._environment(), **as_json}, capture_output=True)
        name, arrow, answer = done.stdout.decode(errors="replace").partition(" => ")
        if done.returncode != 0 or not arrow:
            reason = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise EnvironmentCheckError(f"{self.inventory} has no host `inference`: {reason}")
        said = json.loads(answer)["msg"]
        name = name.split()[0]
        if said["plugin"] == "local":
            return Host(name, ())
        if said["plugin"] not in ("ssh", "smart"):
            raise EnvironmentCheckError(
                f"{name} has ansible_connection={said['plugin']}, and a job is run over ssh; use ssh, or "
                f"run `{JOB} sync` on the host"
            )
        ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=30"]
        ssh += ["-p", str(said["port"])] if said["port"] else []
        ssh += ["-l", said["user"]] if said["user"] else []
        ssh += ["-i", said["key"]] if said["key"] else []
        return Host(name, (*ssh, *shlex.split(said["options"]), said["address"]))

    def _run_names(self, host: Host) -> list[str]:
        check = f"test -x {JOB} && ls -1 {RUNS_FOLDER}"
        listed = self.run(host.command("sh", "-c", check), capture_output=True)
        if listed.returncode != 0:
            reason = listed.stderr.decode(errors="replace").strip() or "nothing is deployed there"
            raise EnvironmentCheckError(
                f"no job can run on {host.name}: {reason}. It needs `make deploy TARGET=bare`, ssh "
                "without a question, and root or sudo without a password"
            )
        return listed.stdout.decode(errors="replace").split()

    def _fetch(self, host: Host, name: str, into: Path) -> int:
        command = host.command("tar", "-C", f"{RUNS_FOLDER}/{name}", "-cf", "-", ".")
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            if process.stdout is None:
                raise AssertionError("the output is a pipe")
            return unpack(process.stdout, into)

    def _ansible(self, program: str) -> list[str]:
        return [str(self.programs / program), "-i", str(self.inventory)]

    @property
    def _folder(self) -> Path:
        return self.root / "ansible"

    def _environment(self) -> dict[str, str]:
        # The variable is Ansible's own; a site may have one already.
        return {"ANSIBLE_CONFIG": str(self._folder / "ansible.cfg")} | os.environ


def bare_target(inventory: Path, console: Console) -> BareTarget:
    """The hosts of an inventory, with this repository's playbooks.

    Raises:
        EnvironmentCheckError: The program does not run from a clone, or the inventory or Ansible is
            missing.
    """
    root = Path(__file__).parents[2]
    if not (root / "ansible" / PLAYBOOK).is_file():
        raise EnvironmentCheckError(
            f"{root} has no ansible/{PLAYBOOK}; the bare target runs from a clone of the repository"
        )
    if not inventory.exists():
        raise EnvironmentCheckError(
            f"there is no inventory {inventory}; copy ansible/inventory/example.yml to it and put your "
            "hosts in, or name another: --inventory FILE (make: INVENTORY=FILE)"
        )
    return BareTarget(root, inventory.absolute(), find_ansible(root), console)


def find_ansible(root: Path) -> Path:
    """Folder of Ansible's programs: this repository's own where it is set up, else on PATH.

    Raises:
        EnvironmentCheckError: There is none.
    """
    own = root / ".venv-ansible/bin"
    if (own / "ansible-playbook").exists():
        return own
    found = shutil.which("ansible-playbook")
    if found is None:
        raise EnvironmentCheckError(
            "ansible-playbook is not here; `scripts/setup.sh ansible` installs it"
        )
    return Path(found).parent


def make_token(path: Path) -> str:
    """The cluster's token, made unless it is there; closed to all others on this machine."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
    return path.read_text()

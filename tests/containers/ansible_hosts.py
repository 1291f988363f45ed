"""Two containers that are hosts to Ansible: systemd, sshd and sudo, reached over ssh.

The base is made with debootstrap, so that no image registry is needed. Every name starts with
``rdt-e2e-ansible-``; what was started is removed by name.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.containers.base import podman_environment, restored_network

IMAGE = "localhost/rdt-e2e-ansible-host"
UBUNTU_KEYRING = Path(
    os.environ.get("UBUNTU_KEYRING", "/usr/share/keyrings/ubuntu-archive-keyring.gpg")
)
"""Keys of Ubuntu's archive; without them nothing of it is taken."""
PACKAGES = "python3,systemd,systemd-sysv,dbus,iproute2,udev,kmod,procps,openssh-server,sudo"
PROGRAMS = ("podman", "debootstrap", "iptables", "ssh", "ssh-keygen")
ANSIBLE = Path(__file__).parents[2] / "ansible"

DCB = """#!/bin/sh
# Test double of iproute2's dcb: keeps a port's PFC and DSCP mapping in files and prints them as dcb does.
set -eu
mkdir -p /fake/dcb
[ "$1" != -N ] || shift
file=/fake/dcb/$1-$4
case "$1 $2" in
  "pfc show") cat "$file" 2>/dev/null ||
    echo "prio-pfc 0:off 1:off 2:off 3:off 4:off 5:off 6:off 7:off" ;;
  "pfc set")
    shift 5
    line=prio-pfc
    for priority in 0 1 2 3 4 5 6 7; do
      word=off
      for pair in "$@"; do [ "$pair" != "$priority:on" ] || word=on; done
      line="$line $priority:$word"
    done
    echo "$line" >"$file" ;;
  "app show") echo "dscp-prio $(cat "$file" 2>/dev/null)" ;;
  "app add" | "app replace") echo "$6" >"$file" ;;
  "app del") rm "$file" ;;
  *) echo "not known to this double: $*" >&2; exit 2 ;;
esac
"""


@dataclass(frozen=True)
class System:
    """A distribution's release, as debootstrap makes it.

    Attributes:
        release: Its code name.
        options: Of debootstrap.
        source: What debootstrap is given after the folder: mirror and script, where its own do not do.
    """

    release: str
    options: tuple[str, ...] = ()
    source: tuple[str, ...] = ()

    @property
    def image(self) -> str:
        """Name of the image that is kept."""
        return f"{IMAGE}:{self.release}"


DEBIAN = System("bookworm")
UBUNTU = System(
    "noble",
    ("--components=main,universe", f"--keyring={UBUNTU_KEYRING}"),
    # All of Ubuntu's releases share a script, and the mirror is the one that it names; an older
    # debootstrap does not know this release's name.
    ("", "gutsy"),
)


def missing() -> str:
    """What this machine lacks for these tests, in words; empty when nothing is missing."""
    if os.geteuid() != 0:
        return "needs root"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if playbook_program() is None:
        lacking.append("ansible-playbook (make setup-ansible)")
    return f"needs {', '.join(lacking)}" if lacking else ""


def second_system(folder: Path) -> System:
    """What the second host runs: Ubuntu where its image is kept or can be made, else Debian as well.

    Args:
        folder: For podman's settings.
    """
    if UBUNTU_KEYRING.exists() or _has_image(UBUNTU, podman_environment(folder)):
        return UBUNTU
    return DEBIAN


def playbook_program() -> str | None:
    """`ansible-playbook` of this repository's environment for it, or on PATH."""
    own = ANSIBLE.parent / ".venv-ansible/bin/ansible-playbook"
    return str(own) if own.exists() else shutil.which("ansible-playbook")


def changed_tasks(output: str) -> dict[str, int]:
    """Host to its number of changed tasks, from the recap of ansible-playbook."""
    recap = re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", output, re.MULTILINE)
    return {host: int(count) for host, count in recap}


@dataclass
class Play:
    """One run of ansible-playbook.

    Attributes:
        changed: Host to its number of changed tasks.
    """

    returncode: int
    output: str
    changed: dict[str, int] = field(default_factory=dict)


@dataclass
class Hosts:
    """The two running containers.

    Attributes:
        addresses: Inventory name to address.
        containers: Inventory name to the container's name.
    """

    folder: Path
    addresses: dict[str, str]
    containers: dict[str, str]

    def run(self, host: str, script: str, stdin: bytes = b"") -> str:
        """Run a shell script in a host as root; its standard output."""
        command = ["podman", "exec", "-i", self.containers[host], "sh", "-euc", script]
        done = subprocess.run(command, input=stdin, capture_output=True, env=self._environment())
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def put_tree(self, host: str, tree: Path, place: str) -> None:
        """Replace a folder of a host by a copy of a local one."""
        packed = subprocess.run(["tar", "-C", tree, "-c", "."], capture_output=True, check=True)
        self.run(host, f"rm -rf {place}; mkdir -p {place}; tar -x -C {place}", packed.stdout)

    def state(self, host: str, *folders: str) -> dict[str, str]:
        """Digest of every file below some folders of a host."""
        listed = self.run(host, f"find {' '.join(folders)} -type f -exec sha256sum {{}} +")
        lines = (line.split(maxsplit=1) for line in listed.splitlines())
        return {path: digest for digest, path in lines}

    def play(
        self,
        playbook: str,
        *arguments: str,
        variables: Mapping[str, object] | None = None,
        hosts: Mapping[str, Mapping[str, object]] | None = None,
        as_json: bool = False,
    ) -> Play:
        """Run a playbook on the hosts, or on made-up hosts that are names for the trainer's container.

        Args:
            playbook: File below `ansible/`.
            arguments: Further arguments of ansible-playbook.
            variables: Extra variables.
            hosts: Made-up host to its variables.
            as_json: Have the whole result as JSON in `output`.
        """
        inventory = self.write_inventory(hosts)
        command = [str(playbook_program()), "-i", str(inventory), str(ANSIBLE / playbook)]
        command += ["-e", json.dumps(dict(variables or {})), *arguments]
        environment = self._environment() | {"ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg")}
        if as_json:
            environment["ANSIBLE_STDOUT_CALLBACK"] = "ansible.posix.json"
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
        output = done.stdout if as_json else done.stdout + done.stderr
        return Play(done.returncode, output, changed_tasks(done.stdout))

    def write_inventory(self, made_up: Mapping[str, Mapping[str, object]] | None = None) -> Path:
        """Write the inventory of the hosts, or of made-up ones; its path."""
        path = self.folder / "hosts.yml"
        path.write_text(yaml.safe_dump(self._inventory(made_up)))
        return path

    def _inventory(self, made_up: Mapping[str, Mapping[str, object]] | None) -> dict[str, object]:
        trainer, inference = [
            {name: dict[str, object](ansible_host=address, node_ip=address)}
            for name, address in self.addresses.items()
        ]
        if made_up is not None:
            place = self.addresses["trainer-0"]
            trainer = {name: {"ansible_host": place, **values} for name, values in made_up.items()}
            inference = {}
        options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        connection = {
            "ansible_user": "admin",
            "ansible_ssh_private_key_file": str(self.folder / "key"),
            "ansible_ssh_common_args": options,
        }
        groups = {"trainer": {"hosts": trainer}, "inference": {"hosts": inference}}
        return {"all": {"children": {"rdma": {"children": groups, "vars": connection}}}}

    def _environment(self) -> dict[str, str]:
        return os.environ | {"CONTAINERS_CONF": str(self.folder / "containers.conf")}


@contextlib.contextmanager
def running_hosts(folder: Path, *options: str, inference: System = DEBIAN) -> Iterator[Hosts]:
    """Start two containers on a network of their own; remove both and the network afterwards.

    Args:
        folder: For the key, the inventory and podman's settings.
        options: Further options of `podman run`.
        inference: What the inference host runs; the trainer's runs Debian.
    """
    environment = podman_environment(folder)

    def podman(*arguments: str) -> str:
        done = subprocess.run(
            ["podman", *arguments], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr}"
        return done.stdout.strip()

    key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")]
    subprocess.run(key, check=True)
    systems = {"trainer-0": DEBIAN, "inference-0": inference}
    for system in systems.values():
        if not _has_image(system, environment):
            _build_image(system, environment)
    mark = f"rdt-e2e-ansible-{os.getpid()}"
    containers = {"trainer-0": f"{mark}-trainer", "inference-0": f"{mark}-inference"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(restored_network(environment))
        podman("network", "create", mark)
        stack.callback(podman, "network", "rm", "-f", mark)
        for host, name in containers.items():
            # One that was made and does not start is there all the same.
            stack.callback(podman, "rm", "-f", "--ignore", "-t", "1", name)
            podman(
                *("run", "-d", "--name", name, "--hostname", host, "--network", mark),
                *("--systemd=always", *options, systems[host].image, "/sbin/init"),
            )
        address = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        found = {host: podman("inspect", "-f", address, name) for host, name in containers.items()}
        hosts = Hosts(folder, found, containers)
        for host in containers:
            _admit(hosts, host)
        yield hosts


def _has_image(system: System, environment: Mapping[str, str]) -> bool:
    asked = subprocess.run(["podman", "image", "exists", system.image], env=environment)
    return asked.returncode == 0


def _build_image(system: System, environment: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="rdt-e2e-ansible-") as folder:
        root = Path(folder, "root")
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", *system.options]
        command += [system.release, str(root), *system.source]
        subprocess.run(command, check=True, capture_output=True, timeout=900)
        with subprocess.Popen(
            ["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE
        ) as packed:
            imported = ["podman", "import", "-", system.image]
            subprocess.run(
                imported, stdin=packed.stdout, check=True, capture_output=True, env=environment
            )


def _admit(hosts: Hosts, host: str) -> None:
    """Give a host an administrator who may log in with the key and use sudo, and the dcb double."""
    script = """
    useradd -m -s /bin/bash admin
    echo 'admin ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/admin
    mkdir ~admin/.ssh
    cat >~admin/.ssh/authorized_keys
    chown -R admin ~admin/.ssh
    # Until then sshd may refuse logins: the container is still starting.
    systemctl is-system-running --wait >/dev/null || true
    """
    hosts.run(host, script, (hosts.folder / "key.pub").read_bytes())
    hosts.run(host, "cat >/usr/local/bin/dcb; chmod 755 /usr/local/bin/dcb", DCB.encode())

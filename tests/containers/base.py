"""Containers without a registry or a Docker daemon: podman's settings, a base image, ours on top of it.

The base is made with debootstrap from the Debian mirror of this machine, and the build sees pip's
settings of this machine: its index, its CA bundle and the local folders of wheels it names.
"""

import configparser
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rdt_e2e import __version__

ROOT = Path(__file__).parents[2]
BASE_IMAGE = "localhost/rdt-e2e-base:bookworm"
PROGRAMS = ("podman", "buildah", "debootstrap", "iptables", "nsenter")
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
CA_BUNDLE = "/run/build-ca.crt"
"""Where a build sees this machine's CA bundle; over the system's own file it would break its package."""


def missing() -> str:
    """What this machine lacks for these tests, in words; empty when nothing is missing."""
    if os.geteuid() != 0:
        return "needs root"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(lacking)}" if lacking else ""


def podman_environment(folder: Path) -> dict[str, str]:
    """This process's environment, with podman settings that work on this machine.

    Args:
        folder: Where the settings are written.
    """
    lines = ["[engine]", 'events_logger = "file"', 'cgroup_manager = "cgroupfs"']
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists() and shutil.which("runc"):
        # crun fails on hosts that have both cgroup versions.
        lines.append('runtime = "runc"')
    # podman's own limits fail where the capability to raise them is missing.
    lines += ["[containers]", 'default_ulimits = ["nofile=16384:16384", "nproc=16384:16384"]']
    # The older backend needs plug-ins that Debian packs apart from podman.
    lines += ["[network]", 'network_backend = "netavark"']
    path = folder / "containers.conf"
    path.write_text("\n".join(lines) + "\n")
    return os.environ | {"CONTAINERS_CONF": str(path)}


def image_name(target: str) -> str:
    """Name of this release's image, as the compose file has it."""
    return f"localhost/rdt-e2e:{__version__}-{target}"


def build_image(target: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Build the image of a target from the Dockerfile; what has not changed comes from the layers kept.

    Args:
        target: `cpu` or `cuda`.
        folder: For what the build needs; the log is left there as `build-<target>.log`.
        environment: Of podman and buildah.
    """
    _ensure_base(folder, environment)
    before = _image_id(target, environment)
    # Debian's buildah has no runtime of its own for a machine with both cgroup versions: chroot needs none.
    command = ["buildah", "bud", "--isolation", "chroot", "--layers", "--force-rm"]
    command += ["--format", "docker"]
    command += ["--pull-never", "--build-arg", f"BASE_IMAGE={BASE_IMAGE}", "--target", target]
    command += [*_pip_mounts(folder), "-t", image_name(target), str(ROOT)]
    log = folder / f"build-{target}.log"
    with log.open("wb") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=3000
        )
    assert done.returncode == 0, f"the build failed; the end of {log}:\n{log.read_text()[-4000:]}"
    # Without its name the image before this one would stay for ever; layers in use are kept.
    if before and before != _image_id(target, environment):
        subprocess.run(["podman", "rmi", before], capture_output=True, env=environment)


def _image_id(target: str, environment: Mapping[str, str]) -> str:
    listed = subprocess.run(
        ["podman", "images", "--quiet", "--no-trunc", image_name(target)],
        capture_output=True,
        text=True,
        env=environment,
    )
    return listed.stdout.strip()


@contextlib.contextmanager
def restored_network(environment: Mapping[str, str]) -> Iterator[None]:
    """Put back what podman's network leaves behind: forwarding, and chains when no container needs them."""
    forwarding = FORWARDING.read_text()
    try:
        yield
    finally:
        others = subprocess.run(
            ["podman", "ps", "-q"], capture_output=True, check=True, env=environment
        )
        if not others.stdout.strip():
            _remove_chains()
            FORWARDING.write_text(forwarding)


def _remove_chains() -> None:
    for table in ("filter", "nat"):
        listed = _iptables(table, "-S").splitlines()
        chains = [line.split()[1] for line in listed if line.startswith("-N NETAVARK")]
        for line in listed:
            # Comments hold blanks, and are quoted.
            words = shlex.split(line)
            if words[0] == "-A" and any(chain in words[2:] for chain in chains):
                _iptables(table, "-D", *words[1:])
        for option in ("-F", "-X"):
            for chain in chains:
                _iptables(table, option, chain)


def _iptables(table: str, *arguments: str) -> str:
    done = subprocess.run(
        ["iptables", "-w", "10", "-t", table, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, f"iptables {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def _ensure_base(folder: Path, environment: Mapping[str, str]) -> None:
    held = subprocess.run(["podman", "image", "exists", BASE_IMAGE], env=environment)
    if held.returncode == 0:
        return
    root = folder / "base"
    subprocess.run(
        ["debootstrap", "--variant=minbase", "bookworm", str(root)],
        check=True,
        capture_output=True,
        timeout=900,
    )
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as packed:
        subprocess.run(
            ["podman", "import", "-", BASE_IMAGE],
            stdin=packed.stdout,
            check=True,
            capture_output=True,
            env=environment,
        )
    shutil.rmtree(root)


def _pip_mounts(folder: Path) -> list[str]:
    """Options that give a build this machine's pip settings, as /etc/pip.conf."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    held: dict[str, str] = {}
    # Later lines win, and the environment's come first.
    for line in reversed(listed.stdout.splitlines()):
        key, _, value = line.partition("=")
        held[key.rpartition(".")[2]] = value.strip("'\"")
    settings = configparser.RawConfigParser()
    settings["global"] = {
        key: held[key]
        for key in ("index-url", "extra-index-url", "find-links", "trusted-host", "default-timeout")
        if key in held
    }
    mounts = []
    if Path(held.get("cert", "")).is_file():
        settings["global"]["cert"] = CA_BUNDLE
        mounts.append(f"{Path(held['cert']).resolve()}:{CA_BUNDLE}:ro")
    for place in " ".join(held.get(key, "") for key in ("find-links", "extra-index-url")).split():
        path = Path(place.removeprefix("file://"))
        # An index on disk links to its files beside it.
        path = path.parent if path.name == "simple" else path
        if path.is_dir():
            mounts.append(f"{path}:{path}:ro")
    with (folder / "pip.conf").open("w") as written:
        settings.write(written)
    mounts.append(f"{folder / 'pip.conf'}:/etc/pip.conf:ro")
    return [word for mount in mounts for word in ("-v", mount)]

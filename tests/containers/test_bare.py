"""`make deploy|sync|down TARGET=bare` on two containers: the lock file, Ray and the sync are the real ones.

Each container installs the lock file by itself, from the package caches of this machine, which it sees
read-only.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rdt_e2e.cluster.bare import TOKEN
from tests.containers import ansible_hosts

# Two installations of the lock file and two vLLM engines, on a few cores.
pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".venv/bin/rdt-e2e"
UNIT = "rdt-e2e-ray.service"

SEED = """
mkdir /var/tmp/uv
for part in /mnt/uv/*; do
  case $part in
    # The packages' files are only read; this project's own package is built beside them.
    */archive-v*) cp -rs "$part" /var/tmp/uv/ ;;
    # What is beside them holds locks, and is small.
    *) cp -r "$part" /var/tmp/uv/ ;;
  esac
done
chmod -R a+rwX /var/tmp/uv
"""


def pip_setting(name):
    """One of pip's settings on this machine; empty when it has none."""
    command = [sys.executable, "-m", "pip", "config", "get"]
    for key in (f":env:.{name}", f"global.{name}"):
        done = subprocess.run([*command, key], capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def package_sources():
    """Mounts that give a host this machine's package caches, and the settings that point there."""
    uv = subprocess.run(
        [ROOT / ".venv/bin/uv", "cache", "dir"], capture_output=True, text=True, check=True
    )
    mounts = [f"{uv.stdout.strip()}:/mnt/uv:ro"]
    settings = {"UV_CACHE_DIR": "/var/tmp/uv", "UV_LINK_MODE": "copy"}
    if index := pip_setting("index-url"):
        settings["PIP_INDEX_URL"] = index
    if cert := pip_setting("cert"):
        mounts.append(f"{cert}:/mnt/ca.crt:ro")
        settings |= {"PIP_CERT": "/mnt/ca.crt", "SSL_CERT_FILE": "/mnt/ca.crt"}
    folders = [folder for folder in pip_setting("find-links").split() if os.path.isdir(folder)]
    mounts += [f"{folder}:/mnt/wheels-{number}:ro" for number, folder in enumerate(folders)]
    if folders:
        settings["PIP_FIND_LINKS"] = " ".join(f"/mnt/wheels-{n}" for n in range(len(folders)))
    return mounts, settings


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The hosts, with an inventory and the variables of hosts without GPU and RDMA."""
    reason = ansible_hosts.missing()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("bare")
    mounts, settings = package_sources()
    options = ["--shm-size=1g", *(f"--volume={mount}" for mount in mounts)]
    with ansible_hosts.running_hosts(folder, *options) as hosts:
        for host in hosts.containers:
            hosts.run(host, SEED)
        variables = {
            "rdma_required": False,
            "cluster_lock": "cpu",
            "cluster_num_gpus": 2,
            "cluster_num_cpus": 8,
            "cluster_object_store_bytes": 256 << 20,
            # A container may not raise its limits.
            "cluster_open_files": 16384,
            "cluster_pip_environment": settings,
            # The cores are busy.
            "cluster_start_timeout_s": 300,
        }
        (folder / "site.json").write_text(json.dumps(variables))
        hosts.write_inventory()
        try:
            yield hosts
        finally:
            # The containers go as they are; the token is here.
            (ROOT / TOKEN).unlink(missing_ok=True)


def environment():
    """This process's, without what a `make` around it would hand to those below."""
    return {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFL"))}


def make(site, verb, arguments):
    inventory = site.folder / "hosts.yml"
    command = ["make", verb, "TARGET=bare", f"INVENTORY={inventory}", f"ARGS={arguments}"]
    # A group of its own, so that nothing below make outlives a test that is ended.
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=900)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    assert process.returncode == 0, output
    return output


def sync_command(site, *arguments):
    return [PROGRAM, "bare", "sync", "-i", site.folder / "hosts.yml", *arguments]


@pytest.fixture(scope="module")
def deployed(site):
    output = make(site, "deploy", f"-e @{site.folder}/site.json")
    token = (ROOT / TOKEN).read_text()
    assert token not in output
    return site


def test_preview_touches_nothing(site):
    output = make(site, "deploy", f"--check --diff -e @{site.folder}/site.json")
    changed = ansible_hosts.changed_tasks(output)
    assert changed.keys() == site.containers.keys()
    assert all(count > 0 for count in changed.values())
    for host in site.containers:
        site.run(host, "test ! -e /opt/rdt-e2e && test ! -e /etc/rdt-e2e")


def test_second_deploy_changes_nothing(deployed):
    output = make(deployed, "deploy", f"-e @{deployed.folder}/site.json")
    assert ansible_hosts.changed_tasks(output) == {"trainer-0": 0, "inference-0": 0}, output
    settings = {deployed.run(host, "cat /etc/rdt-e2e/ray.env") for host in deployed.containers}
    assert len(settings) == 1


def test_sync_across_the_hosts_comes_home(deployed, tmp_path):
    output = make(deployed, "sync", f"--iters 1 --runs {tmp_path}")
    assert "verdict   PASS" in output
    (folder,) = tmp_path.iterdir()
    told = json.loads((folder / "run.json").read_text())
    assert told["verdict"] == "PASS"
    assert told["nodes"] == {
        "trainer": deployed.addresses["trainer-0"],
        "inference": deployed.addresses["inference-0"],
    }
    assert {"summary.txt", "profile.txt", "report.html"} <= {one.name for one in folder.iterdir()}


def test_status_of_the_job_is_passed_on(deployed):
    command = sync_command(deployed, "--config", "no-such-profile")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "no-such-profile" in done.stderr


def test_interrupt_ends_the_job_and_brings_its_folder(deployed, tmp_path):
    command = sync_command(deployed, "--config", "local", "--runs", tmp_path)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        try:
            for line in job.stdout:
                if line.startswith("[2/"):
                    break
            job.send_signal(signal.SIGINT)
            job.communicate(timeout=180)
        finally:
            job.kill()
    assert job.returncode == 130
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text())["error"] == "interrupted"
    state = "systemctl is-active rdt-e2e-job.service || true"
    assert deployed.run("inference-0", state) == "inactive\n"


# Last in this file: it takes the deployment away.
def test_down_leaves_no_process_and_no_secret(deployed):
    make(deployed, "down", f"-e @{deployed.folder}/site.json")
    for host in deployed.containers:
        assert deployed.run(host, "ps -u rdt-e2e -o pid= || true") == ""
        assert deployed.run(host, "systemctl list-units --failed --no-legend 'rdt-e2e-*'") == ""
        left = f"/etc/rdt-e2e/ray-token /etc/rdt-e2e/ray.env /etc/systemd/system/{UNIT}"
        deployed.run(host, f"for one in {left}; do test ! -e $one; done")
    assert not (ROOT / TOKEN).exists()
    done = subprocess.run(
        sync_command(deployed), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "make deploy TARGET=bare" in done.stderr

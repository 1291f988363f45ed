"""The playbooks, run for real against two containers: preview, first run, second run, rollback, tags.

The containers have made-up ``/sys`` and ``/proc`` trees below /fake, since a container must not set the
values of the machine that it runs on.
"""

import json

import pytest
import yaml

from tests import fake_fabric
from tests.ansible_modules import ANSIBLE, load
from tests.containers import ansible_hosts

# Six plays over ssh on two hosts, one of which installs packages.
pytestmark = pytest.mark.timeout(1800)

FABRIC = {
    "kernel_root": "/fake/",
    "nvidia_stack": "skip",
    "rdma_modules": ["ib_uverbs"],
    "memlock_services": ["containerd", "systemd-logind"],
}
"""Made-up trees, no GPU driver, and fewer repetitions of the same step."""

TAGS = [
    role["role"]
    for play in yaml.safe_load((ANSIBLE / "rdma.yml").read_text())
    for role in play["roles"]
    if role.get("tags") not in (["always"], None)
]

RAY = """#!/bin/sh
# Test double of `ray start --block`: writes down how it was started, listens if it is the head, and waits.
{ echo "$@"; env; echo "user=$(id -un)"; } >/var/lib/rdt-e2e/ray/started
case "$*" in *--head*)
  exec python3 -c 'import socket
listener = socket.create_server(("", 6379))
while True:
    listener.accept()[0].close()' ;;
esac
exec sleep infinity
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    reason = ansible_hosts.missing()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    other = ansible_hosts.second_system(folder)
    with ansible_hosts.running_hosts(folder, inference=other) as running:
        yield running


@pytest.fixture
def fresh(hosts, tmp_path):
    """The hosts, with two rails, a BlueField port and two GPUs to be found."""
    nics = [*fake_fabric.rails(2), fake_fabric.bluefield(8)]
    tree = fake_fabric.build(tmp_path / "tree", nics, num_gpus=2)
    for host in hosts.containers:
        hosts.put_tree(host, tree, "/fake")
    return hosts


def run(hosts, playbook, *arguments, **variables):
    """Run a playbook that must succeed; its changed tasks by host."""
    play = hosts.play(playbook, *arguments, variables=FABRIC | variables)
    assert play.returncode == 0, play.output
    return play.changed


def value(hosts, path):
    return hosts.run("trainer-0", f"cat /fake/{path}").strip()


def test_preview_then_two_runs_then_rollback(fresh):
    watched = ("/fake", "/etc/systemd", "/etc/sysctl.d", "/etc/security", "/etc/modules-load.d")
    before = fresh.state("trainer-0", *watched)

    previewed = run(fresh, "rdma.yml", "--check", "--diff", allow_link_reset=True)
    assert all(count > 0 for count in previewed.values())
    assert fresh.state("trainer-0", *watched) == before

    assert run(fresh, "rdma.yml", allow_link_reset=True).keys() == fresh.containers.keys()
    assert value(fresh, "sys/class/net/ens0np0/mtu") == "9000"
    assert value(fresh, "sys/class/net/ens8f0np0/mtu") == "1500"
    assert value(fresh, "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor") == "performance"
    assert value(fresh, "proc/sys/net/ipv4/conf/all/rp_filter") == "2"
    assert value(fresh, "sys/kernel/config/rdma_cm/mlx5_1/ports/1/default_roce_mode") == "RoCE v2"
    assert "3:on" in value(fresh, "dcb/pfc-ens1np0")
    assert fresh.run("trainer-0", "command -v ibv_devinfo ib_write_bw rdma")

    assert set(run(fresh, "rdma.yml", allow_link_reset=True).values()) == {0}

    run(fresh, "rollback.yml")
    after = fresh.state("trainer-0", *watched)
    # Packages stay, and bring files of their own.
    ours = {path for path in after if "rdt-e2e" in path}
    assert not ours
    assert {path: after.get(path) for path in before} == before
    assert set(run(fresh, "rollback.yml").values()) == {0}


def test_nothing_touches_a_link_unless_asked(fresh):
    play = fresh.play("rdma.yml", "--tags", "mtu,lossless", variables=FABRIC)
    assert play.returncode == 0, play.output
    assert value(fresh, "sys/class/net/ens0np0/mtu") == "1500"
    assert "MTU 9000 on ens0np0, ens1np0; set allow_link_reset" in play.output
    assert "PFC and DSCP trust on ens0np0, ens1np0; set allow_link_reset" in play.output


def test_a_switch_may_be_given_as_text(fresh):
    # -e name=value passes text, which a condition must not take for true or refuse.
    play = fresh.play(
        "rdma.yml",
        "--tags",
        "mtu",
        "-e",
        "allow_link_reset=no",
        "-e",
        "fabric_mtu=4200",
        variables=FABRIC,
    )
    assert play.returncode == 0, play.output
    assert value(fresh, "sys/class/net/ens0np0/mtu") == "1500"


@pytest.mark.parametrize("tag", TAGS)
def test_each_tag_alone(fresh, tag):
    # What it gives and that it is done only once is for the test of all of them; here, that no role
    # waits for another one.
    run(fresh, "rdma.yml", "--limit", "trainer-0", "--tags", tag, allow_link_reset=True)


def test_pcie_read_request_is_set_and_put_back(fresh):
    pcie = load("library/pcie_controls.py")
    config = "sys/bus/pci/devices/0000:18:00.0/config"

    def read_request():
        data = bytes.fromhex(fresh.run("trainer-0", f"od -An -v -tx1 /fake/{config}"))
        offset = pcie.register_offset(data)
        register = int.from_bytes(data[offset : offset + 2], "little")
        return pcie.describe(register)["max_read_request"]

    limit = ("--limit", "trainer-0", "--tags", "pcie_tuning")
    run(fresh, "rdma.yml", *limit, pcie_max_read_request=4096)
    assert read_request() == 4096
    run(fresh, "rollback.yml", *limit)
    assert read_request() == 512


def test_matrix_of_fabrics(hosts, tmp_path):
    made_up = {}
    for number, (case, nics) in enumerate(fake_fabric.CASES.items()):
        tree = fake_fabric.build(tmp_path / str(number), nics())
        hosts.put_tree("trainer-0", tree, f"/fabrics/{number}")
        made_up[case.replace(" ", "-").replace(",", "")] = {"kernel_root": f"/fabrics/{number}/"}
    play = hosts.play("rdma.yml", "--tags", "ports_found", hosts=made_up, as_json=True)
    answer = json.loads(play.output)
    tasks = {
        task["task"]["name"]: task["hosts"] for part in answer["plays"] for task in part["tasks"]
    }
    found = tasks["ports_found : Find the RDMA ports that can be rails"]
    refused = tasks["ports_found : Stop where there is no RDMA"]
    ports = load("library/rdma_ports.py")
    for number, host in enumerate(made_up):
        expected = ports.report(tmp_path / str(number))
        assert found[host]["summary"] == expected["summary"]
        assert refused[host].get("failed", False) == (expected["transport"] == "none")
    assert play.returncode != 0
    said = refused["no-rdma"]["msg"]
    assert said.startswith("no-rdma has no usable RDMA port (no RDMA device at all).")
    assert "rdma_required=false" in said
    assert "\n" not in said


def test_a_host_without_rdma_is_set_up_when_that_is_allowed(hosts, tmp_path):
    hosts.put_tree("trainer-0", fake_fabric.build(tmp_path / "tree", []), "/fake")
    changed = run(hosts, "rdma.yml", "--limit", "trainer-0", rdma_required=False)
    assert changed["trainer-0"] > 0
    run(hosts, "rollback.yml", "--limit", "trainer-0")


def test_verify_says_what_is_skipped_and_why(hosts, tmp_path):
    tree = fake_fabric.build(tmp_path / "tree", [])
    for host in hosts.containers:
        hosts.put_tree(host, tree, "/fake")
        hosts.run(host, "rm -rf /opt/rdt-e2e")
    assert set(run(hosts, "verify.yml", verify_report_dir=str(tmp_path / "report")).values()) == {0}
    (report,) = (tmp_path / "report").glob("*/report.json")
    told = json.loads(report.read_text())
    assert told["rails"] == []
    assert told["failures"] == []
    reasons = " ".join(told["skipped"])
    assert "no rail on trainer-0 (no RDMA device)" in reasons
    assert "NIXL read: no package in /opt/rdt-e2e" in reasons
    assert "no rail was measured" in report.with_name("report.txt").read_text()


def test_verify_fails_on_a_rail_that_cannot_be_measured(fresh, tmp_path):
    # The rails are made up, so that perftest finds none of them.
    run(fresh, "rdma.yml", "--tags", "rdma_packages")
    play = fresh.play(
        "verify.yml",
        variables=FABRIC | {"verify_report_dir": str(tmp_path), "verify_duration_s": 1},
    )
    assert play.returncode != 0
    (report,) = tmp_path.glob("*/report.json")
    failures = json.loads(report.read_text())["failures"]
    assert len(failures) == 4
    assert failures[0].startswith(
        "rail 0 write from host memory between trainer-0/mlx5_0 and inference-0/mlx5_0 failed:"
    )


def test_cluster_units(fresh):
    place = "/opt/rdt-e2e/source/.venv/bin"
    for host in fresh.containers:
        script = f"mkdir -p {place}; cat >{place}/ray; chmod 755 {place}/ray"
        fresh.run(host, script, RAY.encode())
    token = "0123456789abcdef" * 4
    variables = {
        "cluster_install": False,
        "cluster_num_gpus": 2,
        "cluster_ray_token": token,
        # A container may not raise its limits.
        "cluster_open_files": 4096,
    }
    skip = ("--skip-tags", "ray_joined")
    run(fresh, "cluster.yml", "--check", "--diff", *skip, **variables)
    output = fresh.play("cluster.yml", *skip, variables=FABRIC | variables).output
    assert token not in output
    assert set(run(fresh, "cluster.yml", *skip, **variables).values()) == {0}

    assert fresh.run("trainer-0", "stat -c '%a %U' /etc/rdt-e2e/ray-token") == "600 rdt-e2e\n"
    for host, role in (("trainer-0", "--head"), ("inference-0", "--address=")):
        assert fresh.run(host, "systemctl is-active rdt-e2e-ray.service") == "active\n"
        started = fresh.run(host, "cat /var/lib/rdt-e2e/ray/started")
        assert role in started.splitlines()[0]
        assert f'--resources={{"{host.split("-")[0]}": 1}}' in started.splitlines()[0]
        assert f"--node-ip-address={fresh.addresses[host]}" in started
        assert "UCX_MODULES=^efa" in started
        assert "NCCL_IB_HCA==mlx5_0,mlx5_1" in started
        assert "user=rdt-e2e" in started
    limit = fresh.run("trainer-0", "systemctl show --value -p LimitMEMLOCK rdt-e2e-ray.service")
    assert limit == "infinity\n"

    run(fresh, "cluster.yml", cluster_state="absent")
    for path in ("/etc/rdt-e2e/ray-token", "/etc/systemd/system/rdt-e2e-ray.service"):
        fresh.run("inference-0", f"test ! -e {path}")


def test_cluster_without_a_token_says_how_to_make_one(fresh):
    play = fresh.play("cluster.yml", variables=FABRIC | {"cluster_install": False})
    assert play.returncode != 0
    assert "ansible-vault create" in play.output

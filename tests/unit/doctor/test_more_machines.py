"""Whole machines: what is skipped where, and what a sound one of each kind says."""

import pytest

from rdt_e2e.config import load_config
from rdt_e2e.doctor import registry, run
from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Status
from rdt_e2e.doctor.host import CommandResult
from tests import machines
from tests.doctor_cases import K2


def findings(machine, profile="kimi-k2", **options):
    config = load_config(profile, K2 if profile == "kimi-k2" else {})
    context = Context(machine, config, **options)
    chosen = registry.select((), at_build=context.at_build)
    return {check.id: run.ask(check, context) for _, checks in chosen for check in checks}


def bad(found):
    return {
        check_id: finding.found
        for check_id, finding in found.items()
        if finding.status in (Status.WARN, Status.FAIL)
    }


@pytest.mark.parametrize("build", [machines.roce_node, machines.infiniband_vm])
def test_a_sound_gpu_node_lacks_only_the_model(build, tmp_path):
    assert list(bad(findings(build(tmp_path)))) == ["model.complete"]


def test_a_sound_cpu_node(tmp_path):
    found = findings(machines.cpu_node(tmp_path), "local")
    assert not bad(found)
    assert found["rdma.devices"].status is Status.SKIPPED
    assert found["nixl.agent"].status is Status.PASS


def test_a_cpu_node_for_k2_lacks_gpus_and_rdma(tmp_path):
    found = bad(findings(machines.cpu_node(tmp_path)))
    assert {"gpu.present", "rdma.devices", "vllm.build", "model.complete"} <= set(found)


def test_efa_goes_through_libfabric(tmp_path):
    machine = machines.efa_node(tmp_path)
    machine.environ["RAY_rdt_fetch_fail_timeout_milliseconds"] = "600000"
    found = findings(machine)
    assert list(bad(found)) == ["model.complete"]
    assert found["nixl.lanes"].status is Status.SKIPPED
    assert found["rdma.fabric"].status is Status.SKIPPED


def test_without_an_agent_only_that_is_said(tmp_path):
    machine = machines.roce_node(tmp_path)
    machine.probe = {"error": "no UCX plugin"}
    found = findings(machine)
    assert list(bad(found)) == ["nixl.agent", "model.complete"]
    assert "nixl.agent" in found["gpu.register"].found


def test_a_probe_that_dies_is_a_finding(tmp_path, monkeypatch):
    machine = machines.roce_node(tmp_path)
    config = load_config("kimi-k2", K2)
    late = CommandResult(None, stderr="no answer within 14 s")
    monkeypatch.setattr(machine, "run", lambda *_, **__: late)
    finding = registry.find("nixl.agent").run(Context(machine, config))
    assert (finding.status, finding.found) == (Status.FAIL, "no answer within 14 s")


def test_a_check_that_fails_itself_is_a_finding(tmp_path):
    machine = machines.roce_node(tmp_path)
    machine.write("proc/self/status", "CapEff:\tnot a number")
    finding = findings(machine)["node.memlock"]
    assert finding.status is Status.FAIL
    assert "the check itself failed: ValueError" in finding.found


def test_one_cluster_per_address_is_not_a_collision(tmp_path):
    machine = machines.roce_node(tmp_path)
    machine.add_raylet(41, "127.0.0.2", {})
    machine.add_raylet(42, "127.0.0.2", {})
    path = tmp_path / "proc/42/cmdline"
    path.write_text(path.read_text().replace("10.0.0.1:6379", "127.0.0.2:7000"))
    assert findings(machine)["node.one-raylet"].status is Status.PASS


def test_a_raylet_of_another_user_is_not_judged(tmp_path):
    machine = machines.roce_node(tmp_path)
    machine.add_raylet(41, "10.0.0.1", {})
    machine.remove("proc/41/environ")
    finding = findings(machine)["ray.raylet-environment"]
    assert finding.status is Status.SKIPPED
    assert "another user" in finding.found


def test_the_hub_cache_is_searched_by_ref(tmp_path):
    machine = machines.roce_node(tmp_path)
    repository = tmp_path / "hf/hub/models--moonshotai--Kimi-K2-Instruct"
    machine.environ["HF_HOME"] = str(tmp_path / "hf")
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    finding = findings(machine)["model.complete"]
    assert str(repository / "snapshots/abc") in finding.found


def test_the_pair_is_not_measured_without_being_asked(tmp_path):
    config = load_config("kimi-k2", K2)
    context = Context(machines.roce_node(tmp_path), config)
    found = registry.find("pair.read-cuda").run(context)
    assert (found.status, found.found) == (Status.SKIPPED, "was not measured; add --pair")


def test_build_checks_need_no_device(tmp_path):
    machine = machines.cpu_node(tmp_path)
    (tmp_path / "proc/meminfo").unlink()
    found = findings(machine, "local", at_build=True)
    assert {finding.status for finding in found.values()} == {Status.PASS}
    groups = {check_id.partition(".")[0] for check_id in found}
    assert groups == {"image", "nixl", "ray", "vllm"}

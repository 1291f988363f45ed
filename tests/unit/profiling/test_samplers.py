"""Samples of a node, on a made-up sysfs tree and on this machine."""

from rdt_e2e.profiling.samplers import (
    boot_id,
    counter_difference,
    read_gpus,
    read_nic_counters,
    sample_node,
    sample_process,
)

PORT = "sys/class/infiniband/mlx5_0/ports/1"


def tree(root, data=10, errors="3"):
    for folder, name, text in (
        ("counters", "port_rcv_data", str(data)),
        ("counters", "link_downed", "0"),
        ("hw_counters", "rnr_nak_retry_err", errors),
        ("hw_counters", "lifespan", "not a number"),
    ):
        path = root / PORT / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{text}\n")
    (root / PORT / "rate").write_text("400 Gb/sec (4X NDR)\n")
    return root


def test_counters_of_both_folders_and_data_in_bytes(tmp_path):
    assert read_nic_counters(tree(tmp_path)) == {
        "mlx5_0:1:port_rcv_data": 40,
        "mlx5_0:1:link_downed": 0,
        "mlx5_0:1:rnr_nak_retry_err": 3,
    }


def test_what_moved(tmp_path):
    before = read_nic_counters(tree(tmp_path))
    after = read_nic_counters(tree(tmp_path, data=25, errors="1"))
    # A counter that went back was reset in between: its difference means nothing.
    assert counter_difference(before, after) == {"mlx5_0:1:port_rcv_data": 60}
    assert counter_difference({}, after) == {}


def test_a_machine_without_rdma_has_no_counters(tmp_path):
    assert read_nic_counters(tmp_path) == {}
    assert boot_id(tmp_path) == ""


def test_a_sample_holds_counters_rates_and_memory(tmp_path):
    sample = sample_node(tree(tmp_path))
    assert sample["nic_rates_gbps"] == {"mlx5_0:1": 400.0}
    assert sample["nics"]["mlx5_0:1:port_rcv_data"] == 40
    assert 0 < sample["memory_used_bytes"] < sample["memory_total_bytes"]


def test_gpus_come_from_the_drivers_own_tool(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-1, NVIDIA H200, 1024, 143771, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (gpu,) = read_gpus()
    assert (gpu["name"], gpu["memory_used_bytes"], gpu["busy_percent"]) == (
        "NVIDIA H200",
        1 << 30,
        None,
    )
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert read_gpus() == []
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert read_gpus() == []


def test_a_process_says_what_it_holds():
    assert sample_process("cpu")["rss_bytes"] > 1 << 20

"""The variables of other people's libraries."""

import os

from rdt_e2e.config import load_config
from rdt_e2e.environment import apply_environment, process_environment, ray_environment

RAY_CLUSTER = {"cluster.address": "10.0.0.1:6379"}


def test_ray_variables_are_part_of_the_process_variables():
    config = load_config("local")
    assert ray_environment(config).items() <= process_environment(config).items()


def test_pull_limit_is_in_milliseconds():
    config = load_config("local", {"sync.rdt_fetch_timeout_s": 90.5})
    assert ray_environment(config)["RAY_rdt_fetch_fail_timeout_milliseconds"] == "90500"


def test_engine_limit_follows_the_profile():
    config = load_config("kimi-k2", RAY_CLUSTER)
    assert process_environment(config)["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"


def test_cpu_only_variables():
    local = process_environment(load_config("local"))
    assert local["OMP_NUM_THREADS"] == "1"
    assert local["UCX_TLS"] == "tcp,self"
    real = process_environment(load_config("kimi-k2", RAY_CLUSTER))
    assert not {"OMP_NUM_THREADS", "UCX_TLS", "VLLM_CPU_KVCACHE_SPACE"} & set(real)


def test_cache_size_in_bytes_is_not_overridden():
    assert "VLLM_CPU_KVCACHE_SPACE" not in process_environment(load_config("local"))
    unset = load_config("local", {"inference.kv_cache_bytes": None})
    assert process_environment(unset)["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_site_values_stay_on_a_real_cluster_only(monkeypatch):
    monkeypatch.setenv("UCX_MODULES", "all")
    assert "UCX_MODULES" not in process_environment(load_config("kimi-k2", RAY_CLUSTER))
    assert process_environment(load_config("local"))["UCX_MODULES"] == "^efa"


def test_apply_sets_this_process():
    config = load_config("local")
    apply_environment(config)
    assert process_environment(config).items() <= dict(os.environ).items()

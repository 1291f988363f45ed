"""The configuration: precedence, and one clear line for everything that is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from rdt_e2e.config import Config, default_cache_dir, load_config
from rdt_e2e.errors import ConfigError
from rdt_e2e.profiles import profile_names, profiles_dir

NEEDS = {"kimi-k2": {"cluster.address": "10.0.0.1:6379"}}
"""What a profile leaves for the user to give."""


def edited_profile(tmp_path: Path, **sections: object) -> str:
    """The path of a copy of `local`, with whole sections replaced."""
    content = yaml.safe_load((profiles_dir() / "local.yaml").read_text())
    path = tmp_path / "edited.yaml"
    path.write_text(yaml.safe_dump(content | sections))
    return str(path)


def message_of(name_or_file: str, overrides: dict[str, object] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name_or_file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads(name):
    config = load_config(name, NEEDS.get(name))
    assert config.name == name


def test_local_profile_needs_nothing():
    config = load_config("local")
    assert config.model.source == "mini-kimi"
    assert (config.trainer.num_ranks, config.num_consumers) == (2, 2)
    assert config.verify.reference == "recorded"


def test_kimi_k2_profile_is_the_real_deployment():
    config = load_config("kimi-k2", NEEDS["kimi-k2"])
    assert config.model.source == "moonshotai/Kimi-K2-Instruct"
    assert (config.trainer.num_ranks, config.inference.data_parallel) == (8, 8)
    assert config.inference.expert_parallel
    assert config.inference.kv_cache_dtype == "fp8"
    assert config.inference.gpu_memory_utilization == 0.90
    assert (config.inference.max_model_len, config.inference.max_num_seqs) == (2048, 4)
    # What the slots of one flow cover, within the reach of a NIC's address translation.
    assert config.sync.max_chunk_bytes is not None
    assert 2e9 <= config.sync.num_buffers * config.sync.max_chunk_bytes <= 3e9


def test_consumers_are_all_inference_ranks():
    overrides = {"inference.data_parallel": 4, "inference.tensor_parallel": 2}
    assert load_config("local", overrides).num_consumers == 8


def test_precedence_defaults_profile_environment_flags(tmp_path, monkeypatch):
    plain = edited_profile(tmp_path, sync={})
    assert load_config(plain).sync.iters == 2
    profile = edited_profile(tmp_path, sync={"iters": 3})
    assert load_config(profile).sync.iters == 3
    monkeypatch.setenv("RDT_E2E_SYNC__ITERS", "4")
    assert load_config(profile).sync.iters == 4
    assert load_config(profile, {"sync.iters": "5"}).sync.iters == 5


def test_environment_reaches_beside_profile_keys(monkeypatch):
    monkeypatch.setenv("RDT_E2E_VERIFY__PROMPTS", '["one", "two"]')
    monkeypatch.setenv("RDT_E2E_INFERENCE__KV_CACHE_BYTES", "null")
    config = load_config("local")
    assert config.verify.prompts == ("one", "two")
    assert config.inference.kv_cache_bytes is None
    assert config.inference.max_model_len == 128


def test_constructing_reads_no_environment(monkeypatch):
    content = load_config("local").model_dump()
    monkeypatch.setenv("RDT_E2E_SYNC__ITERS", "9")
    assert Config.model_validate(content).sync.iters == 2


def test_frozen():
    config = load_config("local")
    with pytest.raises(ValidationError, match="frozen"):
        config.sync.iters = 3  # type: ignore[misc]  # the point of the test


def test_survives_its_own_dump():
    config = load_config("local")
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_cache_dir_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "rdt-e2e"
    assert load_config("local").paths.cache_dir == tmp_path / "rdt-e2e"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == Path.home() / ".cache" / "rdt-e2e"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"sync.iterz": 1}, ["unknown key sync.iterz", "did you mean iters?", "num_buffers"]),
        ({"sync.iters": 0}, ["sync.iters is 0", "must be greater than or equal to 1"]),
        ({"sync.iters": "many"}, ["sync.iters is 'many'", "must be a valid integer"]),
        ({"sync.iters": True}, ["sync.iters is True", "a yes or no"]),
        ({"sync": 3}, ["sync is 3", "must be a section with keys iters"]),
        ({"inference.gpu_memory_utilization": 1.5}, ["is 1.5", "less than or equal to 1"]),
        ({"cluster.target": "compose"}, ["is 'compose'", "must be 'local' or 'ray'"]),
        ({"cluster.trainer_ip": "10.0.0.1"}, ["cluster.trainer_ip is '10.0.0.1'", "loopback"]),
        ({"verify.prompts": []}, ["verify.prompts is []", "at least 1 item"]),
        ({"verify.prompts": ["ok", ""]}, ["verify.prompts.1 is ''", "at least 1 character"]),
        ({"sync.init_timeout_s": float("inf")}, ["sync.init_timeout_s is inf", "finite"]),
        ({"name": "../up"}, ["name is '../up'", "must match pattern"]),
    ],
)
def test_bad_value_names_source_key_and_allowed(overrides, parts):
    message = message_of("local", overrides)
    for part in ["command line: ", *parts]:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"cluster.target": "ray"}, ["needs cluster.address", "RDT_E2E_CLUSTER__ADDRESS"]),
        ({"cluster.address": "h:1"}, ["cluster.address=h:1", "cluster.target=local"]),
        ({"cluster.inference_ip": "127.0.0.2"}, ["are both 127.0.0.2", "must differ"]),
        ({"model.source": "/x", "model.variant": "v2"}, ["needs model.source=mini-kimi", "'/x'"]),
        ({"sync.stall_timeout_s": 150}, ["rdt_fetch_timeout_s=120", "stall_timeout_s=150"]),
        ({"sync.sync_timeout_s": 30}, ["sync_timeout_s=30", "stall_timeout_s=60"]),
        ({"verify.max_tokens": 128}, ["max_tokens=128", "max_model_len=128"]),
        ({"inference.kv_cache_dtype": "fp8"}, ["kv_cache_dtype=fp8", "trainer.device=cuda"]),
    ],
)
def test_impossible_combination_names_file_and_keys(overrides, parts):
    message = message_of("local", overrides)
    for part in ["configs/local.yaml", *overrides, *parts]:
        assert part in message


def test_kimi_k2_without_address_says_how_to_give_it():
    message = message_of("kimi-k2")
    assert "configs/kimi-k2.yaml: " in message
    assert "--set cluster.address=HOST:PORT" in message


@pytest.mark.parametrize("written", ["off", "'off'"])
def test_off_is_a_level_although_yaml_reads_it_as_false(written, tmp_path):
    text = (profiles_dir() / "local.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(f"{text}\nprofiling:\n  level: {written}\n")
    assert load_config(str(path)).profiling.level == "off"


def test_error_in_a_file_names_the_file(tmp_path):
    path = edited_profile(tmp_path, sync={"iters": 1, "itres": 2})
    assert message_of(path).startswith(f"{path}: unknown key sync.itres (did you mean iters?)")
    path = edited_profile(tmp_path, trainer={"device": "cpu"})
    assert message_of(path).startswith(f"{path}: trainer.num_ranks is missing")
    path = edited_profile(tmp_path, syncs={})
    assert "unknown key syncs (did you mean sync?); allowed: name, model" in message_of(path)


def test_error_in_the_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv("RDT_E2E_SYNC__ITERS", "none")
    assert message_of("local").startswith("environment variable RDT_E2E_SYNC__ITERS: sync.iters")


@pytest.mark.parametrize("name", ["RDT_E2E_SYNC__ITERZ", "RDT_E2E_SYNC", "RDT_E2E_ITERS"])
def test_unknown_variable(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert f"unknown variable {name}" in message_of("local")


def test_list_that_is_not_json(monkeypatch):
    monkeypatch.setenv("RDT_E2E_VERIFY__PROMPTS", "one, two")
    assert "RDT_E2E_VERIFY__PROMPTS is not JSON" in message_of("local")


def test_unknown_profile_lists_the_known():
    message = message_of("locals")
    assert "h200x2, kimi-k2, local" in message
    assert "did you mean local?" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("sync: [1, 2\n", "not valid YAML at line"),
        ("- a\n- b\n", "holds list, not a mapping of sections"),
        ("", "holds NoneType, not a mapping"),
        ("name: a\nname: b\n", "not valid YAML at line 2, column 1: key 'name' is given twice"),
        ("name: \x07\n", "not valid YAML"),
        ("!!python/object:os.system {}\n", "not valid YAML"),
        ("\xff", "cannot be read"),
    ],
)
def test_bad_file(tmp_path, text, part):
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode("latin-1"))
    message = message_of(str(path))
    assert message.startswith(f"{path}: ")
    assert part in message


def test_missing_file(tmp_path):
    path = tmp_path / "none.yaml"
    assert message_of(str(path)) == f"{path}: no such configuration file; check the path"


def test_imports_without_heavy_libraries():
    code = (
        "import sys; from rdt_e2e.config import load_config; load_config('local'); "
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"

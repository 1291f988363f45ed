"""The program: help, exit codes, and one line for what may be expected to go wrong."""

import dataclasses
import json
import os
import subprocess
import sys
import types

import pytest
import yaml
from typer.testing import CliRunner

from rdt_e2e import __version__, cli
from rdt_e2e.errors import ProducerLostError, TextMismatchError

VERBS = (
    "sync",
    "soak",
    "overhead",
    "bench",
    "doctor",
    "deploy",
    "down",
    "status",
    "plan",
    "mini-kimi",
    "config",
)


@pytest.fixture
def run():
    """Run the program in this process: (exit code, standard output, standard error)."""

    def invoke(*arguments: str):
        result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
        return result.exit_code, result.stdout, result.stderr

    return invoke


@pytest.fixture
def fakes(monkeypatch):
    """Stand-ins for what the verbs call; a test sets what each does."""
    driver = types.ModuleType("rdt_e2e.sync.driver")
    local = types.ModuleType("rdt_e2e.cluster.local")
    builder = types.ModuleType("rdt_e2e.mini_kimi")
    cluster = types.ModuleType("rdt_e2e.cluster")
    sync = types.ModuleType("rdt_e2e.sync")
    vars(cluster)["local"] = local
    vars(sync)["driver"] = driver
    for module in (driver, local, builder, cluster, sync):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return types.SimpleNamespace(driver=driver, local=local, mini_kimi=builder)


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_has_examples(run, verb):
    code, out, _ = run(*([] if verb is None else [verb]), "--help")
    assert code == 0
    assert "Examples:\n" in out
    assert f"\n    rdt-e2e {verb or 'sync'}" in out


def test_help_lists_every_verb(run):
    _, out, _ = run("--help")
    for verb in VERBS:
        assert f"\n  {verb} " in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["sync", "--help"],
        ["config"],
        ["plan", "--model", "mini-kimi", "--trainers", "2", "--inference", "2"],
        ["doctor", "--group", "node"],
    ],
)
def test_help_loads_no_heavy_library(arguments):
    code = (
        "import sys\n"
        "from rdt_e2e import cli\n"
        "try:\n"
        f"    cli.app({arguments!r})\n"
        "except SystemExit as end:\n"
        "    assert end.code in (None, 0), end.code\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'nixl', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=os.environ)


def test_version(run):
    assert run("--version") == (0, f"rdt-e2e {__version__}\n", "")


def test_unknown_verb(run):
    code, _, err = run("syncs")
    assert code == 2
    assert "syncs" in err


def test_doctor_explains_a_check(run):
    code, out, _ = run("doctor", "--explain", "nixl.ucx-tls")
    assert code == 0
    assert out.startswith("nixl.ucx-tls: ")
    code, _, err = run("doctor", "--explain", "nixl.nothing")
    assert code == 2
    assert err.startswith("rdt-e2e: error: command line: there is no check 'nixl.nothing'")


def test_doctor_hands_its_options_on(run, monkeypatch):
    from rdt_e2e.doctor import run as verb

    seen = []

    def run_doctor(config, stream, options):
        seen.append((config.sync.iters, options))
        return 1

    monkeypatch.setattr(verb, "run_doctor", run_doctor)
    code, _, _ = run(
        "doctor", "--group", "rdma", "--group", "gpu", "--pair", "--json", "--set", "sync.iters=7"
    )
    assert code == 1
    assert seen == [(7, verb.Options(("rdma", "gpu"), with_pair=True, as_json=True))]


def test_sync_returns_the_exit_code_of_the_run(run, fakes):
    seen = []

    def run_sync(config, console):
        seen.append(config)
        return types.SimpleNamespace(exit_code=3)

    fakes.driver.run_sync = run_sync
    code, _, _ = run("sync", "--iters", "5", "--set", "verify.max_tokens=8")
    assert code == 3
    assert (seen[0].sync.iters, seen[0].verify.max_tokens) == (5, 8)


def test_sync_sets_the_environment_before_the_import(run, fakes, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    seen = []

    def find_attribute(name):
        seen.append(os.environ.get("RAY_AUTH_MODE"))
        return lambda config, console: types.SimpleNamespace(exit_code=0)

    fakes.driver.__getattr__ = find_attribute
    assert run("sync")[0] == 0
    assert seen
    assert set(seen) == {"token"}


@pytest.mark.parametrize(
    ("error", "code"),
    [(ProducerLostError("rank 1\nis gone"), 1), (TextMismatchError("token 3"), 3)],
)
def test_expected_error_is_one_line(run, fakes, error, code):
    def run_sync(config, console):
        raise error

    fakes.driver.run_sync = run_sync
    message = " ".join(str(error).split())
    assert run("sync") == (code, "", f"rdt-e2e: error: {message}\n")


def test_interrupt_is_one_line(run, fakes):
    def run_sync(config, console):
        raise KeyboardInterrupt

    fakes.driver.run_sync = run_sync
    assert run("sync") == (130, "", "rdt-e2e: interrupted\n")


def test_unexpected_error_keeps_its_traceback(run, fakes):
    def run_sync(config, console):
        raise ZeroDivisionError

    fakes.driver.run_sync = run_sync
    with pytest.raises(ZeroDivisionError):
        run("sync")


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("sync.iters", "is not SECTION.FIELD=VALUE"),
        ("iters=3", "is not SECTION.FIELD=VALUE"),
        ("sync.iterz=3", "unknown key sync.iterz"),
        ("verify.prompts=[one]", "the list is not JSON"),
    ],
)
def test_bad_setting(run, setting, part):
    code, out, err = run("config", "--set", setting)
    assert (code, out) == (2, "")
    assert err.startswith("rdt-e2e: error: command line: ")
    assert err.count("\n") == 1
    assert part in err


def test_config_prints_what_it_can_read_again(run, tmp_path):
    code, out, _ = run(
        "config", "--set", 'verify.prompts=["a=b"]', "--set", "inference.kv_cache_bytes=null"
    )
    assert code == 0
    path = tmp_path / "again.yaml"
    path.write_text(out)
    assert run("config", "--config", str(path)) == (0, out, "")
    content = yaml.safe_load(out)
    assert content["verify"]["prompts"] == ["a=b"]
    assert content["inference"]["kv_cache_bytes"] is None


def test_config_keys_lists_and_explains_every_key(run):
    code, out, _ = run("config", "--keys")
    assert code == 0
    lines = out.splitlines()
    assert "sync.iters (default 2)" in lines
    assert "trainer.num_ranks (required)" in lines
    assert all(line.strip() for line in lines), "a key without a meaning"


def test_deploy_down_status(run, fakes):
    deployed = []
    fakes.local.deploy = lambda config, console: deployed.append(config.cluster.cpus_per_node)
    forced = []

    def down(console, force):
        forced.append(force)
        return bool(deployed)

    fakes.local.down = down
    state = dataclasses.make_dataclass("State", [("address", str)])("127.0.0.2:6380")
    fakes.local.status = lambda: state if deployed else None

    assert run("down") == (0, "nothing was running\n", "")
    code, out, err = run("status")
    assert (code, out) == (1, "")
    assert "rdt-e2e deploy" in err
    assert run("deploy", "--set", "cluster.cpus_per_node=5")[0] == 0
    assert deployed == [5]
    assert json.loads(run("status")[1]) == {"address": "127.0.0.2:6380"}
    assert run("down", "--force") == (0, "", "")
    assert forced == [False, True]


def test_mini_kimi_prints_the_folder_alone(run, fakes, tmp_path):
    def ensure(cache_dir, variant, *, report):
        report("training")
        return cache_dir / variant

    fakes.mini_kimi.ensure_mini_kimi = ensure
    code, out, err = run("mini-kimi", "--variant", "v2", "--cache-dir", str(tmp_path))
    assert (code, out, err) == (0, f"{tmp_path / 'v2'}\n", "training\n")
    code, _, err = run("mini-kimi", "--variant", "v3")
    assert code == 2
    assert "must be 'v1' or 'v2'" in err


def test_bench_passes_its_options_on(run, monkeypatch, tmp_path):
    from rdt_e2e.bench import run as bench

    seen = []

    def run_bench(*given):
        seen.append(given)
        return 3

    monkeypatch.setattr(bench, "run_bench", run_bench)
    file = tmp_path / "bench.json"
    arguments = ["--layers", "3", "--repeats", "2", "--rows", "limit, ours", "--json", str(file)]
    assert run("bench", *arguments, "--set", "sync.num_buffers=3")[0] == 3
    options, _, report = seen[0]
    assert (options.layers, options.repeats, options.rows) == (3, 2, ("limit", "ours"))
    assert options.settings == {"sync.num_buffers": "3"}
    assert report == file


@pytest.mark.parametrize("part", ["wire", "bake", "load"])
def test_the_benches_of_one_part_have_examples(run, part):
    code, out, _ = run("bench", part, "--help")
    assert code == 0
    assert f"rdt-e2e bench {part}" in out


def test_bench_wire_passes_its_options_on(run, monkeypatch):
    from rdt_e2e.bench import wire

    seen = []

    def run_wire(*given):
        seen.append(given)
        return 0

    monkeypatch.setattr(wire, "run_wire", run_wire)
    arguments = ["--rates", "none, 400", "--gather", "full", "--tiny", "--layers", "3"]
    assert run("bench", "wire", *arguments)[0] == 0
    options = seen[0][0]
    assert (options.rates, options.gathers) == ((None, 4e8), ("full",))
    assert (options.widths, options.layers) == ("tiny", 3)


def test_bench_wire_refuses_a_rate_that_is_none(run):
    code, _, err = run("bench", "wire", "--rates", "fast")
    assert code == 2
    assert "--rates fast" in err


def test_bench_refuses_an_unknown_row(run):
    code, _, err = run("bench", "--rows", "ours,peer-http")
    assert code == 2
    assert "peer-http" in err

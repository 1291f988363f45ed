"""The whole plan: the totals of the design, the text and the JSON, and the verb."""

import io
import json
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rdt_e2e import cli
from rdt_e2e.sizing.deployment import Deployment
from rdt_e2e.sizing.gpus import find_gpu
from rdt_e2e.sizing.plan import as_json, make_plan
from rdt_e2e.sizing.render import render
from rdt_e2e.sizing.totals import kind_of
from tests import synthetic


@pytest.fixture(scope="module")
def kimi(described, planner):
    index, h200 = described("kimi-k2"), find_gpu("h200")
    return make_plan("kimi-k2", "test", index, Deployment(8, 8), h200, 400, planner("kimi-k2"))


@pytest.fixture
def run():
    """Run the verb: (exit code, standard output, standard error)."""

    def invoke(*arguments):
        result = CliRunner().invoke(cli.app, ["plan", *map(str, arguments)], catch_exceptions=False)
        return result.exit_code, result.stdout, result.stderr

    return invoke


def test_kimi_k2_totals_are_those_of_the_design(kimi):
    assert kimi.model.num_tensors == 139_583
    assert round(kimi.model.num_bytes / 1e9, 1) == 1029.2
    assert len(kimi.groups) == 63
    kinds = {kind.kind: kind for kind in kimi.model.kinds}
    assert kinds["routed experts"].num_tensors == 138_240
    assert round(kinds["routed experts"].num_bytes / 1e9, 1) == 1014.9
    assert round(kinds["embedding and head"].num_bytes / 1e9, 2) == 4.70
    assert sum(kind.num_bytes for kind in kimi.model.kinds) == kimi.model.num_bytes
    assert sum(kind.num_tensors for kind in kimi.model.kinds) == 139_583
    for rank in kimi.consumers:
        assert round(rank.num_bytes / 1e9, 1) == 141.1
        assert round(rank.expert_bytes / 1e9, 1) == 126.9
        assert round((rank.num_bytes - rank.expert_bytes) / 1e9, 1) == 14.2
        assert rank.producers == (rank.rank,)
    for rank in kimi.trainers:
        assert round(rank.shard_bytes / 1e9, 1) == 128.6
        assert rank.owned_names == 17_280
        assert rank.owned_experts == (48 * rank.rank, 48 * rank.rank + 48)
        assert rank.consumers == (rank.rank,)
    # A layer in one pull, as without owners, is 2.27 GB: its experts and the rest.
    of_layer = [chunk.num_bytes for chunk in kimi.chunks[0] if chunk.group == 30]
    assert round(sum(of_layer) / 1e9, 2) == 2.27
    assert not kimi.fits


def test_nothing_has_one_owner_when_everything_is_gathered(described):
    deployment = Deployment(8, 8, gather="full")
    plan = make_plan("m", "test", described("mini-kimi"), deployment, find_gpu("b300"), 400)
    assert all(rank.owned_names == 0 for rank in plan.trainers)
    assert [group.gathered_bytes >= group.num_bytes for group in plan.groups] == [True] * 6


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.1.mlp.experts.3.up_proj.weight_scale_inv", "routed experts"),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", "shared experts"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", "router"),
        ("model.layers.1.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "dense mlp"),
        ("model.layers.0.self_attn.q_a_layernorm.weight", "norms"),
        ("model.layers.0.self_attn.k_norm.weight", "norms"),
        ("model.layers.0.self_attn.o_proj.weight_scale_inv", "attention"),
        ("model.layers.0.odd.weight", "other"),
        ("language_model.model.norm.weight", "norms"),
        ("lm_head.weight", "embedding and head"),
        ("vision_tower.proj.weight", "other"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize("width", [80, 120])
def test_text_fits_its_width_and_carries_the_verdict(kimi, width):
    stream = io.StringIO()
    render(kimi, stream, width=width)
    text = stream.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    assert text.startswith("kimi-k2 on h200: DOES NOT FIT\n")
    assert "1. inference.tensor_parallel=2" in text
    for part in ("| routed experts ", "| 138,240 |", "1,029.2", "experts 336-383", "| RDMA only "):
        assert part in text
    # Nothing was cut off to make it fit.
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_tables_are_markdown(kimi):
    stream = io.StringIO()
    render(kimi, stream, width=100)
    rows = [line.strip() for line in stream.getvalue().splitlines() if line.startswith("|")]
    separators = [row for row in rows if set(row) == {"|", "-"}]
    assert len(separators) == 5
    for row in rows:
        assert row.endswith("|")


def test_many_ranks_are_shortened_in_the_text_only(described):
    plan = make_plan(
        "air", "test", described("glm-4.5-air"), Deployment(64, 8), find_gpu("b200"), 400
    )
    stream = io.StringIO()
    render(plan, stream, width=100)
    text = stream.getvalue()
    assert "| ... " in text
    assert "experts 126-127" in text
    assert "experts 100-101" not in text
    assert len(as_json(plan)["trainers"]) == 64


def test_json_says_what_the_plan_says(kimi):
    content = json.loads(json.dumps(as_json(kimi)))
    assert content["fits"] is False
    assert content["model"]["num_tensors"] == 139_583
    assert content["verdict"]["inference"]["spare_bytes"] == kimi.verdict.inference.spare_bytes
    assert content["memory"]["trainers"][3]["serve_ring_bytes"] == 2 * 2304 * 2**20
    assert sum(chunk["num_bytes"] for chunk in content["chunks"][0]) == kimi.consumers[0].num_bytes
    assert content["changes"][0]["what"] == kimi.changes[0].what


# The verb


def test_exit_status_is_the_verdict(run):
    code, out, err = run("--model", "mini-kimi", "--trainers", 2, "--inference", 2)
    assert (code, err) == (0, "")
    assert out.startswith("mini-kimi on b200: FITS\n")
    fleets = ("--trainers", 2, "--inference", 2)
    code, out, _ = run("--model", "glm-4.5-air", *fleets, "--gpu", "h100", "--json")
    content = json.loads(out)
    assert code == 1
    assert content["fits"] is False
    assert content["changes"]
    assert "without 1 layer for multi-token prediction" in content["model"]["origin"]


def test_profile_gives_the_rest(run):
    code, out, _ = run("--config", "kimi-k2", "-m", "mini-kimi", "--gpu", "b300", "--json")
    content = json.loads(out)
    assert code == 0
    assert content["deployment"]["max_chunk_bytes"] == 1_342_177_280
    assert content["deployment"]["gpu_memory_utilization"] == 0.9
    assert content["deployment"]["kv_item_bytes"] == 1
    assert len(content["trainers"]) == len(content["consumers"]) == 8
    code, out, _ = run(
        "-c", "local", "--inference", 4, "--tp", 2, "--set", "trainer.lookahead=3", "--json"
    )
    content = json.loads(out)
    assert content["model"]["name"] == "mini-kimi"
    deployment = content["deployment"]
    assert (deployment["data_parallel"], deployment["tensor_parallel"]) == (2, 2)
    assert (deployment["lookahead"], deployment["num_trainers"]) == (3, 2)


def test_folder_is_read_by_its_headers(run, tmp_path):
    made = synthetic.write_checkpoint(
        tmp_path,
        edit_config=lambda config: config.update({"num_nextn_predict_layers": 1}),
    )
    code, out, _ = run("--model", tmp_path, "--trainers", 2, "--inference", 2, "--json")
    content = json.loads(out)
    assert code == 0
    assert content["model"]["num_tensors"] == len(made.tensors)
    assert content["model"]["origin"] == f"headers of the files in {tmp_path}"


def test_folder_with_a_configuration_only(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(synthetic.Architecture().config()))
    code, out, _ = run("-m", tmp_path, "--trainers", 2, "--dp", 2, "--max-chunk-bytes", 100_000)
    assert code == 0
    assert "config.json alone" in " ".join(out.split())


def test_left_out_tensors_are_told(run, tmp_path):
    synthetic.write_checkpoint(tmp_path, synthetic.Architecture(inv_freq=True))
    _, out, _ = run("--model", tmp_path, "--trainers", 1, "--inference", 1)
    assert "left out: 3 tensors; rotary frequencies" in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--trainers", 8, "--inference", 8), "give --model (kimi-k2, "),
        (("--model", "kimi-k2", "--trainers", 8), "--inference"),
        (("--model", "kimi-k9", "--trainers", 8, "--inference", 8), "kimi-k9"),
        (("--model", "kimi-k2", "--trainers", 8, "--inference", 9, "--tp", 2), "multiple of TP 2"),
        (("--model", "kimi-k2", "--trainers", 8, "--inference", 8, "--dp", 3), "--dp 3"),
        (("--model", "kimi-k2", "--trainers", 0, "--inference", 8), "num_trainers is 0"),
        (("--model", "kimi-k2", "--trainers", 8, "--inference", 8, "--gpu", "x1"), "--gpu is 'x1'"),
        (
            ("--model", "kimi-k2", "--trainers", 8, "--inference", 8, "--gather", "no"),
            "owner or full",
        ),
        (("--model", "kimi-k2", "--trainers", 8, "--inference", 8, "--nic-gbps", 0), "above 0"),
        (("--model", "kimi-k2", "--set", "sync.iters=3"), "add --config"),
        (("--config", "kimi-k2", "--set", "trainer.lookahed=3"), "lookahead"),
    ],
)
def test_bad_input_is_one_line(run, arguments, part):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("rdt-e2e: error: ")
    assert err.count("\n") == 1
    assert part in err


def test_known_model_in_the_cache_is_read_from_there(run, tmp_path, monkeypatch):
    """A model of the catalogue that is on this machine is taken from its files."""
    from rdt_e2e.sizing import command

    made = synthetic.write_checkpoint(tmp_path)
    monkeypatch.setattr(command, "find_folder", lambda source, revision: Path(made.root))
    _, out, _ = run("--model", "deepseek-v3", "--trainers", 2, "--inference", 2, "--json")
    assert json.loads(out)["model"]["num_tensors"] == len(made.tensors)


def test_verb_passes_its_options_on(monkeypatch):
    from rdt_e2e.sizing import command

    seen = types.SimpleNamespace(options=None)

    def run_plan(options, stream, *, as_json_text):
        seen.options = options
        return 0

    monkeypatch.setattr(command, "run_plan", run_plan)
    CliRunner().invoke(cli.app, ["plan", "-m", "x", "--no-ep", "--nic-gbps", "800", "--tp", "2"])
    assert (seen.options.expert_parallel, seen.options.nic_gbps) == (False, 800)
    assert (seen.options.tensor_parallel, seen.options.gpu) == (2, "b200")

"""Bad input: one clear message, nothing half-done, nothing left running."""

import io
import json
import socket
from pathlib import Path

import pytest

from rdt_e2e.cluster import local
from rdt_e2e.config import load_config
from rdt_e2e.console import Console
from rdt_e2e.environment import apply_environment
from rdt_e2e.errors import CheckpointError, EnvironmentCheckError, RdtE2EError
from tests import synthetic

WEIGHT = "model.layers.1.self_attn.q_b_proj.weight"
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


def drop(*names):
    """Remove tensors from their shards and from the index."""

    def damage(made):
        for name in names:
            forget(made, name)

        def edit(files):
            for name in names:
                del files[name]

        synthetic.edit_index(made.root, edit)

    return damage


def reshape_scale(made):
    name = f"{WEIGHT}_scale_inv"
    synthetic.edit_shard(
        made.path_of(name), lambda tensors: tensors.update({name: tensors[name][:1].contiguous()})
    )


def forget_in_shard(made):
    forget(made, WEIGHT)


def forget(made, name):
    def edit(tensors):
        del tensors[name]

    synthetic.edit_shard(made.path_of(name), edit)


def remove_index(made):
    (made.root / synthetic.INDEX_FILE).unlink()


def spoil_index(made):
    (made.root / synthetic.INDEX_FILE).write_text("{")


def unknown_dtype(made):
    synthetic.edit_header(
        made.path_of(WEIGHT), lambda header: header[WEIGHT].update(dtype="F4_E2M1")
    )


def drop_layer(made):
    drop(*[name for name in made.files if name.startswith("model.layers.2.")])(made)


DAMAGES = {
    "index missing": (remove_index, "index.json"),
    "index not JSON": (spoil_index, "index.json"),
    "shard missing": (lambda made: made.path_of(WEIGHT).unlink(), "safetensors"),
    "shard truncated": (lambda made: synthetic.truncate(made.path_of(WEIGHT), 100), "safetensors"),
    "name not in its shard": (forget_in_shard, WEIGHT),
    "weight without scale": (drop(f"{WEIGHT}_scale_inv"), f"{WEIGHT}"),
    "scale without weight": (drop(WEIGHT), f"{WEIGHT}_scale_inv"),
    "scale of the wrong shape": (reshape_scale, f"{WEIGHT}_scale_inv"),
    "expert ids with a hole": (
        drop(EXPERT.format(1), f"{EXPERT.format(1)}_scale_inv"),
        "experts",
    ),
    "unknown dtype": (unknown_dtype, "F4_E2M1"),
    "missing layer": (drop_layer, "layer"),
}


def run(tmp_path: Path, **overrides: object) -> RdtE2EError:
    """Run the job with these settings; return the error it ends with."""
    keys: dict[str, object] = {"paths.runs_dir": str(tmp_path / "runs")}
    keys |= {key.replace("__", "."): value for key, value in overrides.items()}
    config = load_config("local", keys)
    apply_environment(config)
    from rdt_e2e.sync.driver import run_sync

    with pytest.raises(RdtE2EError) as caught:
        run_sync(config, Console(io.StringIO()))
    (written,) = (tmp_path / "runs").glob("*/run.json")
    assert json.loads(written.read_text())["error"] == str(caught.value)
    return caught.value


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_is_named_before_anything_starts(case: str, tmp_path: Path) -> None:
    damage, named = DAMAGES[case]
    made = synthetic.write_checkpoint(tmp_path / "model")
    damage(made)
    error = run(tmp_path, model__source=str(made.root), verify__reference="none")
    assert isinstance(error, CheckpointError)
    assert named in str(error)
    assert "\n" not in str(error)


def test_a_checkpoint_without_recorded_text_says_so(tmp_path: Path) -> None:
    made = synthetic.write_checkpoint(tmp_path / "model")
    error = run(tmp_path, model__source=str(made.root))
    assert "expected.json" in str(error)
    assert "verify.reference=none" in str(error)


def test_a_model_that_is_nowhere_names_both_places_looked_at(tmp_path: Path) -> None:
    error = run(tmp_path, model__source="nobody/nothing", verify__reference="none")
    assert isinstance(error, CheckpointError)
    assert "neither a folder nor a snapshot in the local hub cache" in str(error)


def test_ray_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    error = run(tmp_path, cluster__target="ray", cluster__address=address)
    assert isinstance(error, EnvironmentCheckError)
    assert f"no Ray head answers at cluster.address={address}" in str(error)


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A state folder of this test's own, in which no cluster is up."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.usefixtures("no_cluster")
def test_a_port_in_use_is_named_with_its_key(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", 0))
        listener.listen()
        port = listener.getsockname()[1]
        error = run(tmp_path, cluster__port=port)
    assert isinstance(error, EnvironmentCheckError)
    assert f"port {port} on 127.0.0.2 cannot be used" in str(error)
    assert "cluster.port" in str(error)
    assert local.status() is None


@pytest.mark.usefixtures("live")
def test_more_gpus_than_the_cluster_has_is_named(tmp_path: Path) -> None:
    error = run(tmp_path, trainer__num_ranks=3)
    assert isinstance(error, EnvironmentCheckError)
    assert "3" in str(error)


def test_a_full_disk_for_the_run_directory_is_named(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    config = load_config("local", {"paths.runs_dir": "/dev/full/runs"})
    apply_environment(config)
    from rdt_e2e.sync.driver import run_sync

    with pytest.raises(EnvironmentCheckError, match=r"paths\.runs_dir"):
        run_sync(config, Console(io.StringIO()))

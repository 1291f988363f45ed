"""Layouts that real checkpoints have, each on a small one that is generated here."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.checkpoint.stream import ShardReader
from rdt_e2e.errors import CheckpointError, MissingTensorError
from tests import synthetic

Tensors = dict[str, torch.Tensor]

Q_B = "model.layers.1.self_attn.q_b_proj.weight"
HEAD = "lm_head.weight"


def expect(root: Path, error: type[CheckpointError], *parts: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_index(root)
    assert type(caught.value) is error
    for part in parts:
        assert str(part) in str(caught.value)


def without_scales(tensors: Tensors) -> None:
    for name in list(tensors):
        if name.endswith("_scale_inv"):
            del tensors[name]


def quantised_as(**section: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update({"quantization_config": section})


def scaled(suffix: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """Replace the block scales of every float8 weight by others."""

    def edit(tensors: Tensors) -> None:
        without_scales(tensors)
        for name, tensor in list(tensors.items()):
            if tensor.dtype == torch.float8_e4m3fn:
                tensors[name + suffix] = make(tensor)

    return edit


def test_index_without_sizes(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    (tmp_path / synthetic.INDEX_FILE).write_text(json.dumps({"weight_map": checkpoint.files}))
    index = read_index(tmp_path)
    assert index.num_bytes == sum(t.numel() * t.element_size() for t in checkpoint.tensors.values())


def test_one_file_without_an_index(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path, num_shards=1)
    (tmp_path / synthetic.INDEX_FILE).unlink()
    (shard,) = tmp_path.glob("*.safetensors")
    shard.rename(tmp_path / "model.safetensors")
    index = read_index(tmp_path)
    assert set(index.entries) == set(checkpoint.tensors)
    assert {entry.file for entry in index.entries.values()} == {"model.safetensors"}
    held = build_layout(index).held[HEAD]
    out = torch.empty(held.shape, dtype=torch.bfloat16)
    with ShardReader(index) as reader:
        reader.read_rows(held, 0, held.shape[0], out)
    assert torch.equal(out, checkpoint.tensors[HEAD])


def test_several_files_without_an_index(tmp_path):
    synthetic.write_checkpoint(tmp_path, num_shards=2)
    (tmp_path / synthetic.INDEX_FILE).unlink()
    expect(
        tmp_path, CheckpointError, synthetic.INDEX_FILE, "no such file", "a single file needs none"
    )


# Names


def under_language_model(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"language_model.{name}"] = tensors.pop(name)
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros((4, 4), dtype=torch.bfloat16)


def nest(config: dict[str, Any]) -> None:
    text = dict(config)
    config.clear()
    config.update({"model_type": "kimi_k25", "text_config": text})


def test_prefix_and_nested_settings(tmp_path):
    synthetic.write_checkpoint(tmp_path, edit=under_language_model, edit_config=nest)
    layout = build_layout(read_index(tmp_path))
    assert [group.label for group in layout.groups][1:4] == ["layers.0", "layers.1", "layers.2"]
    assert layout.groups[0].names == ("language_model.model.embed_tokens.weight",)
    assert layout.groups[-1].names == (
        "language_model.lm_head.weight",
        "language_model.model.norm.weight",
        "vision_tower.patch_embed.proj.weight",
    )
    stack = layout.held["language_model.model.layers.1.mlp.experts.*.up_proj.weight"]
    assert len(stack.names) == 4


@pytest.mark.parametrize(
    "name", ["language_model.lm_head.weight", "language_model.model.norm.weight"]
)
def test_missing_under_a_prefix(tmp_path, name):
    def edit(tensors: Tensors) -> None:
        under_language_model(tensors)
        del tensors[name]

    synthetic.write_checkpoint(tmp_path, edit=edit, edit_config=nest)
    expect(tmp_path, MissingTensorError, name)


def test_expert_missing_under_nested_settings(tmp_path):
    def edit(config: dict[str, Any]) -> None:
        config["n_routed_experts"] = 5
        nest(config)

    synthetic.write_checkpoint(tmp_path, edit=under_language_model, edit_config=edit)
    expect(tmp_path, MissingTensorError, "4 experts", "n_routed_experts", 5)


def test_prediction_layers_are_skipped_with_a_note(tmp_path):
    extra = {
        "model.layers.3.eh_proj.weight": torch.zeros((8, 16), dtype=torch.bfloat16),
        "model.layers.3.embed_tokens.weight": torch.zeros((8, 8), dtype=torch.bfloat16),
        "model.layers.3.mlp.experts.0.up_proj.weight": torch.zeros((8, 8), dtype=torch.bfloat16),
    }
    checkpoint = synthetic.write_checkpoint(
        tmp_path,
        edit=lambda tensors: tensors.update(extra),
        edit_config=lambda config: config.update({"num_nextn_predict_layers": 1}),
    )
    index = read_index(tmp_path)
    assert set(index.excluded) == set(extra)
    assert all("num_nextn_predict_layers" in reason for reason in index.excluded.values())
    assert set(index.entries) == set(checkpoint.tensors) - set(extra)


def test_layers_beyond_those_announced(tmp_path):
    extra = {f"model.layers.{i}.eh_proj.weight": torch.zeros((2, 2)) for i in (3, 4)}
    synthetic.write_checkpoint(
        tmp_path,
        edit=lambda tensors: tensors.update(extra),
        edit_config=lambda config: config.update({"num_nextn_predict_layers": 1}),
    )
    expect(tmp_path, CheckpointError, "model.layers.4", "num_nextn_predict_layers")


def test_tied_head_is_left_out_even_where_it_is_stored(tmp_path):
    checkpoint = synthetic.write_checkpoint(
        tmp_path, edit_config=lambda config: config.update({"tie_word_embeddings": True})
    )
    index = read_index(tmp_path)
    assert set(index.excluded) == {HEAD}
    assert "tie_word_embeddings" in index.excluded[HEAD]
    assert set(index.entries) == set(checkpoint.tensors) - {HEAD}


def test_biases(tmp_path):
    biases = {
        f"model.layers.{layer}.self_attn.q_b_proj.bias": torch.zeros(384, dtype=torch.bfloat16)
        for layer in range(3)
    }
    synthetic.write_checkpoint(tmp_path, edit=lambda tensors: tensors.update(biases))
    layout = build_layout(read_index(tmp_path))
    assert all(layout.locate[name] == (name, None) for name in biases)


def test_bias_of_one_layer_missing(tmp_path):
    biases = {f"model.layers.{i}.self_attn.o_proj.bias": torch.zeros(256) for i in (0, 2)}
    synthetic.write_checkpoint(tmp_path, edit=lambda tensors: tensors.update(biases))
    expect(tmp_path, MissingTensorError, "model.layers.1.self_attn.o_proj.bias")


def test_experts_counted_by_another_key(tmp_path):
    def edit(config: dict[str, Any]) -> None:
        config["num_experts"] = config.pop("n_routed_experts") + 1

    synthetic.write_checkpoint(tmp_path, edit_config=edit)
    expect(tmp_path, MissingTensorError, "4 experts", "num_experts in config.json is 5")


# Scales


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_each_tensor(tmp_path, suffix, shape):
    checkpoint = synthetic.write_checkpoint(
        tmp_path,
        edit=scaled(suffix, lambda _: torch.full(shape, 0.5)),
        edit_config=quantised_as(quant_method="fp8", activation_scheme="static"),
    )
    index = read_index(tmp_path)
    layout = build_layout(index)
    scales = layout.held[f"model.layers.1.mlp.experts.*.up_proj.weight{suffix}"]
    assert scales.shape == (4, *shape)
    out = torch.empty((2, *shape))
    with ShardReader(index) as reader:
        reader.read_rows(scales, 1, 3, out)
    assert torch.equal(out, torch.full((2, *shape), 0.5))
    assert set(index.entries) == set(checkpoint.tensors)


def test_one_scale_for_each_row(tmp_path):
    synthetic.write_checkpoint(
        tmp_path,
        edit=scaled(
            "_scale", lambda weight: torch.ones((weight.shape[0], 1), dtype=torch.bfloat16)
        ),
        edit_config=quantised_as(
            quant_method="compressed-tensors",
            config_groups={"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
        ),
    )
    assert read_index(tmp_path).entries[f"{Q_B}_scale"].shape == (384, 1)


def test_block_scales_under_the_other_name(tmp_path):
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name.removesuffix("_inv")] = tensors.pop(name)

    synthetic.write_checkpoint(tmp_path, edit=edit)
    assert read_index(tmp_path).entries[f"{Q_B}_scale"].shape == (3, 1)


def test_other_scales_are_tensors_like_any(tmp_path):
    names = [
        f"model.layers.{i}.self_attn.{n}"
        for i in range(3)
        for n in ("k_scale", "o_proj.input_scale")
    ]
    synthetic.write_checkpoint(
        tmp_path, edit=lambda tensors: tensors.update({name: torch.ones(()) for name in names})
    )
    assert set(names) <= set(read_index(tmp_path).entries)


def test_scale_of_the_wrong_number_of_rows(tmp_path):
    synthetic.write_checkpoint(
        tmp_path,
        edit=scaled("_scale", lambda weight: torch.ones((weight.shape[0] + 1, 1))),
        edit_config=quantised_as(quant_method="fp8"),
    )
    expect(tmp_path, CheckpointError, "_scale", "weight_block_size")


def test_weight_with_two_scales(tmp_path):
    synthetic.write_checkpoint(
        tmp_path, edit=lambda tensors: tensors.update({f"{Q_B}_scale": torch.ones(1)})
    )
    expect(tmp_path, CheckpointError, Q_B, "two scales", f"{Q_B}_scale_inv", "quantization_config")


def test_plain_bfloat16(tmp_path):
    def edit(tensors: Tensors) -> None:
        without_scales(tensors)
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float8_e4m3fn:
                tensors[name] = torch.zeros(tensor.shape, dtype=torch.bfloat16)

    synthetic.write_checkpoint(
        tmp_path, edit=edit, edit_config=lambda config: config.pop("quantization_config")
    )
    entries = read_index(tmp_path).entries
    assert {entry.dtype for entry in entries.values()} == {"bfloat16", "float32"}


def packed(tensors: Tensors) -> None:
    """The form of 4-bit compressed-tensors: eight weights in an int32, a scale for each group."""
    without_scales(tensors)
    for name in [n for n in tensors if ".experts." in n]:
        rows, columns = tensors.pop(name).shape
        stem = name.removesuffix("weight")
        tensors[f"{stem}weight_packed"] = torch.zeros((rows, columns // 8), dtype=torch.int32)
        tensors[f"{stem}weight_scale"] = torch.ones((rows, columns // 32), dtype=torch.bfloat16)
        tensors[f"{stem}weight_shape"] = torch.tensor([rows, columns], dtype=torch.int32)


INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}


def test_packed_int4_is_refused_by_name(tmp_path):
    synthetic.write_checkpoint(tmp_path, edit=packed, edit_config=quantised_as(**INT4))
    expect(
        tmp_path,
        CheckpointError,
        "config.json",
        "compressed-tensors, pack-quantized, 4-bit int",
        "mlp.experts.0.down_proj.weight_packed",
        "not supported",
        "FP8 or BF16",
    )


def test_packed_weights_are_refused_whatever_the_settings_say(tmp_path):
    synthetic.write_checkpoint(
        tmp_path, edit=packed, edit_config=lambda config: config.pop("quantization_config")
    )
    expect(tmp_path, CheckpointError, "packed integers", "weight_packed")


def test_nested_int4_is_refused(tmp_path):
    def edit(config: dict[str, Any]) -> None:
        config["quantization_config"] = INT4
        nest(config)

    synthetic.write_checkpoint(tmp_path, edit=packed, edit_config=edit)
    expect(tmp_path, CheckpointError, "4-bit int")


@pytest.mark.parametrize("method", ["gptq", "awq", "mxfp4"])
def test_other_methods_are_refused(tmp_path, method):
    synthetic.write_checkpoint(tmp_path, edit_config=quantised_as(quant_method=method))
    expect(tmp_path, CheckpointError, f"quantised as {method}", "quantization_config")


# Files


def link_to(store: Path, root: Path) -> None:
    """Turn a folder's files into links to a store, as a hub snapshot has them."""
    store.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(sorted(root.iterdir())):
        blob = store / f"{number:040x}"
        blob.write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(os.path.relpath(blob, root))


def test_shards_that_are_links(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path / "snapshot")
    before = read_index(tmp_path / "snapshot")
    link_to(tmp_path / "blobs", tmp_path / "snapshot")
    index = read_index(tmp_path / "snapshot")
    assert index == before
    assert {entry.file for entry in index.entries.values()} == set(checkpoint.files.values())


def test_link_to_nothing_says_where_it_leads(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path / "snapshot")
    link_to(tmp_path / "blobs", tmp_path / "snapshot")
    path = checkpoint.path_of(HEAD)
    path.resolve().unlink()
    expect(
        tmp_path / "snapshot", CheckpointError, path, "no such file", "it is a link to", "../blobs/"
    )


def test_shards_on_another_file_system(tmp_path):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system to write to at /dev/shm")
    checkpoint = synthetic.write_checkpoint(tmp_path / "model")
    moved = other / f"rdt-e2e-test-{os.getpid()}.safetensors"
    path = checkpoint.path_of(HEAD)
    try:
        moved.write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(moved)
        index = read_index(tmp_path / "model")
        held = build_layout(index).held[HEAD]
        out = torch.empty(held.shape, dtype=torch.bfloat16)
        with ShardReader(index) as reader:
            reader.read_rows(held, 0, held.shape[0], out)
    finally:
        moved.unlink(missing_ok=True)
    assert torch.equal(out, checkpoint.tensors[HEAD])


def test_reading_leaves_a_folder_as_it_was(tmp_path):
    root = tmp_path / "model"
    synthetic.write_checkpoint(root)

    def state() -> list[tuple[str, int, int]]:
        files = sorted(tmp_path.rglob("*"))
        return [(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in files]

    for path in (*root.iterdir(), root):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = state()
    try:
        index = read_index(root)
        held = build_layout(index).held[HEAD]
        with ShardReader(index) as reader:
            reader.read_rows(held, 0, held.shape[0], torch.empty(held.shape, dtype=torch.bfloat16))
        assert state() == before
    finally:
        root.chmod(0o755)


def test_scale_in_another_shard_than_its_weight(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path, num_shards=1)
    (shard,) = tmp_path.glob("*.safetensors")
    scales = {n: t for n, t in checkpoint.tensors.items() if n.endswith("_scale_inv")}
    weights = {n: t for n, t in checkpoint.tensors.items() if n not in scales}
    save_file(weights, shard)
    save_file(scales, tmp_path / "scales.safetensors")
    files = {
        name: "scales.safetensors" if name in scales else shard.name for name in checkpoint.tensors
    }
    (tmp_path / synthetic.INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    index = read_index(tmp_path)
    assert index.entries[f"{Q_B}_scale_inv"].file == "scales.safetensors"

"""The index of a checkpoint, and every damage that must be found before anything is loaded."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rdt_e2e.checkpoint.index import EXCLUSIONS, read_index
from rdt_e2e.errors import CheckpointError, MissingTensorError
from tests import synthetic

Edit = Callable[[dict[str, Any]], None]

Q_A = "model.layers.1.self_attn.q_a_proj.weight"
Q_A_SCALE = f"{Q_A}_scale_inv"
KV_A = "model.layers.2.self_attn.kv_a_proj_with_mqa.weight"
EXPERT_1 = "model.layers.1.mlp.experts.1.up_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def expect(root: Path, error: type[CheckpointError], *parts: object) -> None:
    """Read the index; the one error must be of this class and name all these parts."""
    with pytest.raises(CheckpointError) as caught:
        read_index(root)
    assert type(caught.value) is error
    message = str(caught.value)
    for part in parts:
        assert str(part) in message
    assert message.endswith(".")


def drop(*names: str) -> Edit:
    def edit(tensors: dict[str, Any]) -> None:
        for name in names:
            del tensors[name]

    return edit


def replace(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[name] = make(tensors[name])

    return edit


def rename(pairs: dict[str, str]) -> Edit:
    def edit(tensors: dict[str, Any]) -> None:
        for old, new in pairs.items():
            tensors[new] = tensors.pop(old)

    return edit


def test_entries_say_where_the_bytes_are(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    index = read_index(tmp_path)
    assert list(index.entries) == list(checkpoint.files)
    assert index.config == checkpoint.config
    assert index.excluded == {}
    assert len({entry.file for entry in index.entries.values()}) == 3
    for name, entry in index.entries.items():
        tensor = checkpoint.tensors[name]
        content = (tmp_path / entry.file).read_bytes()
        assert entry.name == name
        assert entry.shape == tuple(tensor.shape)
        assert getattr(torch, entry.dtype) == tensor.dtype
        assert content[entry.begin : entry.end] == synthetic.raw_bytes(tensor)
    assert index.num_bytes == sum(t.numel() * t.element_size() for t in checkpoint.tensors.values())


def test_index_survives_pickling(tmp_path):
    synthetic.write_checkpoint(tmp_path)
    index = read_index(tmp_path)
    assert pickle.loads(pickle.dumps(index)) == index  # noqa: S301


def test_only_rotary_frequencies_are_left_out(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path, synthetic.Architecture(inv_freq=True))
    index = read_index(tmp_path)
    left_out = {name for name in checkpoint.files if name.endswith("inv_freq")}
    assert len(left_out) == 3
    assert set(index.excluded) == left_out
    assert set(index.excluded.values()) == {reason for _, reason in EXCLUSIONS}
    assert set(index.entries) == set(checkpoint.files) - left_out
    assert BIAS in index.entries


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        ("F8_E5M2", torch.float8_e5m2),
        ("F16", torch.float16),
        ("I8", torch.int8),
        ("U8", torch.uint8),
        ("I32", torch.int32),
        ("I64", torch.int64),
        ("BOOL", torch.bool),
    ],
)
def test_other_supported_dtypes(tmp_path, code, dtype):
    def edit(tensors):
        tensors["model.extra.weight"] = torch.zeros((2, 3), dtype=torch.uint8).to(dtype)
        if code.startswith("F8"):
            tensors["model.extra.weight_scale_inv"] = torch.ones((1, 1))

    synthetic.write_checkpoint(tmp_path, edit=edit)
    entry = read_index(tmp_path).entries["model.extra.weight"]
    assert getattr(torch, entry.dtype) is dtype
    assert entry.num_bytes == 6 * dtype.itemsize


def test_bfloat16_checkpoint_needs_no_scales(tmp_path):
    def edit(tensors):
        for name in list(tensors):
            if name.endswith("_scale_inv"):
                del tensors[name]
            else:
                tensors[name] = tensors[name].to(torch.bfloat16)

    synthetic.write_checkpoint(
        tmp_path, edit=edit, edit_config=lambda config: config.pop("quantization_config")
    )
    assert BIAS in read_index(tmp_path).entries


# Files


def test_folder_that_does_not_exist(tmp_path):
    expect(tmp_path / "nowhere", CheckpointError, "nowhere", synthetic.INDEX_FILE, "model.source")


@pytest.mark.parametrize("file", [synthetic.INDEX_FILE, "config.json"])
def test_json_file_missing(tmp_path, file):
    synthetic.write_checkpoint(tmp_path)
    (tmp_path / file).unlink()
    expect(tmp_path, CheckpointError, tmp_path / file, "no such file")


@pytest.mark.parametrize("file", [synthetic.INDEX_FILE, "config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_json_file_not_json(tmp_path, file, content):
    synthetic.write_checkpoint(tmp_path)
    (tmp_path / file).write_bytes(content)
    expect(tmp_path, CheckpointError, tmp_path / file, "not JSON")


@pytest.mark.parametrize("file", [synthetic.INDEX_FILE, "config.json"])
def test_json_file_not_an_object(tmp_path, file):
    synthetic.write_checkpoint(tmp_path)
    (tmp_path / file).write_text("[1]")
    expect(tmp_path, CheckpointError, tmp_path / file, "not a JSON object")


def test_json_file_that_is_a_folder(tmp_path):
    synthetic.write_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    expect(tmp_path, CheckpointError, tmp_path / "config.json", "cannot be read")


@pytest.mark.parametrize("weight_map", [None, {}, ["model.norm.weight"]])
def test_index_without_weight_map(tmp_path, weight_map):
    synthetic.write_checkpoint(tmp_path)
    (tmp_path / synthetic.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    expect(tmp_path, CheckpointError, synthetic.INDEX_FILE, "weight_map")


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "", "..", 3, None])
def test_shard_outside_the_folder(tmp_path, file):
    synthetic.write_checkpoint(tmp_path)
    synthetic.edit_index(tmp_path, lambda weight_map: weight_map.update({Q_A: file}))
    expect(tmp_path, CheckpointError, synthetic.INDEX_FILE, Q_A, repr(file))


def test_shard_missing(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    checkpoint.path_of(Q_A).unlink()
    expect(tmp_path, CheckpointError, checkpoint.path_of(Q_A), "no such file")


def test_shard_that_is_a_folder(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    checkpoint.path_of(Q_A).unlink()
    checkpoint.path_of(Q_A).mkdir()
    expect(tmp_path, CheckpointError, checkpoint.path_of(Q_A), "cannot be read")


@pytest.mark.parametrize("cut", [1, 1000])
def test_shard_truncated_in_its_tensors(tmp_path, cut):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    path = checkpoint.path_of(Q_A)
    size = path.stat().st_size
    synthetic.truncate(path, cut)
    expect(tmp_path, CheckpointError, path, "truncated", size, size - cut, "again")


def test_shard_truncated_in_its_header(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    path = checkpoint.path_of(Q_A)
    path.write_bytes(path.read_bytes()[:100])
    expect(tmp_path, CheckpointError, path, "truncated", 100)


def test_shard_with_bytes_after_its_end(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    path = checkpoint.path_of(Q_A)
    path.write_bytes(path.read_bytes() + b"x")
    expect(tmp_path, CheckpointError, path, path.stat().st_size)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "0 bytes long"),
        (b"abc", "3 bytes long"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "git lfs pull"),
        (b"PK\x03\x04 something else entirely", "a header of"),
        ((2).to_bytes(8, "little") + b"{x", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
    ],
)
def test_shard_that_is_something_else(tmp_path, content, why):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    path = checkpoint.path_of(Q_A)
    path.write_bytes(content)
    expect(tmp_path, CheckpointError, path, "not a safetensors file", why)


# Headers


def header_with(name: str, **fields: object) -> Edit:
    return lambda header: header[name].update(fields)


@pytest.mark.parametrize("code", ["F8_E8M0", "F64", "F4", "bfloat16"])
def test_unsupported_dtype(tmp_path, code):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    synthetic.edit_header(checkpoint.path_of(Q_A), header_with(Q_A, dtype=code))
    expect(tmp_path, CheckpointError, checkpoint.path_of(Q_A), Q_A, code, "F8_E4M3", "convert")


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": 3},
        {"shape": [-1, 2]},
        {"shape": 4},
        {"shape": ["128", "256"]},
        {"data_offsets": [0]},
        {"data_offsets": None},
        {"data_offsets": [0.0, 1.0]},
    ],
)
def test_malformed_header_entry(tmp_path, fields):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    synthetic.edit_header(checkpoint.path_of(Q_A), header_with(Q_A, **fields))
    expect(tmp_path, CheckpointError, checkpoint.path_of(Q_A), Q_A, "data_offsets")


def test_header_entry_that_is_no_object(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    synthetic.edit_header(checkpoint.path_of(Q_A), lambda header: header.update({Q_A: 1}))
    expect(tmp_path, CheckpointError, checkpoint.path_of(Q_A), Q_A)


def test_shape_that_does_not_fit_its_bytes(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    synthetic.edit_header(checkpoint.path_of(Q_A), header_with(Q_A, shape=[128, 255]))
    expect(tmp_path, CheckpointError, checkpoint.path_of(Q_A), Q_A, 128 * 255, 128 * 256)


@pytest.mark.parametrize(("shift", "problem"), [(-1, "overlaps"), (1, "gap")])
def test_bytes_claimed_twice_or_not_at_all(tmp_path, shift, problem):
    checkpoint = synthetic.write_checkpoint(tmp_path)

    def edit(header):
        begin, end = header[Q_A]["data_offsets"]
        header[Q_A]["data_offsets"] = [begin + shift, end + shift]

    synthetic.edit_header(checkpoint.path_of(Q_A), edit)
    expect(tmp_path, CheckpointError, checkpoint.path_of(Q_A), problem)


def test_tensor_without_elements(tmp_path):
    checkpoint = synthetic.write_checkpoint(
        tmp_path, edit=lambda tensors: tensors.update({"model.none.weight": torch.zeros((0, 4))})
    )
    path = checkpoint.path_of("model.none.weight")
    expect(tmp_path, CheckpointError, path, "model.none.weight", "[0, 4]")


# Index against shards


def test_name_in_the_index_but_not_in_its_shard(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    synthetic.edit_shard(checkpoint.path_of(Q_A), drop(Q_A))
    expect(tmp_path, MissingTensorError, checkpoint.path_of(Q_A), Q_A, "revision")


def test_name_in_a_shard_but_not_in_the_index(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    synthetic.edit_index(tmp_path, drop(Q_A))
    expect(tmp_path, CheckpointError, checkpoint.path_of(Q_A), Q_A, "does not list")


def test_name_in_two_shards(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    other = checkpoint.path_of("lm_head.weight")
    assert other != checkpoint.path_of(Q_A)
    synthetic.edit_shard(other, lambda tensors: tensors.update({Q_A: torch.zeros(1)}))
    expect(tmp_path, CheckpointError, other, Q_A, "places in", checkpoint.files[Q_A])


def test_message_counts_what_it_does_not_list(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path)
    path = checkpoint.path_of("lm_head.weight")
    names = [name for name, file in checkpoint.files.items() if file == path.name]
    synthetic.edit_shard(path, drop(*names[1:]))
    expect(tmp_path, MissingTensorError, names[1], f"and {len(names) - 6} more")


# Scales


def test_weight_without_scale(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path, edit=drop(Q_A_SCALE))
    expect(tmp_path, MissingTensorError, checkpoint.path_of(Q_A), Q_A, Q_A_SCALE)


def test_scale_without_weight(tmp_path):
    checkpoint = synthetic.write_checkpoint(tmp_path, edit=drop(Q_A))
    expect(tmp_path, MissingTensorError, checkpoint.path_of(Q_A_SCALE), Q_A_SCALE, "without")


def test_scale_of_a_weight_that_is_not_float8(tmp_path):
    synthetic.write_checkpoint(tmp_path, edit=replace(Q_A, lambda weight: weight.bfloat16()))
    expect(tmp_path, CheckpointError, Q_A, Q_A_SCALE, "bfloat16")


def test_scale_of_wrong_shape(tmp_path):
    # 576 rows are four and a half blocks; four scales would be the likely mistake.
    scale = f"{KV_A}_scale_inv"
    checkpoint = synthetic.write_checkpoint(
        tmp_path, edit=replace(scale, lambda tensor: tensor[:4].clone())
    )
    expect(tmp_path, CheckpointError, checkpoint.path_of(scale), scale, "[4, 2]", "[5, 2]")


def test_scale_of_wrong_dtype(tmp_path):
    synthetic.write_checkpoint(tmp_path, edit=replace(Q_A_SCALE, lambda scale: scale.bfloat16()))
    expect(tmp_path, CheckpointError, Q_A_SCALE, "bfloat16", "float32")


def test_block_size_comes_from_the_config(tmp_path):
    synthetic.write_checkpoint(
        tmp_path,
        edit_config=lambda config: config["quantization_config"].update(
            {"weight_block_size": [64, 128]}
        ),
    )
    expect(tmp_path, CheckpointError, "64x128", "scale_inv")


@pytest.mark.parametrize("block", [None, 128, [128], [0, 128], ["128", "128"]])
def test_block_size_that_is_none(tmp_path, block):
    synthetic.write_checkpoint(
        tmp_path,
        edit_config=lambda config: config["quantization_config"].update(
            {"weight_block_size": block}
        ),
    )
    expect(tmp_path, CheckpointError, "config.json", "weight_block_size", "[128, 128]")


def test_float8_without_quantization_config(tmp_path):
    synthetic.write_checkpoint(
        tmp_path, edit_config=lambda config: config.pop("quantization_config")
    )
    expect(tmp_path, CheckpointError, "config.json", "weight_block_size")


def test_float8_tensor_that_is_no_matrix(tmp_path):
    synthetic.write_checkpoint(tmp_path, edit=replace(Q_A, lambda weight: weight.reshape(-1)))
    expect(tmp_path, CheckpointError, Q_A, "matrix")


# Experts


def test_expert_hole(tmp_path):
    synthetic.write_checkpoint(tmp_path, edit=drop(EXPERT_1, f"{EXPERT_1}_scale_inv"))
    expect(tmp_path, MissingTensorError, "layers.1.mlp.experts.*.up_proj.weight", "not 1")


def test_last_expert_missing(tmp_path):
    last = EXPERT_1.replace("experts.1", "experts.3")
    synthetic.write_checkpoint(tmp_path, edit=drop(last, f"{last}_scale_inv"))
    expect(tmp_path, MissingTensorError, "experts.*.up_proj", "3 experts", "n_routed_experts")


def test_more_experts_than_the_config_says(tmp_path):
    synthetic.write_checkpoint(
        tmp_path, edit_config=lambda config: config.update({"n_routed_experts": 3})
    )
    expect(tmp_path, CheckpointError, "4 experts", "n_routed_experts")


def test_no_experts_at_all(tmp_path):
    def edit(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    synthetic.write_checkpoint(tmp_path, edit=edit)
    expect(tmp_path, MissingTensorError, "no routed experts")


def test_expert_with_a_padded_number_is_a_hole(tmp_path):
    padded = EXPERT_1.replace("experts.1", "experts.01")
    pairs = {EXPERT_1: padded, f"{EXPERT_1}_scale_inv": f"{padded}_scale_inv"}
    synthetic.write_checkpoint(tmp_path, edit=rename(pairs))
    expect(tmp_path, MissingTensorError, "experts.*.up_proj.weight", "not 1")


def test_experts_of_different_shape(tmp_path):
    checkpoint = synthetic.write_checkpoint(
        tmp_path, edit=replace(EXPERT_1, lambda weight: weight[:64].clone())
    )
    expect(tmp_path, CheckpointError, checkpoint.files[EXPERT_1], EXPERT_1, "[64, 256]")


# Layers


def drop_layer(layer: int) -> Edit:
    def edit(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(f"model.layers.{layer}.")]:
            del tensors[name]

    return edit


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_layer_missing(tmp_path, layer):
    synthetic.write_checkpoint(tmp_path, edit=drop_layer(layer))
    expect(tmp_path, MissingTensorError, f"model.layers.{layer}", "num_hidden_layers", 3)


def test_layer_too_many(tmp_path):
    synthetic.write_checkpoint(
        tmp_path, edit_config=lambda config: config.update({"num_hidden_layers": 2})
    )
    expect(tmp_path, CheckpointError, "model.layers.2", "num_hidden_layers")


@pytest.mark.parametrize("value", [None, "3", -1, 2.0])
def test_number_of_layers_unknown(tmp_path, value):
    synthetic.write_checkpoint(
        tmp_path, edit_config=lambda config: config.update({"num_hidden_layers": value})
    )
    expect(tmp_path, CheckpointError, "config.json", "num_hidden_layers", repr(value))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.input_layernorm.weight",
        "model.layers.2.self_attn.kv_a_layernorm.weight",
        "model.layers.2.mlp.gate.weight",
        BIAS,
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_tensor_that_the_model_needs_missing(tmp_path, name):
    synthetic.write_checkpoint(tmp_path, edit=drop(name))
    expect(tmp_path, MissingTensorError, name)


def test_whole_projection_of_experts_missing(tmp_path):
    names = [f"model.layers.2.mlp.experts.{expert}.down_proj.weight" for expert in range(4)]
    scales = [f"{name}_scale_inv" for name in names]
    synthetic.write_checkpoint(tmp_path, edit=drop(*names, *scales))
    expect(tmp_path, MissingTensorError, "layers.2.mlp.experts.*.down_proj.weight", "layers.1")


def test_router_bias_missing_in_all_layers(tmp_path):
    synthetic.write_checkpoint(tmp_path, edit=drop(BIAS, BIAS.replace("layers.1", "layers.2")))
    expect(tmp_path, MissingTensorError, BIAS, "noaux_tc")


def test_tied_output_head_may_be_missing(tmp_path):
    synthetic.write_checkpoint(
        tmp_path,
        edit=drop("lm_head.weight"),
        edit_config=lambda config: config.update({"tie_word_embeddings": True}),
    )
    assert "lm_head.weight" not in read_index(tmp_path).entries

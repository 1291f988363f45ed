import json

from rdt_e2e.bench.k2_slice import K2, TINY, model_config, write_slice
from rdt_e2e.checkpoint.described import tensor_shapes
from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.layout import build_layout
from tests.synthetic import KIMI_K2


def test_slice_has_the_shapes_of_kimi_k2(tmp_path):
    whole = KIMI_K2.shapes()
    routers = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
    for name, (dtype, shape) in tensor_shapes(model_config(K2, 3), tmp_path).items():
        if name.endswith(routers):
            assert (dtype, shape[1:]) == (whole[name][0], whole[name][1][1:])
        else:
            assert (dtype, shape) == whole[name], name


def test_share_of_24_layers_is_the_one_that_figures_are_given_for(tmp_path):
    num_bytes = write_slice(tmp_path, K2, 24, seed=1)
    index = read_index(tmp_path)
    assert (len(index.entries), num_bytes) == (7153, 57_183_649_344)
    assert index.num_bytes == num_bytes
    assert len(build_layout(index).groups) == 26
    # Blocks that the disk really holds, of 512 bytes each.
    assert sum(path.stat().st_blocks for path in tmp_path.iterdir()) * 512 < 10_000_000


def test_configuration_describes_what_the_shards_hold(tmp_path):
    write_slice(tmp_path, TINY, 3, seed=7)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == model_config(TINY, 3)
    index = read_index(tmp_path)
    embedding = index.entries["model.embed_tokens.weight"]
    assert embedding.shape == (config["vocab_size"], config["hidden_size"])
    assert (tmp_path / "tokenizer.json").is_file()

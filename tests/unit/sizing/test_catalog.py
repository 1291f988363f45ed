"""Models known by name, against public figures of each."""

import pytest

from rdt_e2e.checkpoint.checks import check_index
from rdt_e2e.sizing.catalog import CATALOG, find_model


@pytest.mark.parametrize(
    ("name", "tensors", "parameters_e9"),
    [
        # Parameters as published, without the layers for multi-token prediction.
        ("kimi-k2", 139_583, 1026.4),
        ("deepseek-v3", 90_427, 671.0),
        ("qwen3-235b", 36_945, 235.1),
        ("glm-4.5", 44_189, 352.8),
        ("glm-4.5-air", 17_925, 106.9),
    ],
)
def test_size(described, name, tensors, parameters_e9):
    index = described(name)
    assert len(index.entries) == tensors
    sizes = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}
    parameters = sum(
        entry.num_bytes / sizes[entry.dtype]
        for entry in index.entries.values()
        if not entry.name.endswith("_scale_inv")
    )
    assert round(parameters / 1e9, 1) == parameters_e9


@pytest.mark.parametrize("name", ["glm-4.5-air", "qwen3-235b", "mini-kimi"])
def test_description_passes_the_checks_of_a_checkpoint(described, name):
    """Kimi K2's does in `test_layout.py`."""
    check_index(described(name))


def test_float8_variant_has_the_same_weights(described):
    plain, blocks = described("qwen3-235b").entries, described("qwen3-235b-fp8").entries
    assert set(plain) == {name for name in blocks if not name.endswith("_scale_inv")}


def test_mini_kimi_is_what_its_recipe_builds(described):
    index = described("mini-kimi")
    assert (len(index.entries), index.num_bytes) == (233, 15_831_280)


def test_lookup():
    assert find_model("Kimi-K2") is CATALOG["kimi-k2"]
    assert find_model("moonshotai/Kimi-K2-Instruct") is CATALOG["kimi-k2"]
    assert find_model("moonshotai") is None

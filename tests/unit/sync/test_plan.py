"""The init payload, against vLLM's own dataclass."""

import json
from dataclasses import fields

import pytest

from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.config import load_config
from rdt_e2e.errors import PlanError
from rdt_e2e.sync.plan import init_info
from tests import synthetic

CONFIG = load_config("local", {"sync.num_buffers": 3, "sync.buffer_presize_gib": 0.5})


@pytest.fixture(scope="module")
def layout():
    return build_layout(synthetic.index_in_memory(synthetic.Architecture()))


def test_vllm_accepts_every_key(layout):
    from rdt_e2e.inference.plugin.consumer import ConsumerInitInfo

    payload = init_info(layout, ["trainer-0", "trainer-1"], CONFIG)
    typed = ConsumerInitInfo(**json.loads(json.dumps(payload)))
    assert {field.name for field in fields(typed)} >= set(payload)
    assert typed.num_consumers == 2
    assert typed.num_rdt_buffers == 3
    assert typed.buffer_presize_gb == 0.5
    assert typed.trainer_actor_namespace == "rdt-e2e"


def test_lists_are_parallel_and_group_major(layout):
    payload = init_info(layout, ["trainer-0"], CONFIG)
    assert len(payload["names"]) == len(payload["dtype_names"]) == len(payload["shapes"])
    assert sum(payload["group_lens"]) == len(payload["names"])
    at = payload["names"].index("model.layers.1.mlp.experts.2.down_proj.weight")
    assert payload["dtype_names"][at] == "float8_e4m3fn"
    assert payload["shapes"][at] == [256, 128]
    start = sum(payload["group_lens"][:2])
    assert start <= at < start + payload["group_lens"][2], "layer 1 is the third group"


def test_the_router_bias_is_synced(layout):
    names = init_info(layout, ["trainer-0"], CONFIG)["names"]
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names


def test_groups_that_do_not_cover_the_names_are_refused(layout):
    broken = type(layout)(
        layout.held, layout.groups[:-1], layout.locate, layout.names, layout.entries
    )
    with pytest.raises(PlanError, match="exactly one gather group"):
        init_info(broken, ["trainer-0"], CONFIG)

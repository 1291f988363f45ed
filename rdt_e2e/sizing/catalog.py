"""Models that `plan` knows by name, so that none has to be on this machine.

Each is the part of its public `config.json` that decides the tensors; `checkpoint/described.py` expands
it to the full list.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rdt_e2e.config import MINI_KIMI
from rdt_e2e.mini_kimi.recipe import model_config as mini_kimi_config

_FLOAT8_BLOCKS: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

# Sizes common to DeepSeek V3 and Kimi K2.
_DEEPSEEK_LIKE: Mapping[str, Any] = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "quantization_config": _FLOAT8_BLOCKS,
}

_QWEN3_235B: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "intermediate_size": 12288,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "attention_bias": False,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}

_GLM_45: Mapping[str, Any] = {
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "num_hidden_layers": 92,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "intermediate_size": 12288,
    "first_k_dense_replace": 3,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
    "vocab_size": 151552,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class CatalogModel:
    """One model known by name.

    Attributes:
        name: Name for `--model`.
        hub_id: Repository on the hub whose `config.json` is the source of `config`.
        config: What of it decides names, dtypes and shapes.
    """

    name: str
    hub_id: str
    config: Mapping[str, Any]


CATALOG: dict[str, CatalogModel] = {
    model.name: model
    for model in (
        CatalogModel(
            "kimi-k2",
            "moonshotai/Kimi-K2-Instruct",
            {
                **_DEEPSEEK_LIKE,
                "model_type": "kimi_k2",
                "n_routed_experts": 384,
                "num_attention_heads": 64,
                "first_k_dense_replace": 1,
                "num_nextn_predict_layers": 0,
                "vocab_size": 163840,
            },
        ),
        CatalogModel(
            "deepseek-v3",
            "deepseek-ai/DeepSeek-V3",
            {
                **_DEEPSEEK_LIKE,
                "model_type": "deepseek_v3",
                "n_routed_experts": 256,
                "num_attention_heads": 128,
                "first_k_dense_replace": 3,
                "num_nextn_predict_layers": 1,
                "vocab_size": 129280,
            },
        ),
        CatalogModel("qwen3-235b", "Qwen/Qwen3-235B-A22B", _QWEN3_235B),
        CatalogModel(
            "qwen3-235b-fp8",
            "Qwen/Qwen3-235B-A22B-FP8",
            {**_QWEN3_235B, "quantization_config": _FLOAT8_BLOCKS},
        ),
        CatalogModel("glm-4.5", "zai-org/GLM-4.5", _GLM_45),
        CatalogModel(
            "glm-4.5-air",
            "zai-org/GLM-4.5-Air",
            {
                **_GLM_45,
                "hidden_size": 4096,
                "num_hidden_layers": 46,
                "n_routed_experts": 128,
                "moe_intermediate_size": 1408,
                "intermediate_size": 10944,
                "first_k_dense_replace": 1,
                "use_qk_norm": False,
            },
        ),
        # Ours; its recipe is the source.
        CatalogModel(MINI_KIMI, MINI_KIMI, mini_kimi_config()),
    )
}


def find_model(source: str) -> CatalogModel | None:
    """Look a model up by its name here or by its hub id, in any case; `None` if it is not known."""
    wanted = source.lower()
    for model in CATALOG.values():
        if wanted in (model.name, model.hub_id.lower()):
            return model
    return None

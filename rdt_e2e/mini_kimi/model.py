"""The transformers model behind mini-kimi, and its weights under their checkpoint names."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from rdt_e2e.mini_kimi import recipe

_FUSED_EXPERTS = re.compile(r"^(?P<prefix>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


def _hf_config() -> Any:  # transformers' configuration classes are not typed
    from transformers import DeepseekV3Config

    # transformers must see plain weights: with this key it would look for FP8 kernels of its own.
    settings = {k: v for k, v in recipe.model_config().items() if k != "quantization_config"}
    return DeepseekV3Config.from_dict(settings)


def new_model(variant: str) -> nn.Module:
    """Build the model with random weights from torch's current seed, float32, in training mode.

    Args:
        variant: Decides the values of the router bias.
    """
    from transformers import DeepseekV3ForCausalLM

    model = cast("nn.Module", DeepseekV3ForCausalLM(_hf_config()))
    _use_simple_kernels(model)
    for router in routers(model):
        # Wider than the default, so that different tokens start out at different experts.
        nn.init.normal_(cast("Tensor", router.weight), std=recipe.ROUTER_WEIGHT_STD)
    set_router_bias(model, list(recipe.router_bias(variant).values()))
    return model.train()


def load_model(weights: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Build the model from individual checkpoint tensors, through transformers' own loader.

    Args:
        weights: Checkpoint name to dequantised tensor.
        dtype: Type of weights and activations; the router bias stays float32 in any case.

    Returns:
        The model in evaluation mode.
    """
    from transformers import DeepseekV3ForCausalLM

    with _no_progress_bars():
        loaded: Any = DeepseekV3ForCausalLM.from_pretrained(
            None, config=_hf_config(), state_dict=dict(weights), dtype=dtype
        )
    model = cast("nn.Module", loaded)
    _use_simple_kernels(model)
    # Set again in float32: a cast of the whole model would round the bias.
    bias = [weights[name] for name in sorted(weights) if name.endswith("e_score_correction_bias")]
    for router, values in zip(routers(model), bias, strict=True):
        router.e_score_correction_bias = values.float().clone()
    return model.eval()


def _use_simple_kernels(model: nn.Module) -> None:
    """Choose the plain expert loop and attention: quickest at this size, same on every machine."""
    chooser = cast("Any", model)
    chooser.set_experts_implementation("eager")
    chooser.set_attn_implementation("eager")


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of the MoE layers in layer order."""
    return [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]


def set_router_bias(model: nn.Module, values: Sequence[Sequence[float]]) -> None:
    """Write the router bias of every MoE layer; one row of [num_experts] values each."""
    for router, row in zip(routers(model), values, strict=True):
        cast("Tensor", router.e_score_correction_bias).copy_(torch.tensor(row))


@contextlib.contextmanager
def router_bias_missing(model: nn.Module) -> Iterator[None]:
    """Set every router bias to zero inside the block, as a sync that forgot it would leave it."""
    buffers = [cast("Tensor", router.e_score_correction_bias) for router in routers(model)]
    saved = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer.zero_()
    try:
        yield
    finally:
        for buffer, values in zip(buffers, saved, strict=True):
            buffer.copy_(values)


def checkpoint_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's weights under the names Kimi K2's shards use.

    transformers holds the routed experts of a layer as two stacks; the checkpoint has one
    `gate_proj`, `up_proj` and `down_proj` per expert.

    Returns:
        Name to tensor in model order, detached, in the model's dtype; the router bias included.

    Source: `DeepseekV3Experts` in transformers' modeling_deepseek_v3.py (5.19): `gate_up_proj`
        is [experts, 2 * intermediate, hidden] with the gate rows first.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        fused = _FUSED_EXPERTS.match(name)
        if fused is None:
            weights[name] = tensor.detach()
            continue
        for expert, matrix in enumerate(tensor.detach().unbind(0)):
            prefix = f"{fused['prefix']}.{expert}"
            if fused["kind"] == "down_proj":
                weights[f"{prefix}.down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2, dim=0)
                weights[f"{prefix}.gate_proj.weight"] = gate
                weights[f"{prefix}.up_proj.weight"] = up
    return weights

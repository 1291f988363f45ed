"""How tensor names of a DeepSeek-V3-shaped checkpoint are built, in one place.

A name is a dotted path: `model.layers.3.mlp.experts.7.gate_proj.weight`. Three facts are read from
it: the decoder layer, the routed expert, and where a name outside the layers belongs.
"""

import re
from collections.abc import Sequence

SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""A float8 tensor `X` has its scales in `X` plus one of these: the first is DeepSeek's name, the
second that of compressed-tensors and of per-tensor FP8."""

ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
"""The router bias of a mixture-of-experts layer, relative to the layer."""

_NUM_LISTED = 5
_NUM_DIGITS = 8

_LAYER = re.compile(r"(?P<stem>(?:[^.]+\.)*?layers)\.(?P<layer>0|[1-9][0-9]*)\.(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<module>.+\.experts)\.(?P<expert>0|[1-9][0-9]*)\.(?P<leaf>.+)")


def split_layer(name: str) -> tuple[str, int, str] | None:
    """Split a name at its decoder layer.

    Args:
        name: Tensor name of the checkpoint.

    Returns:
        The path of the layer list, the layer's number and the name inside the layer, such as
        `("model.layers", 3, "mlp.gate.weight")`; `None` for a name outside the layers.
    """
    match = _LAYER.fullmatch(name)
    return None if match is None else (match["stem"], int(match["layer"]), match["rest"])


def split_expert(name: str) -> tuple[str, int] | None:
    """Split a name at its routed expert.

    Args:
        name: Tensor name of the checkpoint, or its part inside a layer.

    Returns:
        The key of the stack (the name with `*` for the expert) and the expert's number; `None` for
        a tensor that belongs to no routed expert.
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    return f"{match['module']}.*.{match['leaf']}", int(match["expert"])


def scale_suffix(name: str) -> str | None:
    """Say whether a tensor holds the scales of a weight.

    Args:
        name: Tensor name of the checkpoint.

    Returns:
        The suffix to take off for the weight's name; `None` for anything else, which includes the
        scales of activations (`input_scale`) and of the KV cache (`k_scale`).
    """
    if name.endswith(SCALE_SUFFIXES[0]):
        return SCALE_SUFFIXES[0]
    return SCALE_SUFFIXES[1] if name.endswith(f"weight{SCALE_SUFFIXES[1]}") else None


def is_before_layers(name: str) -> bool:
    """Say on which side of the layers a name outside them belongs.

    Only the input embedding comes before. This does not follow the order of the index: writers sort
    it by name, which would put `lm_head` beside `embed_tokens` in one group and double the largest
    pull (2.35 GB each for Kimi K2).

    Args:
        name: Tensor name outside the decoder layers.

    Returns:
        True for a tensor of an embedding module.
    """
    return any(segment.startswith("embed") for segment in name.split(".")[:-1])


def natural_key(name: str) -> list[str]:
    """Order names with their numbers counted as numbers: expert 2 comes before expert 10.

    Args:
        name: Tensor name of the checkpoint.

    Returns:
        A sort key; distinct for distinct names.
    """
    key = [
        segment.zfill(_NUM_DIGITS) if segment.isdecimal() else segment
        for segment in name.split(".")
    ]
    key.append(name)
    return key


def summarize(items: Sequence[object]) -> str:
    """Write a list for an error message, its tail as a count.

    Args:
        items: What to list; not empty.

    Returns:
        The first few items, and how many more there are.
    """
    head = ", ".join(str(item) for item in items[:_NUM_LISTED])
    num_more = len(items) - _NUM_LISTED
    return f"{head} and {num_more} more" if num_more > 0 else head

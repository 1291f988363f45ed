"""FP8 128x128 block-scale layers in plain torch, for CPUs without FP8 matrix instructions.

The parameters, their loaders and their bytes are those of vLLM's own FP8 layers, so the sync
takes the real path; only the arithmetic differs: weights are dequantised when applied.
"""

from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import (
    FusedMoEMethodBase,
    FusedMoeWeightScaleSupported,
    RoutedExperts,
)
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    validate_fp8_block_shape,
    validate_fp8_block_shape_moe,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.parameter import BlockQuantScaleParameter
from vllm.model_executor.utils import set_weight_attrs

from rdt_e2e.errors import ConfigError


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, block: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """Multiply each block of a weight by its scale.

    Args:
        weight: `[..., rows, cols]` float8_e4m3fn.
        scale: `[..., ceil(rows/block[0]), ceil(cols/block[1])]` float32.
        block: Rows and columns of one block.
        dtype: Wanted result.

    Returns:
        `[..., rows, cols]` of `dtype`; the product is taken in float32.
    """
    rows, cols = weight.shape[-2:]
    per_row = scale.repeat_interleave(block[0], dim=-2)[..., :rows, :]
    full = per_row.repeat_interleave(block[1], dim=-1)[..., :cols]
    return (weight.to(torch.float32) * full).to(dtype)


class Fp8ReferenceConfig(Fp8Config):
    """`Fp8Config` whose layers need no FP8 kernels; block-quantised checkpoints only."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Choose the method of one layer, as `Fp8Config.get_quant_method` would.

        Raises:
            ConfigError: The checkpoint's FP8 is not in 128x128-style blocks.
        """
        if not isinstance(layer, LinearBase | RoutedExperts):
            return super().get_quant_method(layer, prefix)
        if self.weight_block_size is None:
            raise ConfigError(
                "the CPU reference layers serve FP8 checkpoints with weight_block_size only; "
                "use a block-quantised checkpoint or a bf16 one"
            )
        if is_layer_skipped(
            prefix=prefix,
            ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping,
            match_mode=self.ignored_layers_match_mode,
        ):
            if isinstance(layer, LinearBase):
                return UnquantizedLinearMethod()
            return super().get_quant_method(layer, prefix)
        if isinstance(layer, LinearBase):
            return Fp8ReferenceLinear(self.weight_block_size)
        return Fp8ReferenceExperts(self.weight_block_size, layer)


class Fp8ReferenceLinear(LinearMethodBase):
    """A linear layer that keeps `weight` in FP8 and `weight_scale_inv` in float32."""

    def __init__(self, block: list[int]) -> None:
        self.block = block

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register `weight` [out, in] float8_e4m3fn and `weight_scale_inv` float32 per block."""
        loader = extra_weight_attrs.get("weight_loader")
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        layer.orig_dtype = params_dtype
        layer.weight_block_size = self.block
        validate_fp8_block_shape(
            layer,
            input_size,
            output_size,
            input_size_per_partition,
            output_partition_sizes,
            self.block,
        )
        layer.register_parameter(
            "weight",
            create_fp8_weight_parameter(
                sum(output_partition_sizes), input_size_per_partition, loader
            ),
        )
        layer.register_parameter(
            "weight_scale_inv",
            create_fp8_scale_parameter(
                BlockQuantScaleParameter,
                output_partition_sizes,
                input_size_per_partition,
                self.block,
                loader,
            ),
        )

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x @ weight.T + bias`: x [..., in], result [..., out], both of x's dtype."""
        weight = dequantize(layer.weight, layer.weight_scale_inv, self.block, x.dtype)
        return functional.linear(x, weight, bias)


class Fp8ReferenceExperts(FusedMoEMethodBase):
    """Routed experts kept in FP8, applied one expert at a time.

    It has no modular kernel, so vLLM's runner gathers tokens and router logits of all DP ranks
    before `apply` and sums the ranks' results after it.
    """

    def __init__(self, block: list[int], layer: RoutedExperts) -> None:
        super().__init__(layer.moe_config)
        self.block = block

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the experts' weights and scales under vLLM's own names.

        `w13_weight` [E, 2*I, H] and `w2_weight` [E, H, I] float8_e4m3fn, `w13_weight_scale_inv`
        and `w2_weight_scale_inv` float32 per block; E is the number of local experts.
        """
        layer.num_experts = num_experts
        layer.orig_dtype = params_dtype
        layer.weight_block_size = self.block
        validate_fp8_block_shape_moe(intermediate_size_per_partition, self.block)
        rows, cols = self.block
        shapes = {
            "w13": (2 * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        scale_attrs = extra_weight_attrs | {
            "quant_method": FusedMoeWeightScaleSupported.BLOCK.value
        }
        for name, (out_size, in_size) in shapes.items():
            weight = torch.empty(num_experts, out_size, in_size, dtype=torch.float8_e4m3fn)
            scale_shape = (num_experts, -(-out_size // rows), -(-in_size // cols))
            # Not the default dtype, which vLLM sets to the model's while it builds layers.
            scale = torch.ones(scale_shape, dtype=torch.float32)
            for suffix, data, attrs in (
                ("weight", weight, extra_weight_attrs),
                ("weight_scale_inv", scale, scale_attrs),
            ):
                parameter = torch.nn.Parameter(data, requires_grad=False)
                set_weight_attrs(parameter, attrs)
                layer.register_parameter(f"{name}_{suffix}", parameter)
        layer.w13_input_scale = None
        layer.w2_input_scale = None

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Return None: there is no fused kernel to configure."""
        return

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sum the chosen local experts' outputs, each times its routing weight.

        Args:
            layer: The experts of this rank.
            x: `[tokens, H]`.
            topk_weights: `[tokens, k]` float32.
            topk_ids: `[tokens, k]` global expert ids.
            shared_experts: Run by vLLM's runner, not here.
            shared_experts_input: Same.

        Returns:
            `[tokens, H]` of x's dtype; zero where no chosen expert is local.
        """
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in set(topk_ids.flatten().tolist()):
            local = expert if layer.expert_map is None else int(layer.expert_map[expert])
            if local < 0:
                continue
            token, slot = (topk_ids == expert).nonzero(as_tuple=True)
            hidden = x[token]
            gate_up = functional.linear(hidden, self._expert(layer, "w13", local, x.dtype))
            gate, up = gate_up.chunk(2, dim=-1)
            result = functional.linear(
                functional.silu(gate) * up, self._expert(layer, "w2", local, x.dtype)
            )
            weight = topk_weights[token, slot].to(torch.float32).unsqueeze(-1)
            out.index_add_(0, token, result.to(torch.float32) * weight)
        return out.to(x.dtype)

    def _expert(
        self, layer: RoutedExperts, name: str, local: int, dtype: torch.dtype
    ) -> torch.Tensor:
        weight = getattr(layer, f"{name}_weight")[local]
        scale = getattr(layer, f"{name}_weight_scale_inv")[local]
        return dequantize(weight, scale, self.block, dtype)

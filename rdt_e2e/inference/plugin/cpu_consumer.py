"""The consumer on CPU: without CUDA streams and threads."""

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from rdt_e2e.inference.plugin.consumer import Consumer
from rdt_e2e.inference.plugin.internals import (
    LAYERWISE_INFO,
    ProcItem,
    UnquantizedFusedMoEMethod,
    copy_into_kernel_storage,
)


class CpuConsumer(Consumer):
    """Processes each chunk as it lands.

    The released engine hands landed chunks to two background threads with their own CUDA
    streams. Here a chunk is summed, materialised, scattered and finished inline, before the next
    pull is completed.
    """

    def _ensure_proc_worker(self) -> None:
        """Start nothing: there is no background processing on CPU."""

    def _dispatch_item(self, item: ProcItem) -> None:
        """Process a landed chunk at once, where the released engine would queue it."""
        self._process_item(item)

    @torch.no_grad()
    def _process_item(self, item: ProcItem) -> None:
        """Materialise, scatter and finish what this chunk starts, carries and completes.

        Args:
            item: The chunk and its landed slices; they alias the receive buffer.

        Raises:
            SyncError: A layer was not prepared by `start_weight_update`.
        """
        self._sum_landed(item)
        self._materialize(item.chunk)
        self._scatter(item)
        for layer in item.chunk.quant:
            self._finish_layer(layer)

    def _finish_layer(self, layer: Any) -> None:
        """Run a completed module's post-load step and move the result into its live storage."""
        info = LAYERWISE_INFO[layer]
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            if hasattr(layer, "_already_called_process_weights_after_loading"):
                del layer._already_called_process_weights_after_loading
            method.process_weights_after_loading(layer)
            prepack_experts(method, layer)
        if info.kernel_tensors is not None:
            copy_into_kernel_storage(layer, info)
        info.reset()


def prepack_experts(method: QuantizeMethodBase, layer: Any) -> None:
    """Prepack reloaded experts again: vLLM 0.32.0 does it on the first load only.

    `UnquantizedFusedMoEMethod._setup_kernel` runs the experts' own post-load step only while the
    method has no kernel yet. On a reload the storage the kernel reads stays unpacked: the sums of
    the bytes agree and the text is wrong. Still needed if
    `tests/unit/inference/test_plugin.py::test_reloaded_experts_are_prepacked` fails without it.
    """
    if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)

"""The consumer on CUDA: vLLM's own streams and threads, with fewer launches and the checksums."""

from typing import Any

import torch

from rdt_e2e.inference.plugin.consumer import Consumer
from rdt_e2e.inference.plugin.internals import ProcItem


class CudaConsumer(Consumer):
    """Processes a landed chunk on the stream of vLLM's scatter thread.

    The order of things is the released engine's: sum, materialise and scatter; record that the slot
    was read; hand completed modules to the post-load thread.

    Source: `_process_item` in `sharded_rdt_engine.py` (vLLM 0.32.0).
    """

    def _enter_reader(self) -> None:
        # UCX posts a read through the calling thread's CUDA context.
        torch.cuda.set_device(self.device)

    def _run_quant(self, layers: list[Any], ready: Any) -> None:
        """As the released engine, but what it frees is not written to before it has been read.

        The modules' new parameters were allocated on the scatter stream and are read by kernels on
        the post-load stream. vLLM 0.32.0 drops them when those are launched, not when they are done,
        and the allocator may give their memory to the next module at once, whose scatter then
        overwrites it. Seen on an H200: one of 1,214 tensors wrong after eight syncs, though every
        blob had arrived as it was sent.
        """
        for layer in layers:
            # Not `parameters()`: its generators cost as much as the post-load step of a norm.
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                if tensor is not None and tensor.is_cuda:
                    tensor.data.record_stream(self._quant_stream)
        super()._run_quant(layers, ready)

    def _process_item(self, item: ProcItem) -> None:
        # Not under `torch.device`, as the released engine is: that makes each of some hundred small calls
        # three times as slow, and nothing here creates a tensor without naming its device.
        with torch.cuda.device(self.device), torch.cuda.stream(self._proc_stream):
            try:
                self._sum_landed(item)
                self._materialize(item.chunk)
                self._scatter(item)
                self._slot_read_done[item.slot].record(self._proc_stream)
            finally:
                # Also after an error, or the next pull into this slot would wait for ever.
                self._mark_slot_done(item.slot)
            if item.chunk.quant:
                ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ready.record(self._proc_stream)
                self._quant_queue.put((item.chunk.quant, ready))

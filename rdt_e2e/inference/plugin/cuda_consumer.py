"""The consumer on CUDA: vLLM's own streams and threads, with the checksums on the copying stream."""

import torch

from rdt_e2e.inference.plugin.consumer import Consumer
from rdt_e2e.inference.plugin.internals import ProcItem


class CudaConsumer(Consumer):
    """Sums each landed chunk on the stream that scatters it, before the slot may be reused."""

    def _process_item(self, item: ProcItem) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self._proc_stream):
            self._sum_landed(item)
        super()._process_item(item)

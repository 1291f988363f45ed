"""Methods added to every vLLM worker, on any device: vLLM mixes this class into its own.

Source: `worker_extension_cls` of vLLM's engine arguments (0.32.0).
"""

import copy
import dataclasses
from typing import Any

from vllm.model_executor.model_loader import get_model_loader

from rdt_e2e.verify.weights import check_same, fingerprints


class WeightCheck:
    """Compares what a sync left in a worker with what vLLM's own loader makes of the checkpoint."""

    vllm_config: Any
    model_runner: Any
    reload_weights: Any

    def check_weights_against(self, root: str) -> int:
        """Fingerprint the weights, load the checkpoint from disk in place, fingerprint again.

        The worker holds the checkpoint's weights afterwards, whatever the sync left.

        Args:
            root: The checkpoint folder, readable on this node.

        Returns:
            Number of tensors compared.

        Raises:
            WeightMismatchError: A tensor differs.
        """
        parallel = self.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        model = self.model_runner.get_model()
        synced = fingerprints(model)
        model_config = copy.copy(self.vllm_config.model_config)
        model_config.model = root
        loader: Any = get_model_loader(
            dataclasses.replace(self.vllm_config.load_config, load_format="auto")
        )
        self.reload_weights(weights_iterator=loader.get_all_weights(model_config, model))
        loaded = fingerprints(model)
        check_same(synced, loaded, f"inference rank {rank}")
        return len(loaded)

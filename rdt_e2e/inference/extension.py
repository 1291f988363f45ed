"""Methods added to every vLLM worker, on any device: vLLM mixes this class into its own.

Each raises in the worker: with data-parallel ranks, vLLM returns the first rank's result only.

Source: `worker_extension_cls` of vLLM's engine arguments (0.32.0).
"""

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader import get_model_loader

from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.synthetic import is_synthetic, named_tensors
from rdt_e2e.fabric.pinning import pin_nic as choose_nic
from rdt_e2e.fabric.process import process_figures
from rdt_e2e.profiling.consumer import SyncProfile
from rdt_e2e.verify.slices import check_slices
from rdt_e2e.verify.weights import check_same, fingerprints


class WeightCheck(SyncProfile):
    """Compares what a sync left in a worker with what was sent and with the checkpoint on disk."""

    vllm_config: Any
    model_runner: Any
    reload_weights: Any
    weight_transfer_engine: Any
    device: torch.device

    def pin_nic(self) -> dict[str, Any]:
        """Choose this rank's NIC; only before the first transfer. See `NicChoice`."""
        return dataclasses.asdict(choose_nic(self.device))

    def check_pulls(self, served: Sequence[Sequence[tuple[int, int, int]]]) -> int:
        """Compare the checksums of the last sync's pulls on both ends; see `Consumer.check_pulls`."""
        compared: int = self.weight_transfer_engine.check_pulls(served)
        return compared

    def sum_pulls(self, on: bool) -> None:
        """Take checksums of pulls from the next sync on, or leave them out."""
        self.weight_transfer_engine.sum_pulls(on)

    def check_slices_against(self, root: str) -> int:
        """Compare every slice of the last sync with the checkpoint on disk; see `check_slices`."""
        engine = self.weight_transfer_engine
        return check_slices(
            engine.slice_sums(), engine.synced_names, read_index(Path(root)), self._who()
        )

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
        model = self.model_runner.get_model()
        synced = fingerprints(model)
        self.reload_weights(weights_iterator=self._checkpoint_tensors(root))
        loaded = fingerprints(model)
        check_same(synced, loaded, self._who())
        return len(loaded)

    def _checkpoint_tensors(self, root: str) -> Iterable[tuple[str, torch.Tensor]]:
        """Every tensor of a checkpoint: as vLLM's loader reads it, or made anew if it is synthetic."""
        if is_synthetic(Path(root)):
            return named_tensors(read_index(Path(root)), self.device)
        model_config = copy.copy(self.vllm_config.model_config)
        model_config.model = root
        loader: Any = get_model_loader(
            dataclasses.replace(self.vllm_config.load_config, load_format="auto")
        )
        tensors: Iterable[tuple[str, torch.Tensor]] = loader.get_all_weights(
            model_config, self.model_runner.get_model()
        )
        return tensors

    def abandon_update(self) -> None:
        """Leave an update that another rank failed, so that the next one may start.

        Without it vLLM refuses the next start on the ranks whose own update went well.
        """
        self.weight_transfer_engine.abandon()
        self._weight_update_active = False

    def transfer_memory(self) -> dict[str, Any]:
        """Bytes this rank holds for the transfer, and what the process as a whole has open."""
        ring_bytes: int = self.weight_transfer_engine.receive_ring_bytes
        return {"receive_ring_bytes": ring_bytes, **process_figures()}

    def _who(self) -> str:
        parallel = self.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return f"inference rank {rank}"

"""The two collectives that DP with expert parallelism needs and vLLM's CPU communicator lacks."""

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class ExpertParallelCpuCommunicator(CpuCommunicator):
    """`CpuCommunicator` plus variable-size all-gather and reduce-scatter over gloo.

    vLLM's expert-parallel dispatch gathers every rank's tokens and combine sums and scatters
    them; ranks hold different numbers of tokens, hence the sizes.

    Source: callers in `vllm/distributed/device_communicators/all2all.py` (0.32.0).
    """

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate every rank's tensor along dim 0.

        Args:
            input_: `[sizes[rank], ...]`, or a list of such tensors gathered one by one.
            dim: Only 0 is used by vLLM.
            sizes: Rows held by each rank; None means equal on all.

        Returns:
            `[sum(sizes), ...]`, or a list of them when a list was given.

        Raises:
            NotImplementedError: `dim` is not 0.
        """
        if dim != 0:
            raise NotImplementedError(f"all_gatherv along dim {dim}: only dim 0 is implemented")
        if isinstance(input_, list):
            return [self._gather_rows(tensor, sizes) for tensor in input_]
        return self._gather_rows(input_, sizes)

    def _gather_rows(self, tensor: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        rows = sizes if sizes is not None else [tensor.shape[0]] * self.world_size
        # gloo's all-gather wants equal shapes: pad to the largest, cut afterwards.
        padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Sum over ranks along with a split by rows: rank r keeps rows `sizes[r]` of the sum.

        Args:
            input_: `[sum(sizes), ...]` on every rank.
            dim: Only 0 is used by vLLM.
            sizes: Rows kept by each rank; None means equal on all.

        Returns:
            `[sizes[rank], ...]`, same dtype.

        Raises:
            NotImplementedError: `dim` is not 0.
        """
        if dim % input_.dim() != 0:
            raise NotImplementedError(f"reduce_scatterv along dim {dim}: only dim 0 is implemented")
        rows = (
            sizes if sizes is not None else [input_.shape[0] // self.world_size] * self.world_size
        )
        total = input_.clone()
        dist.all_reduce(total, group=self.device_group)
        start = sum(rows[: self.rank_in_group])
        return total[start : start + rows[self.rank_in_group]].contiguous()

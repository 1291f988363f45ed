"""The checkpoint as this rank holds it: FSDP2 shards on dim 0, never whole."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rdt_e2e.checkpoint.index import CheckpointIndex
from rdt_e2e.checkpoint.layout import CheckpointLayout, GatherGroup, HeldTensor, shard_rows
from rdt_e2e.checkpoint.naming import summarize
from rdt_e2e.checkpoint.stream import Rows
from rdt_e2e.checkpoint.synthetic import open_rows
from rdt_e2e.errors import CheckpointError, PlanError

# torch 2.13 renamed it; CUDA hosts may still have an older torch, which vLLM's stable ABI allows.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ShardedCheckpoint:
    """Parameters of a plain module, one submodule per gather group, sharded by `fully_shard`.

    Built on the meta device: only this rank's rows are ever allocated. Rank r of w holds rows
    `shard_rows(rows, w, r)` of each held tensor; a rank may hold none.

    Raises:
        PlanError: FSDP2 placed other rows on this rank than the layout expects.
    """

    def __init__(self, layout: CheckpointLayout, mesh: DeviceMesh, device: torch.device) -> None:
        self.layout = layout
        self._mesh = mesh
        self._device = device
        self._world = mesh.size()
        self._rank = mesh.get_local_rank()
        self._module = _build_module(layout, mesh).to_empty(device=device)
        self._local = {
            key: self._local_rows(layout.held[key], self._module.get_submodule(_module_name(group)))
            for group in layout.groups
            for key in group.keys
        }

    @property
    def num_bytes(self) -> int:
        """Bytes this rank holds, without padding."""
        return sum(local.numel() * local.element_size() for local in self._local.values())

    @property
    def gathers(self) -> bool:
        """Whether there is anything to gather; a rank alone serves its shards."""
        return self._world > 1

    def local(self, key: str) -> torch.Tensor:
        """This rank's rows of a held tensor: `[n, ...]`, n possibly 0."""
        return self._local[key]

    def owned(self) -> dict[str, torch.Tensor]:
        """Experts that lie whole on this rank: name to its row of the shard, a view."""
        rows: dict[str, torch.Tensor] = {}
        for key, held in self.layout.held.items():
            if held.stacked:
                start, stop = self._rows(held)
                rows |= dict(zip(held.names[start:stop], self._local[key], strict=True))
        return rows

    def load(self, index: CheckpointIndex) -> int:
        """Fill the shards with this rank's rows of a checkpoint; other rows are not read.

        Args:
            index: A checkpoint with the very names, dtypes and shapes of the layout.

        Returns:
            Bytes read.

        Raises:
            CheckpointError: The checkpoint differs from the layout, or a shard cannot be read.
        """
        self._check_same(index)
        with open_rows(index) as reader:
            return reader.read_all(
                Rows(held, start, stop, self._local[key])
                for key, held in self.layout.held.items()
                for start, stop in [self._rows(held)]
                if start < stop
            )

    def gather_group(self, group: GatherGroup) -> dict[str, torch.Tensor]:
        """Make every tensor of a group whole on this rank; a collective of all ranks.

        Args:
            group: The group; all ranks gather groups in the same order.

        Returns:
            One tensor per name, in checkpoint form: a view of a gathered tensor, or a row of a
            gathered stack of experts. A rank alone holds everything: then they are views of its
            shards, and take no memory.
        """
        whole = {key: self._gather(self.layout.held[key]) for key in group.keys}
        named: dict[str, torch.Tensor] = {}
        for name in group.names:
            key, row = self.layout.locate[name]
            tensor = whole[key] if row is None else whole[key][row]
            named[name] = tensor.view(self.layout.entries[name].shape)
        return named

    def _gather(self, held: HeldTensor) -> torch.Tensor:
        """All-gather one held tensor as bytes: gloo has no float8, and bytes are all that matters."""
        if self._world == 1:
            return self._local[held.key]
        num_rows, row_bytes = held.shape[0], _row_bytes(held)
        chunk_bytes = -(-num_rows // self._world) * row_bytes
        local = self._local[held.key].reshape(-1).view(torch.uint8)
        if local.numel() < chunk_bytes:
            local = nn.functional.pad(local, (0, chunk_bytes - local.numel()))
        out = torch.empty(chunk_bytes * self._world, dtype=torch.uint8, device=self._device)
        _all_gather(out, local, group=self._mesh.get_group())
        return out[: num_rows * row_bytes].view(_dtype(held)).view(held.shape)

    def _rows(self, held: HeldTensor) -> tuple[int, int]:
        return shard_rows(held.shape[0], self._world, self._rank)

    def _local_rows(self, held: HeldTensor, part: nn.Module) -> torch.Tensor:
        parameter = part.get_parameter(_parameter_name(held.key))
        if not isinstance(parameter, DTensor):
            raise PlanError(f"{held.key}: FSDP2 left this tensor unsharded")
        local = parameter.to_local()
        start, stop = self._rows(held)
        if local.shape[0] != stop - start and not (start == stop and local.numel() == 0):
            raise PlanError(
                f"{held.key}: FSDP2 gave rank {self._rank} {local.shape[0]} rows, the layout expects "
                f"{stop - start}; the installed torch shards dim 0 differently"
            )
        return local

    def _check_same(self, index: CheckpointIndex) -> None:
        unknown = [name for name in index.entries if name not in self.layout.entries]
        if unknown:
            raise CheckpointError(
                f"{index.root}: {summarize(unknown)} is not among the tensors the trainer holds. A new "
                "weight version must have the same tensors"
            )
        for name, entry in self.layout.entries.items():
            found = index.entries.get(name)
            if found is None or (found.dtype, found.shape) != (entry.dtype, entry.shape):
                is_now = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise CheckpointError(
                    f"{index.root}: {name} is {is_now}, but the trainer holds {entry.dtype} "
                    f"{list(entry.shape)}. A new weight version must have the same tensors"
                )


def _build_module(layout: CheckpointLayout, mesh: DeviceMesh) -> nn.Module:
    root = nn.Module()
    for group in layout.groups:
        part = nn.Module()
        for key in group.keys:
            held = layout.held[key]
            data = torch.empty(held.shape, dtype=_dtype(held), device="meta")
            part.register_parameter(_parameter_name(key), nn.Parameter(data, requires_grad=False))
        root.add_module(_module_name(group), part)
        fully_shard(part, mesh=mesh)
    fully_shard(root, mesh=mesh)
    return root


def _module_name(group: GatherGroup) -> str:
    return f"group{group.index}"


def _parameter_name(key: str) -> str:
    # A parameter's name may hold no dot; everything else of a checkpoint name is allowed.
    return key.replace(".", "/")


def _dtype(held: HeldTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, held.dtype)
    return dtype


def _row_bytes(held: HeldTensor) -> int:
    return math.prod(held.shape[1:]) * _dtype(held).itemsize

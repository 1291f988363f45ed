"""Headers of safetensors files: names, dtypes, shapes and where the bytes are."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rdt_e2e.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DTYPES: dict[str, tuple[str, int]] = {
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "F32": ("float32", 4),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "BOOL": ("bool", 1),
}
"""Supported safetensors dtypes: their torch names and the size of one element in bytes."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version "


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint, and where its bytes are.

    Attributes:
        name: Checkpoint name.
        dtype: Torch name of the dtype, such as `float8_e4m3fn`.
        shape: Shape in the checkpoint; `()` for a 0-d tensor.
        file: Name of the shard inside the checkpoint folder.
        begin: Offset of the first byte from the start of the file.
        end: Offset after the last byte from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.end - self.begin


def read_header(root: Path, file: str) -> dict[str, TensorEntry]:
    """Read the header of one shard and check it against the size of the file.

    Args:
        root: The checkpoint folder.
        file: Name of the shard inside it.

    Returns:
        The shard's tensors by name, in the order of the header.

    Raises:
        CheckpointError: The shard is missing, truncated or not a safetensors file, has a tensor of
            an unsupported dtype or without elements, or its header contradicts itself.

    Source: the safetensors format: 8 bytes with the length of the header (little endian), a JSON
    header, then the tensors without gaps.
    """
    path = root / file
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            prefix = stream.read(_LENGTH_BYTES)
            header_bytes = int.from_bytes(prefix, "little")
            _check_prefix(path, prefix, header_bytes, size)
            raw = stream.read(header_bytes)
    except FileNotFoundError:
        # A hub snapshot links to the files of its cache; an interrupted download leaves the link.
        where = f" (it is a link to {path.readlink()})" if path.is_symlink() else ""
        raise CheckpointError(
            f"{path}: the index names this shard, but there is no such file{where}. Fetch it."
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}). Check the file and its permissions."
        ) from error
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _not_safetensors(path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _not_safetensors(path, "its header is not a JSON object")
    data_begin = _LENGTH_BYTES + header_bytes
    entries = {
        name: _parse_entry(path, name, fields, data_begin)
        for name, fields in header.items()
        if name != "__metadata__"
    }
    _check_coverage(path, entries, data_begin, size)
    return entries


def _not_safetensors(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: not a safetensors file ({why}). Fetch this shard again (`git lfs pull` if the "
        "folder is a git clone)."
    )


def _check_prefix(path: Path, prefix: bytes, header_bytes: int, size: int) -> None:
    if prefix == _LFS_POINTER:
        raise _not_safetensors(path, "it is a pointer of git LFS")
    if len(prefix) < _LENGTH_BYTES:
        raise _not_safetensors(path, f"{size} bytes long")
    if header_bytes > _MAX_HEADER_BYTES:
        raise _not_safetensors(path, f"a header of {header_bytes} bytes")
    if _LENGTH_BYTES + header_bytes > size:
        raise _truncated(path, _LENGTH_BYTES + header_bytes, size)


def _truncated(path: Path, expected: int, size: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: truncated, {size} bytes where its header needs {expected}. Fetch this shard again."
    )


def _parse_entry(path: Path, name: str, fields: Mapping[str, Any], data_begin: int) -> TensorEntry:
    try:
        code, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        well_formed = isinstance(code, str) and all(
            isinstance(number, int) and number >= 0 for number in (*shape, begin, end)
        )
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(
            f"{path}: the header of {name} has no valid dtype, shape and data_offsets. "
            "Fetch this shard again."
        )
    if code not in DTYPES:
        raise CheckpointError(
            f"{path}: {name} has the unsupported dtype {code}. Supported are "
            f"{', '.join(DTYPES)}; convert the tensor to one of them."
        )
    dtype, itemsize = DTYPES[code]
    expected = math.prod(shape) * itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: {name}, {dtype} {list(shape)}, should be {expected} bytes, but its header "
            f"gives it {end - begin}. Fetch this shard again."
        )
    if expected == 0:
        # The consumer counts a slice without elements as one element, and every offset after it
        # in the packed pull would differ.
        raise CheckpointError(
            f"{path}: {name} has no elements (shape {list(shape)}). Export the checkpoint without "
            "it."
        )
    return TensorEntry(name, dtype, shape, path.name, data_begin + begin, data_begin + end)


def _check_coverage(
    path: Path, entries: Mapping[str, TensorEntry], data_begin: int, size: int
) -> None:
    end = data_begin
    for entry in sorted(entries.values(), key=lambda entry: entry.begin):
        if entry.begin != end:
            problem = "overlaps the tensor before it" if entry.begin < end else "leaves a gap"
            raise CheckpointError(
                f"{path}: {entry.name} begins at byte {entry.begin} and {problem}, which ends at "
                f"byte {end}. Fetch this shard again."
            )
        end = entry.end
    if size < end:
        raise _truncated(path, end, size)
    if size > end:
        raise CheckpointError(
            f"{path}: {size} bytes where its header needs {end}. Fetch this shard again."
        )

"""What a consumer may ask of a named tensor: a closed set of view ops, replayed on the whole tensor.

Everything that arrives here comes over the network, so every op, argument and length is checked
before torch sees it. `docs/security.md` says what a caller can and cannot reach.
"""

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, TypeGuard

import torch

from rdt_e2e.errors import SyncError

ALLOWED_OPS = frozenset(
    {
        "__getitem__",
        "chunk",
        "contiguous",
        "flatten",
        "narrow",
        "permute",
        "reshape",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
    }
)
"""Tensor methods a consumer may ask for: views only, no change of device, no arithmetic.

Source: `SUPPORTED_OPS` in `vllm/distributed/weight_transfer/sharded_rdt_common.py` (0.32.0); a test
holds the two equal.
"""

OpSpec = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""One recorded op: its name, positional arguments, keyword arguments as pairs."""
FetchKey = tuple[str, tuple[OpSpec, ...]]
"""What a consumer asks for: a checkpoint name and the chain of ops to replay on it."""

MAX_NAME = 1000
"""Longest name, in characters; checkpoints have about a hundred."""
MAX_OPS = 64
"""Longest op chain; what loaders record has a handful."""

_INDEX_TYPES = (int, slice, EllipsisType, type(None))


def check_key(key: object) -> FetchKey:
    """Check the form of one thing asked for, without looking at any tensor.

    Args:
        key: What arrived; meant to be a (name, op chain) pair.

    Returns:
        The same key.

    Raises:
        SyncError: It has another form, or an op or argument that is not allowed.
    """
    if not (isinstance(key, tuple | list) and len(key) == 2):
        raise SyncError(f"malformed key {shown(key)}; expected (name, op chain)")
    name, chain = key
    if not (isinstance(name, str) and isinstance(chain, tuple | list)):
        raise SyncError(f"malformed key {shown(key)}; expected (name, op chain)")
    if len(name) > MAX_NAME:
        raise SyncError(f"a name of {len(name)} characters: {shown(name)}")
    if len(chain) > MAX_OPS:
        raise SyncError(f"{name}: a chain of {len(chain)} ops; at most {MAX_OPS} are replayed")
    for op in chain:
        _check_op(name, op)
    return name, tuple(chain)


def _check_op(name: str, op: object) -> None:
    if not (isinstance(op, tuple | list) and len(op) == 3):
        raise SyncError(f"{name}: malformed op {shown(op)}; expected (name, args, kwargs)")
    method, args, kwargs = op
    if not isinstance(method, str) or method not in ALLOWED_OPS:
        raise SyncError(
            f"{name}: op {shown(method)} is not allowed; allowed are "
            f"{', '.join(sorted(ALLOWED_OPS))}"
        )
    if not (isinstance(args, tuple | list) and isinstance(kwargs, tuple | list)):
        raise SyncError(f"{name}: malformed op {shown(op)}; expected (name, args, kwargs)")
    for pair in kwargs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise SyncError(f"{name}: malformed keyword {shown(pair)} of op {method!r}")
    for value in (*args, *(value for _, value in kwargs)):
        if not _is_allowed(method, value):
            raise SyncError(
                f"{name}: op {method!r} with argument {shown(value)}; sizes, dimensions and plain "
                "indices only"
            )


def _is_allowed(method: str, value: object) -> bool:
    """Plain numbers only: a list or tensor as an index would copy, and could repeat, rows at will."""
    if method == "__getitem__":
        parts = value if isinstance(value, tuple) else (value,)
        return all(_is_index(part) for part in parts)
    if method == "view" and isinstance(value, torch.dtype):
        return True  # The same bytes, read as another type.
    if isinstance(value, tuple | list):
        return len(value) <= MAX_OPS and all(is_int(one) for one in value)
    return is_int(value)


def _is_index(part: object) -> bool:
    if isinstance(part, slice):
        return all(end is None or is_int(end) for end in (part.start, part.stop, part.step))
    return isinstance(part, _INDEX_TYPES) and not isinstance(part, bool)


def is_int(value: object) -> TypeGuard[int]:
    """Whether what arrived is a whole number; a yes or no is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def replay(name: str, tensor: torch.Tensor, chain: Sequence[OpSpec]) -> torch.Tensor:
    """Apply a checked op chain to a tensor.

    Args:
        name: Checkpoint name, for the error messages.
        tensor: The whole tensor of that name.
        chain: Ops in order, as `check_key` lets them pass; those that return several tensors are
            followed by `__getitem__`.

    Returns:
        The slice; a view of `tensor` unless the chain forced a copy, and never larger than it.

    Raises:
        SyncError: An op does not fit the tensor, or the chain does not end in a tensor.
    """
    value: Any = tensor
    for method, args, kwargs in chain:
        if isinstance(value, tuple | list) and method != "__getitem__":
            raise SyncError(f"{name}: op {method!r} after an op that returned several tensors")
        try:
            value = getattr(value, method)(*args, **dict(kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise SyncError(
                f"{name}: op {method!r} with {shown(args)} does not fit {_form(value)}: {reason}"
            ) from error
    if not isinstance(value, torch.Tensor):
        raise SyncError(f"{name}: the op chain ends in {type(value).__name__}, not in a tensor")
    return value


def _form(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def shown(value: object) -> str:
    """What arrived, cut short: it may be anything, of any length."""
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."

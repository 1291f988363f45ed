"""vLLM's NCCL backend with an NCCL that is older than the one vLLM was built for."""

import ctypes

from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.utils.nccl import find_nccl_library

from rdt_e2e.errors import SyncError

DISPENSABLE = frozenset({"ncclCommSuspend", "ncclCommResume"})
"""Functions of NCCL 2.29.7 and later that a broadcast does without."""


def drop_missing_symbols() -> list[str]:
    """Keep vLLM from asking the NCCL library for functions that it lacks and that nothing here calls.

    vLLM 0.32.0 loads all of `NCCLLibrary.exported_functions` or none. If one is missing,
    `PyNcclCommunicator.__init__` (`vllm/distributed/device_communicators/pynccl.py`) turns itself off
    without an error, every broadcast does nothing, and the worker loads its empty receive buffers: the
    weights are zeros and each call reports success. Seen with NCCL 2.28.9, which comes with torch
    2.11. Needed while the installed NCCL is older than 2.29.7; without it, `check_enabled` refuses.

    Returns:
        The functions that were missing.

    Raises:
        SyncError: Another function is missing, or the library cannot be loaded.
    """
    path = find_nccl_library()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise SyncError(f"{path} cannot be loaded: {error}; set VLLM_NCCL_SO_PATH") from error
    wanted = NCCLLibrary.exported_functions
    missing = [function.name for function in wanted if not hasattr(library, function.name)]
    needed = sorted(set(missing) - DISPENSABLE - {"ncclCommQueryProperties"})
    if needed:
        raise SyncError(
            f"{path} lacks {', '.join(needed)}; set VLLM_NCCL_SO_PATH to the NCCL that this vLLM needs"
        )
    NCCLLibrary.exported_functions = [
        function for function in wanted if function.name not in missing
    ]
    return missing


def check_enabled(communicator: object) -> None:
    """Refuse a communicator that turned itself off.

    Raises:
        SyncError: It would move nothing and report success.
    """
    if getattr(communicator, "disabled", False):
        raise SyncError(
            "vLLM's NCCL communicator has turned itself off, so that no weights would move; see the "
            "row's log for the NCCL function or library that it missed"
        )

"""This process's NIXL agent, reached through Ray Direct Transport."""

import os
from typing import Any

import torch
from ray.experimental import register_nixl_memory

from rdt_e2e.errors import BackendUnavailableError
from rdt_e2e.fabric.agent_config import configure_agents


def register(tensor: torch.Tensor) -> None:
    """Register a tensor's storage with this process's NIXL agent, for the process's lifetime.

    Args:
        tensor: Any tensor; its whole storage is registered.

    Raises:
        BackendUnavailableError: NIXL or its backend cannot register this memory.
    """
    try:
        register_nixl_memory(tensor)
    except Exception as error:
        raise BackendUnavailableError(
            f"NIXL could not register {tensor.untyped_storage().nbytes()} bytes on {tensor.device} "
            f"(pid {os.getpid()}): {error}. Check that one nixl-cu12 or nixl-cu13 is installed and "
            "that UCX_TLS and the memlock limit allow it"
        ) from error


def nixl_agent() -> Any:
    """This process's NIXL agent, the one that Ray uses; built now if there is none yet.

    Source: `get_nixl_agent` of Ray's NIXL transport (2.60).
    """
    from ray.experimental.rdt.util import get_tensor_transport_manager

    manager: Any = get_tensor_transport_manager("NIXL")
    return manager.get_nixl_agent()


def num_registered() -> int | None:
    """Registrations this process has made with NIXL so far, those ended since included.

    Returns:
        The count; None if this Ray keeps its table elsewhere than Ray 2.60 does.
    """
    from ray.experimental.rdt.util import get_tensor_transport_manager

    transport = get_tensor_transport_manager("NIXL")
    live = getattr(transport, "_tensor_desc_cache", None)
    ended = getattr(transport, "_nixl_agent_meta_version", None)
    return None if live is None or ended is None else len(live) + ended


def start_agent(device: torch.device) -> torch.Tensor:
    """Build this process's NIXL agent now, by registering a few bytes.

    Built lazily, inside the first pull, the agent can deadlock with a running collective on some
    fabrics; so it exists before the process group does.

    Args:
        device: Where this process's weights are.

    Returns:
        The registered tensor; keep it alive.

    Raises:
        BackendUnavailableError: No agent can be built.
    """
    configure_agents()
    probe = torch.zeros(4096, dtype=torch.uint8, device=device)
    register(probe)
    return probe

"""Ask each actor once whether it has a transport, where Ray asks it on every pull."""

import threading
from typing import Any

from ray.experimental.rdt.util import get_tensor_transport_manager

METHOD = "actor_has_tensor_transport"
"""Method of Ray's NIXL transport (2.60): a remote call to the actor, and a wait for its answer, before
each call that returns tensors. On one host it takes 2 ms of a pull's 20."""


def remember_transports() -> bool:
    """Keep the answer for each actor that has said yes, for the life of this process.

    An actor that dies is found out by the pull itself, which Ray fails for it.

    Returns:
        Whether the method was found; where it was not, Ray asks as it always did.
    """
    manager: Any = get_tensor_transport_manager("NIXL")
    ask = getattr(manager, METHOD, None)
    if ask is None:
        return False
    if METHOD in vars(manager):
        return True  # Done before: a second init of the engine.
    lock = threading.Lock()
    known: set[Any] = set()

    def remember(actor: Any) -> bool:
        identity = actor._actor_id
        with lock:
            if identity in known:
                return True
        answer = bool(ask(actor))
        if answer:
            with lock:
                known.add(identity)
        return answer

    setattr(manager, METHOD, remember)
    return True

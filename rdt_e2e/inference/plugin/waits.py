"""Waiting for producers through Ray, with a limit, and errors that name both ends."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectFetchTimedOutError,
    RayActorError,
    RayDirectTransportError,
)

from rdt_e2e.errors import ProducerLostError, PullTimeoutError


def wait_for_producers(
    refs: Sequence[Any], consumer_id: int, limit_s: float, what: str, waited_for: str
) -> list[Any]:
    """Wait for the results of calls to producers.

    Args:
        refs: Their references.
        consumer_id: Who waits.
        limit_s: Longest wait in seconds.
        what: What is being done, for errors.
        waited_for: What has to happen, for the error that it has not.

    Returns:
        The results.

    Raises:
        PullTimeoutError: Time is up, ours or Ray's own for a pull.
        ProducerLostError: A producer is gone, or the connection to it.
        Exception: Whatever a producer raised.
    """
    try:
        return list(ray.get(list(refs), timeout=limit_s))
    except (GetTimeoutError, ObjectFetchTimedOutError):
        # The latter is Ray's own limit on a pull, which is as long.
        raise PullTimeoutError(
            f"consumer {consumer_id} waited {limit_s:g} s for {waited_for}; see what the producers "
            "say, or raise sync.rdt_fetch_timeout_s"
        ) from None
    except RayActorError as error:
        raise ProducerLostError(f"consumer {consumer_id}: a producer died during {what}") from error
    except RayDirectTransportError as error:
        # Its text is a traceback.
        cause = str(error).strip().splitlines()[-1]
        raise ProducerLostError(
            f"consumer {consumer_id}: the connection broke during {what}: {cause}. The producer, its "
            "node or the link to it is gone"
        ) from error

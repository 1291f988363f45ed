"""What a consumer says of a wait that ends badly."""

import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    ObjectFetchTimedOutError,
    RayDirectTransportError,
)

from rdt_e2e.errors import ProducerLostError, PullTimeoutError
from rdt_e2e.inference.plugin.waits import wait_for_producers

BROKEN = """The NIXL transfer failed for object id: 8c2a. The exception thrown from nixl transfer was:
 Traceback (most recent call last):
  File "_api.py", line 682, in check_xfer_state
nixl_cu12._bindings.nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT
"""


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (GetTimeoutError(), PullTimeoutError, "consumer 1 waited 120 s for pull 3 from producer 0"),
        (
            ObjectFetchTimedOutError("65e9", "", ""),
            PullTimeoutError,
            "consumer 1 waited 120 s for pull 3 from producer 0",
        ),
        (ActorDiedError(), ProducerLostError, "consumer 1: a producer died during pull 3"),
        (
            RayDirectTransportError(BROKEN),
            ProducerLostError,
            r"consumer 1: the connection broke during pull 3 from producer 0: \S+ "
            "NIXL_ERR_REMOTE_DISCONNECT. The producer, its node or the link",
        ),
    ],
)
def test_wait_that_fails_names_both_ends(raised, expected, message, monkeypatch):
    def fail(*_args, **_options):
        raise raised

    monkeypatch.setattr(ray, "get", fail)
    what = "pull 3 from producer 0"
    with pytest.raises(expected, match=message) as caught:
        wait_for_producers([], 1, 120.0, what, what)
    assert "\n" not in str(caught.value)

"""A consumer's sign of life to every producer, from a thread of its own."""

import os
import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray.util import get_node_ip_address

INTERVAL_S = 2.0


class Heartbeat:
    """Calls `heartbeat` on every producer until stopped.

    A producer that has not taken the last call yet gets no other one: a stopped process must not
    come back to a queue of them.

    Args:
        producers: Actor handles.
        consumer_id: Who reports.
    """

    def __init__(self, producers: Sequence[Any], consumer_id: int) -> None:
        self._producers = list(producers)
        self._consumer_id = consumer_id
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rdt-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; safe to call more than once."""
        self._stopped.set()

    def _run(self) -> None:
        who = f"process {os.getpid()} on {get_node_ip_address()}"
        under_way: dict[int, Any] = {}
        while not self._stopped.wait(INTERVAL_S) and ray.is_initialized():
            for rank, producer in enumerate(self._producers):
                last = under_way.get(rank)
                if last is None or ray.wait([last], timeout=0)[0]:
                    under_way[rank] = producer.heartbeat.remote(self._consumer_id, who)

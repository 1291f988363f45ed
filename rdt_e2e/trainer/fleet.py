"""Starts the trainer fleet: one actor per rank, all on one node."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rdt_e2e.config import Config
from rdt_e2e.errors import (
    EnvironmentCheckError,
    ProducerLostError,
    PullTimeoutError,
    RdtE2EError,
    SyncError,
)
from rdt_e2e.trainer.worker import actor_class

FAILURE_WAIT_S = 5.0
"""How long to wait for the other ranks' errors once something has failed, in seconds."""


class TrainerFleet:
    """The trainer ranks as one thing: started, loaded, driven through syncs, closed.

    Attributes:
        actor_names: Names of the actors, by producer rank.
        node_address: IP address of the node that holds them all.
    """

    def __init__(self, config: Config, node_address: str) -> None:
        self._config = config
        self.node_address = node_address
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self.actor_names = [f"trainer-{rank}" for rank in range(config.trainer.num_ranks)]

    def start(self) -> None:
        """Place and start every rank and form the process group.

        Raises:
            EnvironmentCheckError: The node has no free GPUs and CPUs for the whole group.
            ProducerLostError: A rank died while starting.
        """
        config = self._config
        num_ranks = config.trainer.num_ranks
        # Ray declares a resource "node:<address>" on each node: a share of it pins the bundle.
        bundle = {"GPU": 1, "CPU": 1, f"node:{self.node_address}": 0.001}
        self._group = placement_group([bundle] * num_ranks, strategy="STRICT_PACK")
        if not self._group.wait(config.cluster.start_timeout_s):
            raise EnvironmentCheckError(
                f"node {self.node_address} could not take the trainer group of {num_ranks} GPUs and "
                f"CPUs within {config.cluster.start_timeout_s:g} s; end what else runs there, or lower "
                "trainer.num_ranks"
            )
        worker = actor_class(config)
        self._actors = [
            worker.options(
                name=name,
                namespace=config.cluster.namespace,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=rank
                ),
            ).remote(config, rank)
            for rank, name in enumerate(self.actor_names)
        ]
        timeout_s = config.cluster.start_timeout_s
        port = self.wait([self._actors[0].free_port.remote()], "free_port", timeout_s)[0]
        self.call("join", self.node_address, port, timeout_s=timeout_s)

    def load(self, root: Path) -> list[int]:
        """Load the checkpoint on every rank; returns the bytes held, by rank."""
        return self.call("load", root, timeout_s=self._config.trainer.load_timeout_s)

    def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method on every rank at once and wait for all results.

        Args:
            method: Name of the method.
            *args: Its arguments, the same for every rank.
            timeout_s: Longest wait, in seconds.

        Returns:
            Results by rank.

        Raises:
            PullTimeoutError: Time is up; the message names the ranks that have not answered.
            ProducerLostError: A rank's process is gone.
            RdtE2EError: Whatever the method raised.
        """
        return self.wait(self.submit(method, *args), method, timeout_s)

    def submit(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank without waiting; returns the references, by rank."""
        return [getattr(actor, method).remote(*args) for actor in self._actors]

    def wait(self, refs: Sequence[Any], what: str, timeout_s: float) -> list[Any]:
        """Wait for references from `submit`; same errors as `call`."""
        try:
            return list(ray.get(list(refs), timeout=timeout_s))
        except GetTimeoutError:
            done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            late = [rank for rank, ref in enumerate(refs) if ref not in set(done)]
            raise PullTimeoutError(
                f"trainer ranks {late} did not finish {what} within {timeout_s:g} s"
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, RdtE2EError):
                raise error.cause from None
            raise SyncError(
                f"a trainer rank failed during {what}: {_first_line(error.cause)}"
            ) from error
        except RayActorError as error:
            raise ProducerLostError(
                f"a trainer rank died during {what}: {_first_line(error)}"
            ) from error

    def raise_failed(self, refs: Sequence[Any], what: str) -> None:
        """Raise the error of a reference from `submit` that has failed, if any has by now.

        A rank that died goes before a rank that failed: its peers fail because it died.

        Args:
            refs: References by rank.
            what: What they are doing, for the message.

        Raises:
            ProducerLostError: A rank's process is gone; the message names the rank.
            RdtE2EError: Whatever a rank raised.
        """
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=FAILURE_WAIT_S)
        failure: RdtE2EError | None = None
        for ref in done:
            try:
                self.wait([ref], what, FAILURE_WAIT_S)
            except ProducerLostError as error:
                rank = list(refs).index(ref)
                raise ProducerLostError(f"trainer rank {rank} died during {what}") from error
            except RdtE2EError as error:
                failure = error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End every rank and release its placement; safe at any point of the start."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return next(iter(lines), type(error).__name__)

"""The trainer fleet: one actor per rank, all on one node; kept between runs where the cluster is."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util import get_placement_group
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
from rdt_e2e.trainer.identity import trainer_identity
from rdt_e2e.trainer.worker import actor_class

FAILURE_WAIT_S = 5.0
"""How long to wait for the other ranks' errors once something has failed, in seconds."""
ATTACH_TIMEOUT_S = 10.0
"""How long a rank left by an earlier run may take to say that it is well, in seconds."""
GROUP_NAME = "rdt-e2e-trainers"


class TrainerFleet:
    """The trainer ranks as one thing: started or found, driven through syncs, closed or kept.

    Attributes:
        actor_names: Names of the actors, by producer rank.
        node_address: IP address of the node that holds them all.
        resident: Whether the ranks outlive this driver, weights in memory, for the next run.
    """

    def __init__(self, config: Config, node_address: str, *, resident: bool = False) -> None:
        self._config = config
        self.node_address = node_address
        self.resident = resident
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self.actor_names = [f"trainer-{rank}" for rank in range(config.trainer.num_ranks)]

    def attach(self, root: Path) -> list[int] | None:
        """Take over the ranks of an earlier run, if all live, are well and hold this checkpoint.

        Args:
            root: The checkpoint folder.

        Returns:
            Bytes held, by rank; None if there are none to take over, and then none is left either.
        """
        actors = [self._find(name) for name in self.actor_names]
        if all(actors):
            self._actors = actors
            held = self._resident_bytes(trainer_identity(self._config, root))
            if held is not None:
                self._group = _find_group()
                return held
        self._actors = []
        self.remove()
        return None

    def start(self) -> None:
        """Place and start every rank and form the process group.

        Raises:
            EnvironmentCheckError: The node has no free GPUs and CPUs for the whole group.
            ProducerLostError: A rank died while starting.
        """
        config = self._config
        num_ranks = config.trainer.num_ranks
        lifetime = "detached" if self.resident else None
        # Ray declares a resource "node:<address>" on each node: a share of it pins the bundle.
        bundle = {"GPU": 1, "CPU": 1, f"node:{self.node_address}": 0.001}
        self._group = placement_group(
            [bundle] * num_ranks, strategy="STRICT_PACK", name=GROUP_NAME, lifetime=lifetime
        )
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
                lifetime=lifetime,
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
        identity = trainer_identity(self._config, root)
        return self.call("load", root, identity, timeout_s=self._config.trainer.load_timeout_s)

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
        """Leave resident ranks to the next run; end all others. Safe at any point of the start."""
        if self.resident and self._resident_bytes(None) is not None:
            self._actors = []
            return
        self.remove()

    def remove(self) -> None:
        """End every rank, also one that an earlier run left, and release the placement."""
        for actor in self._actors or filter(None, map(self._find, self.actor_names)):
            ray.kill(actor)
        self._actors = []
        group = self._group or _find_group()
        if group is not None:
            remove_placement_group(group)
        self._group = None
        # A name is free again only once its actor is gone.
        deadline = time.monotonic() + ATTACH_TIMEOUT_S
        while any(map(self._find, self.actor_names)) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _resident_bytes(self, identity: str | None) -> list[int] | None:
        """Bytes held, by rank, if every rank is there, well, and of that identity (any, for None)."""
        try:
            held = self.call("resident_bytes", identity, timeout_s=ATTACH_TIMEOUT_S)
        except RdtE2EError:
            return None
        return held if held and all(one is not None for one in held) else None

    def _find(self, name: str) -> Any:
        try:
            return ray.get_actor(name, namespace=self._config.cluster.namespace)
        except ValueError:
            return None


def _find_group() -> PlacementGroup | None:
    try:
        return get_placement_group(GROUP_NAME)
    except ValueError:
        return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return next(iter(lines), type(error).__name__)

"""Joining the cluster: one driver's connection, ended again whatever happens."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import ray
from ray.exceptions import RaySystemError
from ray.util.placement_group import placement_group

from rdt_e2e.cluster import local
from rdt_e2e.cluster.children import end_orphans
from rdt_e2e.config import Config
from rdt_e2e.console import Console
from rdt_e2e.errors import EnvironmentCheckError

CONNECT_TIMEOUT_S = 10.0
TURN_NAME = "rdt-e2e-run"
TURN_TIMEOUT_S = 20.0
"""How long to wait for the turn of a run that was killed to end, in seconds."""


@dataclass(frozen=True)
class ClusterSession:
    """A joined cluster.

    Attributes:
        address: `host:port` of its head.
        stays: Whether it stays up after this run.
    """

    address: str
    stays: bool


@contextlib.contextmanager
def cluster_session(config: Config, console: Console) -> Iterator[ClusterSession]:
    """Join the cluster for the length of a block; deploy a local one first if none is up.

    A local cluster that was deployed here is stopped at the end; one that was up before stays.

    Args:
        config: The run's configuration.
        console: For the lines printed.

    Yields:
        The cluster's address, and whether it outlives the block.

    Raises:
        EnvironmentCheckError: Ray cannot be reached, a local node did not join, or another run is
            using the cluster.
    """
    ended = end_orphans(local.drivers_folder())
    if ended:
        console.info(f"ended {ended} processes that a killed run had left")
    with contextlib.ExitStack() as stack:
        if config.cluster.target == "local":
            state = local.deploy(config, console, owner=os.getpid())
            if state.owner is not None:  # Ours, or left by a run that was killed.
                stack.callback(local.down, console)
            os.environ.update(local.client_environment(state))
            address, num_nodes = state.address, len(state.processes)
            stays = state.owner is None
        else:
            address, num_nodes, stays = str(config.cluster.address), 1, True
            _check_reachable(address)
            os.environ["RAY_ADDRESS"] = address
        stack.callback(ray.shutdown)
        _join(address, num_nodes, config)
        _take_turn(address)
        yield ClusterSession(address, stays)


def _take_turn(address: str) -> None:
    """Keep a second run off the cluster for as long as this driver lives.

    Both would drive the same trainer ranks. Ray refuses a second placement group of the same name,
    and removes this one when the driver's process is gone, however it ended.
    """
    deadline = time.monotonic() + TURN_TIMEOUT_S
    while True:
        try:
            placement_group([{"CPU": 0.001}], name=TURN_NAME)
        except RaySystemError as error:
            if TURN_NAME not in str(error):
                raise
            if time.monotonic() > deadline:
                raise EnvironmentCheckError(
                    f"another run is using the cluster at {address}; wait for it, or end it"
                ) from None
            time.sleep(0.2)
        else:
            return


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S):
            return
    except (OSError, ValueError) as error:
        raise EnvironmentCheckError(
            f"no Ray head answers at cluster.address={address}: {error}; start one with `ray start "
            "--head`, or correct the address (host:port)"
        ) from None


def _join(address: str, num_nodes: int, config: Config) -> None:
    deadline = time.monotonic() + config.cluster.start_timeout_s
    while True:
        try:
            ray.init(
                address=address,
                namespace=config.cluster.namespace,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
            break
        except (ConnectionError, RuntimeError) as error:
            # A head answers before its node is known, much before on a machine that is busy.
            ray.shutdown()
            if "auth" in str(error).lower() or time.monotonic() > deadline:
                raise EnvironmentCheckError(
                    f"joining Ray at {address} failed: {str(error).strip().splitlines()[0]}; check "
                    "that RAY_AUTH_MODE and the token are those of the cluster"
                ) from error
            time.sleep(0.5)
    while len([node for node in ray.nodes() if node["Alive"]]) < num_nodes:
        if time.monotonic() > deadline:
            raise EnvironmentCheckError(
                f"Ray at {address} shows fewer than {num_nodes} live nodes after "
                f"{config.cluster.start_timeout_s:g} s; see the logs of the Ray nodes"
            )
        time.sleep(0.1)

"""Which node holds which fleet: found from the live cluster, never assumed."""

from collections.abc import Mapping, Sequence
from typing import Any

from rdt_e2e.config import Config
from rdt_e2e.errors import EnvironmentCheckError


def check_capacity(nodes: Sequence[Mapping[str, Any]], config: Config) -> None:
    """Check that the cluster has the GPUs both fleets ask for, before anything is placed.

    Args:
        nodes: `ray.nodes()`.
        config: The run's configuration.

    Raises:
        EnvironmentCheckError: No node is large enough for a fleet, or the total is too small.
    """
    gpus = _gpus_by_address(nodes)
    have = _describe(gpus)
    wanted = {
        "trainer.num_ranks": config.trainer.num_ranks,
        "inference.data_parallel * inference.tensor_parallel": config.num_consumers,
    }
    largest = max(gpus.values(), default=0)
    for key, count in wanted.items():
        if count > largest:
            raise EnvironmentCheckError(
                f"{key} is {count}, but no node of the cluster has that many GPUs ({have}); lower it "
                "or add a node"
            )
    if sum(wanted.values()) > sum(gpus.values()):
        raise EnvironmentCheckError(
            f"the trainer and inference fleets need {sum(wanted.values())} GPUs, the cluster has "
            f"{sum(gpus.values())} ({have}); lower trainer.num_ranks or inference.data_parallel, or "
            "add a node"
        )


def choose_nodes(nodes: Sequence[Mapping[str, Any]], config: Config) -> tuple[str, str]:
    """Choose a node for each fleet: two different ones unless only one can take both.

    A node that declares the resource `trainer` or `inference` takes that fleet alone; where none
    declares it, any node will do. The trainer goes to the first node, by address, that leaves the
    inference fleet another one.

    Args:
        nodes: `ray.nodes()`.
        config: The run's configuration.

    Returns:
        IP addresses of the trainer's and of the inference fleet's node.

    Raises:
        EnvironmentCheckError: The fleets do not fit, each on one node.
    """
    check_capacity(nodes, config)
    num_trainers, num_consumers = config.trainer.num_ranks, config.num_consumers
    gpus = _gpus_by_address(nodes)
    inference_nodes = _of_role(nodes, "inference", gpus)
    for trainer in _of_role(nodes, "trainer", gpus):
        for inference in inference_nodes:
            if trainer != inference and (
                gpus[trainer] >= num_trainers and gpus[inference] >= num_consumers
            ):
                return trainer, inference
    for address, count in gpus.items():
        if count >= num_trainers + num_consumers:
            return address, address
    raise EnvironmentCheckError(
        f"{num_trainers} trainer GPUs and {num_consumers} inference GPUs do not fit, each fleet on "
        f"one node: {_describe(gpus)}; lower trainer.num_ranks or inference.data_parallel"
    )


def _gpus_by_address(nodes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    live = [node for node in nodes if node["Alive"]]
    counts = {n["NodeManagerAddress"]: int(n.get("Resources", {}).get("GPU", 0)) for n in live}
    return dict(sorted(counts.items()))


def check_driver(driver_address: str, inference_address: str, config: Config) -> None:
    """Check that this process may drive the engine from the node it is on.

    With several data-parallel ranks, all on one node, vLLM's front end binds sockets of that node: files
    in its `/tmp` and a store at its address. From another node the ranks are waited for in vain.

    Args:
        driver_address: IP address of this process's Ray node.
        inference_address: IP address of the inference fleet's node.
        config: The run's configuration.

    Raises:
        EnvironmentCheckError: The driver is on another node.

    Source: `launch_core_engines` and `get_engine_client_zmq_addr` of vLLM 0.32.0.
    """
    if config.inference.data_parallel > 1 and driver_address != inference_address:
        raise EnvironmentCheckError(
            f"the run is started on node {driver_address}, but with inference.data_parallel="
            f"{config.inference.data_parallel} it must be started on the inference node, "
            f"{inference_address}: vLLM's front end and its ranks meet in that node's /tmp"
        )


def _of_role(
    nodes: Sequence[Mapping[str, Any]], role: str, gpus: Mapping[str, int]
) -> Sequence[str]:
    """Addresses of live nodes that declare the role; of all live nodes where none declares it."""
    declared = {n["NodeManagerAddress"] for n in nodes if n.get("Resources", {}).get(role)}
    return [address for address in gpus if address in declared] or list(gpus)


def _describe(gpus: Mapping[str, int]) -> str:
    return ", ".join(f"{address} has {count}" for address, count in gpus.items())

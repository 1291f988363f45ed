"""Choice of nodes from what Ray reports."""

import pytest

from rdt_e2e.cluster.placement import check_driver, choose_nodes
from rdt_e2e.config import load_config
from rdt_e2e.errors import EnvironmentCheckError


def node(address, gpus, alive=True, **resources):
    held = {"GPU": gpus, "CPU": 8, **resources}
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": held}


def config(trainers, consumers):
    return load_config(
        "local", {"trainer.num_ranks": trainers, "inference.data_parallel": consumers}
    )


@pytest.mark.parametrize(
    ("nodes", "trainers", "consumers", "expected"),
    [
        ([node("10.0.0.1", 2), node("10.0.0.2", 2)], 2, 2, ("10.0.0.1", "10.0.0.2")),
        ([node("10.0.0.2", 2), node("10.0.0.1", 2)], 2, 2, ("10.0.0.1", "10.0.0.2")),
        # The trainer alone would fit the large node; then nothing is left for inference.
        ([node("10.0.0.1", 4), node("10.0.0.2", 1)], 1, 4, ("10.0.0.2", "10.0.0.1")),
        ([node("10.0.0.1", 8)], 4, 4, ("10.0.0.1", "10.0.0.1")),
        ([node("a", 2, alive=False), node("b", 2), node("c", 2)], 2, 2, ("b", "c")),
        ([node("a", 0), node("b", 2), node("c", 2)], 2, 2, ("b", "c")),
        # Roles decide, not addresses; a lost node's role counts for nothing.
        ([node("a", 2, inference=1), node("b", 2, trainer=1)], 2, 2, ("b", "a")),
        ([node("a", 2, inference=1), node("b", 2)], 2, 2, ("b", "a")),
        ([node("a", 2, trainer=1, alive=False), node("b", 2), node("c", 2)], 2, 2, ("b", "c")),
    ],
)
def test_fleets_land_where_they_fit(nodes, trainers, consumers, expected):
    assert choose_nodes(nodes, config(trainers, consumers)) == expected


@pytest.mark.parametrize(
    ("nodes", "trainers", "consumers", "message"),
    [
        ([node("a", 2), node("b", 2)], 3, 2, r"trainer\.num_ranks is 3, but no node .*a has 2"),
        ([node("a", 2), node("b", 2)], 2, 4, r"inference\.data_parallel .* is 4"),
        ([node("a", 2)], 2, 2, "need 4 GPUs, the cluster has 2"),
        ([node("a", 4), node("b", 1), node("c", 1)], 2, 3, "do not fit, each fleet on one node"),
        ([], 1, 1, "no node of the cluster has that many GPUs"),
    ],
)
def test_too_few_gpus_name_the_key_and_the_nodes(nodes, trainers, consumers, message):
    with pytest.raises(EnvironmentCheckError, match=message):
        choose_nodes(nodes, config(trainers, consumers))


def test_driver_of_several_ranks_belongs_on_the_inference_node():
    check_driver("10.0.0.2", "10.0.0.2", config(2, 2))
    # A single rank's engine is a child of the driver, and its workers may be anywhere.
    check_driver("10.0.0.1", "10.0.0.2", config(2, 1))
    with pytest.raises(EnvironmentCheckError, match=r"must be started on .* 10\.0\.0\.2"):
        check_driver("10.0.0.1", "10.0.0.2", config(2, 2))

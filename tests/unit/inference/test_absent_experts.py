"""Which routed experts no layer of a rank holds."""

import types

import pytest
import torch

from rdt_e2e.inference.plugin.consumer import absent_experts
from rdt_e2e.inference.plugin.internals import RoutedExperts


def layer(*local: int) -> torch.nn.Module:
    """Routed experts with a map from global to local number, or with none."""
    made: torch.nn.Module = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(made)
    expert_map = torch.tensor(local, dtype=torch.int32) if local else None
    vars(made)["expert_map_manager"] = types.SimpleNamespace(expert_map=expert_map)
    return made


@pytest.mark.parametrize(
    ("layers", "absent"),
    [
        ([layer(0, 1, -1, -1), layer(0, 1, -1, -1)], {2, 3}),
        # A rank that holds other experts in another layer needs the names of all of them.
        ([layer(0, 1, -1, -1), layer(-1, 0, 1, -1)], {3}),
        ([layer(0, 1, -1, -1), layer()], set()),
        ([layer()], set()),
        ([], set()),
    ],
)
def test_only_what_every_layer_lacks_is_absent(layers, absent):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), *layers)
    assert absent_experts(model) == absent

import types
from typing import Any

import pytest

from rdt_e2e.bench.bake_table import format_times, read_layers
from rdt_e2e.errors import ConfigError


def test_layers_are_read():
    assert read_layers("5, 22,61") == (5, 22, 61)


@pytest.mark.parametrize("text", ["", "1", "5,many"])
def test_other_layers_are_refused(text):
    with pytest.raises(ConfigError, match="--layers"):
        read_layers(text)


def test_a_line_tells_the_driver_from_the_rank():
    times: Any = types.SimpleNamespace(
        layers=5,
        num_names=10_000,
        num_slices=1500,
        num_chunks=12,
        seconds={"layout": 0.5, "bake": 1.5, "call plan": 0.5},
        on_driver=("layout",),
        on_rank_s=2.0,
    )
    line = format_times(times)
    assert line.split()[:7] == ["5", "10000", "1500", "12", "0.50", "2.00", "200.0"]
    assert line.endswith("bake 1.50, call plan 0.50")

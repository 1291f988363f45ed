"""The bake of one of eight expert-parallel ranks, in a process of its own: vLLM's groups are global."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
from rdt_e2e.config import load_config
from rdt_e2e.environment import apply_environment

apply_environment(load_config("local"))
from rdt_e2e.bench import bake
from rdt_e2e.bench.k2_slice import Widths
from rdt_e2e.inference.plugin.consumer import Consumer
from rdt_e2e.inference.plugin.internals import ShardedRDTWeightTransferEngine

seen, plans = [], []
build = ShardedRDTWeightTransferEngine._build_fake_weights


def note(self, names, *how):
    seen.append(len(names))
    return build(self, names, *how)


ShardedRDTWeightTransferEngine._build_fake_weights = note
plan = bake.OfflineConsumer.plan


def keep(self, *args):
    plan(self, *args)
    plans.append([
        (chunk.owner, chunk.seq, chunk.keys, [(s.param_name, s.offset, s.shape) for s in chunk.scatters])
        for chunk in self._cached_plan.chunks
    ])


bake.OfflineConsumer.plan = keep
small = Widths(hidden=256, dense_width=512, expert_width=256, num_experts=16, experts_per_token=2,
               num_heads=4, vocab=576)
rounds = bake.measure_bake([3, 3], {}, small)
found = [next(rounds)]
del Consumer._build_fake_weights
found += rounds
print(json.dumps({
    "names": [one.num_names for one in found], "slices": [one.num_slices for one in found],
    "given": seen, "same": repr(plans[0]) == repr(plans[1]),
}))
"""


def test_experts_of_other_ranks_are_left_out_and_the_plan_is_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    num_names = found["names"][0]
    # Two layers of 16 experts, six tensors each, of which this rank holds two experts.
    assert found["given"] == [num_names - 2 * 14 * 6, num_names]
    assert found["slices"][0] == found["slices"][1] > 0
    assert found["same"]

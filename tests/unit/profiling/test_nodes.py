"""Collection off many nodes, with functions run here in place of Ray tasks."""

import time

import pytest

from rdt_e2e.profiling.nodes import Nodes, monotonic_time, read_folder
from rdt_e2e.profiling.place import Place
from rdt_e2e.profiling.samplers import boot_id

LISTED = [
    {"NodeID": name, "NodeManagerAddress": address, "Alive": alive, "Resources": resources}
    for name, address, alive, resources in (
        ("a", "10.0.0.1", True, {"GPU": 8.0}),
        ("b", "10.0.0.2", True, {"GPU": 8.0}),
        ("dead", "10.0.0.3", False, {"GPU": 8.0}),
        ("head", "10.0.0.5", True, {"CPU": 4.0}),
        ("c", "10.0.0.4", True, {"GPU": 1.0}),
    )
]


class Cluster:
    """Runs what is submitted when it is fetched; nodes can refuse, fail or be slow to answer."""

    def __init__(self, *, refusing=(), failing=(), clock_ahead=0.0):
        self.refusing, self.failing, self.clock_ahead = refusing, failing, clock_ahead
        self.asked = []

    def submit(self, node_id, function, *args):
        if node_id in self.refusing:
            raise ValueError("the node is infeasible")
        self.asked.append((node_id, function.__name__))
        return node_id, function, args

    def fetch(self, ref, timeout):
        node_id, function, args = ref
        if node_id in self.failing:
            raise RuntimeError("Traceback ...\n  more\nOSError: disk on fire")
        if function is monotonic_time:
            return time.monotonic() + self.clock_ahead
        return function(*args)


def nodes(folder, **faults):
    cluster = Cluster(**faults)
    place = Place(str(folder), "run", "summary")
    return place, cluster, Nodes(place, submit=cluster.submit, fetch=cluster.fetch, listed=LISTED)


def test_every_live_node_with_gpus_is_asked_and_answers(tmp_path):
    place, cluster, all_nodes = nodes(tmp_path)
    assert [one.error for one in all_nodes.begin()] == [None] * 3
    for node in ("a", "b", "c"):
        (place.folder(node) / "consumer-0.jsonl").write_text(f"of {node}\n")
    readings = all_nodes.read()
    assert [(one.address, list(one.lines)) for one in readings] == [
        ("10.0.0.1", ["of a"]), ("10.0.0.2", ["of b"]), ("10.0.0.4", ["of c"])
    ]  # fmt: skip
    assert all(one.sample["boot_id"] == boot_id() for one in readings)
    assert {node for node, _ in cluster.asked} == {"a", "b", "c"}
    all_nodes.begin()
    assert all(not one.lines for one in all_nodes.read())
    all_nodes.remove(5)
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.parametrize(
    ("faults", "said"),
    [({"refusing": "b"}, "infeasible"), ({"failing": "b"}, "OSError: disk on fire")],
)
def test_a_node_that_does_not_answer_is_named_and_the_others_count(faults, said, tmp_path):
    _, _, all_nodes = nodes(tmp_path, **faults)
    for readings in (all_nodes.begin(), all_nodes.read()):
        first, lost, last = readings
        assert (first.error, last.error) == (None, None)
        assert first.sample
        assert last.sample
        assert said in lost.error
        assert not lost.sample
    assert all_nodes.clock_offset("b", "elsewhere") is None


def test_a_folder_without_files_is_no_error(tmp_path):
    sample, lines = read_folder(Place(str(tmp_path), "never begun", "summary"), "a")
    assert lines == []
    assert sample["taken"] > 0


def test_clocks_of_one_machine_are_one_clock(tmp_path):
    _, cluster, all_nodes = nodes(tmp_path)
    offset = all_nodes.clock_offset("a", boot_id())
    assert (offset.seconds, offset.error_s) == (0.0, 0.0)
    assert cluster.asked == []


def test_another_machines_clock_is_compared_within_its_own_bound(tmp_path):
    _, _, all_nodes = nodes(tmp_path, clock_ahead=500.0)
    offset = all_nodes.clock_offset("a", "another boot")
    assert abs(offset.seconds - 500.0) <= offset.error_s
    assert offset.error_s > 0

import time
import types
from typing import Any

from rdt_e2e.bench.trace import Trace, total_seconds


class Engine:
    def _issue(self, number):
        return number + 1

    def fails(self):
        raise ValueError


def test_calls_are_recorded_and_the_object_is_given_back():
    engine, trace = Engine(), Trace()
    before = time.monotonic()
    trace.wrap(engine, ("_issue", "absent"))
    assert engine._issue(1) == 2
    calls = trace.stop()
    assert [name for name, _, _ in calls] == ["issue"]
    assert before <= calls[0][1] <= calls[0][2] <= time.monotonic()
    assert vars(engine) == {}


def test_a_module_gets_its_own_function_back():
    module: Any = types.ModuleType("some_module")
    module.pack = original = lambda: 3
    trace = Trace()
    trace.wrap(module, ("pack",))
    assert module.pack is not original
    assert module.pack() == 3
    trace.stop()
    assert module.pack is original


def test_a_failing_call_is_recorded_too():
    engine, trace = Engine(), Trace()
    trace.wrap(engine, ("fails",))
    try:
        engine.fails()
    except ValueError:
        assert len(trace.stop()) == 1


def test_totals_by_name():
    calls = [("pull", 1.0, 2.0), ("pull", 3.0, 3.5), ("issue", 0.0, 0.25)]
    assert total_seconds(calls) == {"issue": (1, 0.25), "pull": (2, 1.5)}

"""Hooks: what they count, that they never break what they watch, and that they leave no trace."""

import logging
import types
from typing import Any

import pytest

from rdt_e2e.profiling.hooks import Call, HookSet


class Inner:
    def work(self, value):
        return value + 1


class Outer:
    def __init__(self):
        self.inner = Inner()

    def _run(self, value):
        return self.inner.work(value)

    def fails(self):
        raise KeyError("theirs")


def test_a_call_knows_its_arguments_its_result_and_what_ran_inside():
    outer, hooks = Outer(), HookSet()
    calls: list[Call] = []
    hooks.wrap(outer, "_run", calls.append)
    hooks.wrap(outer.inner, "work", calls.append, stage="inner")
    assert outer._run(1) == 2
    inner, run = calls
    assert (run.stage, run.args, run.result, run.failed) == ("run", (1,), 2, False)
    assert run.inside == {"inner": inner.own_s}
    assert run.own_s + inner.seconds == pytest.approx(run.seconds)
    assert inner.started >= run.started
    assert inner.ended <= run.ended


def test_uninstalling_leaves_objects_and_modules_as_they_were():
    outer, module = Outer(), types.ModuleType("some_module")
    module.__dict__["pack"] = original = lambda: 3
    before = dict(vars(outer))
    hooks = HookSet()
    assert hooks.wrap(outer, "_run")
    assert hooks.wrap(outer, "_run"), "twice"
    assert hooks.wrap(module, "pack")
    assert vars(module)["pack"] is not original
    hooks.uninstall()
    assert vars(outer) == before
    assert vars(module)["pack"] is original


@pytest.mark.parametrize("target", [Inner(), None, types.SimpleNamespace(moved=3)])
def test_a_moved_hook_is_not_available_with_one_warning(target, caplog):
    hooks = HookSet()
    with caplog.at_level(logging.WARNING):
        assert not hooks.wrap(target, "moved", columns=("wait_s", "calls"))
    assert len(caplog.records) == 1
    assert "wait_s, calls is not measured" in caplog.text
    assert hooks.values(("wait_s", "other_s"), busy=False) == {"wait_s": None, "other_s": 0.0}
    assert "moved" in hooks.missing["calls"]


def test_an_object_that_takes_no_attributes_is_not_available():
    hooks = HookSet()
    assert not hooks.wrap("text", "upper", columns=("wait_s",))
    assert hooks.values(("wait_s",), busy=False) == {"wait_s": None}


def test_a_hook_that_is_there_but_never_called_is_not_a_silent_zero(caplog):
    outer, hooks = Outer(), HookSet()
    hooks.wrap(outer, "_run", columns=("run_s",), expected=True)
    assert hooks.values(("run_s",), busy=False) == {"run_s": 0.0}, "nothing was to be done"
    assert hooks.values(("run_s",), busy=True) == {"run_s": None}
    assert "never called" in hooks.missing["run_s"]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("where", ["observe", "before", "settle"])
def test_a_failing_observer_costs_its_columns_and_nothing_else(where, caplog):
    def broken(*_args):
        raise ZeroDivisionError

    outer, hooks = Outer(), HookSet()
    faults: dict[str, Any] = {where: broken}
    hooks.wrap(outer, "_run", columns=("run_s",), **faults)
    assert [outer._run(1), outer._run(2)] == [2, 3]
    assert hooks.values(("run_s",), busy=False) == {"run_s": None}
    assert len(caplog.records) == 1


def test_an_error_of_the_watched_code_passes_through():
    outer, hooks = Outer(), HookSet()
    calls: list[Call] = []
    hooks.wrap(outer, "fails", calls.append)
    with pytest.raises(KeyError, match="theirs"):
        outer.fails()
    assert calls[0].failed


@pytest.mark.parametrize("keep", [True, False])
def test_a_reset_begins_anew_and_single_calls_are_kept_only_when_asked(keep):
    inner, hooks = Inner(), HookSet(keep_events=keep)
    hooks.wrap(inner, "work", lambda call: hooks.add("work_s", call.seconds))
    inner.work(1)
    assert [stage for stage, *_ in hooks.events] == ["work"] * keep
    assert hooks.counters["work_s"] > 0
    hooks.reset()
    assert hooks.events == []
    assert hooks.values(("work_s",), busy=False) == {"work_s": 0.0}


def test_single_calls_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("rdt_e2e.profiling.hooks.MAX_EVENTS", 2)
    inner, hooks = Inner(), HookSet(keep_events=True)
    hooks.wrap(inner, "work", lambda _call: hooks.add("calls", 1))
    for value in range(5):
        inner.work(value)
    assert len(hooks.events) == 2
    assert hooks.counters["calls"] == 5

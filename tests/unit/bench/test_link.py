import os
import shutil
import subprocess

import pytest

from rdt_e2e.bench import link as link_module
from rdt_e2e.bench.link import Link, check_privileges, shaped_link
from rdt_e2e.errors import EnvironmentCheckError


@pytest.fixture
def tools(monkeypatch):
    """Record every call of `ip` and `tc` and run none; `fail` holds words of a call that fails."""
    calls: list[list[str]] = []
    fail: list[str] = []

    def run(command, **_options):
        calls.append(list(command))
        failed = bool(fail) and set(fail) <= set(command)
        return subprocess.CompletedProcess(command, int(failed), "", "Operation not permitted\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(link_module, "check_privileges", lambda: None)
    return calls, fail


def of(calls, *words):
    return [call for call in calls if set(words) <= set(call)]


def namespaces(calls, verb):
    return [call[-1] for call in calls if call[:3] == ["ip", "netns", verb]]


def test_everything_that_is_made_is_removed_by_its_own_name(tools):
    calls, _ = tools
    with shaped_link() as link:
        made = namespaces(calls, "add")
        assert made == list(link.namespaces.values())
        assert not namespaces(calls, "del")
    assert sorted(namespaces(calls, "del")) == sorted(made)
    # The link is made inside: an end outside would outlive the namespaces.
    (made_link,) = of(calls, "link", "add")
    assert [made_link[at + 1] for at, word in enumerate(made_link) if word == "netns"] == made


def test_what_was_made_is_removed_when_a_later_step_fails(tools):
    calls, fail = tools
    fail += ["link", "add"]
    refused = pytest.raises(EnvironmentCheckError, match=r"not permitted.*CAP_NET_ADMIN")
    with refused, shaped_link():
        pytest.fail("the link was not made")
    assert sorted(namespaces(calls, "del")) == sorted(namespaces(calls, "add")) != []


def test_a_rate_limits_both_directions_and_none_lifts_it(tools):
    calls, _ = tools
    link = Link({"trainer": "a", "inference": "b"}, {"trainer": "da", "inference": "db"})
    link.set_rate(1e8)
    limits = of(calls, "tbf")
    assert [(call[2], call[call.index("dev") + 1]) for call in limits] == [("a", "da"), ("b", "db")]
    assert {call[call.index("rate") + 1] for call in limits} == {"800000000bit"}
    calls.clear()
    link.set_rate(None)
    assert calls
    assert not of(calls, "tbf")


def test_without_root_it_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentCheckError, match="needs root"):
        check_privileges()


def test_without_tc_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(EnvironmentCheckError, match=r"needs tc .*install iproute2"):
        check_privileges()

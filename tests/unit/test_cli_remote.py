"""The verbs for Kubernetes and containers, up to the point where a cluster or an engine is asked."""

import json

import pytest
from typer.testing import CliRunner

from rdt_e2e.cli import app


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program with a kubeconfig of one context, and without any container engine."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "mine",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "mine", "context": {"cluster": "c", "user": "u"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("verb", ["deploy", "down"])
def test_context_has_to_be_named_where_nobody_can_confirm_it(verb, run):
    done = run("k8s", verb)
    assert done.exit_code == 2
    assert "from context mine" in done.output or "to context mine" in done.output
    assert "--context NAME" in done.output


def test_unknown_context_is_refused_by_name(run):
    done = run("k8s", "sync", "--context", "other")
    assert done.exit_code == 2
    assert "no context 'other'; contexts: mine" in done.output


def test_unknown_overlay_is_refused_by_name(run):
    done = run("k8s", "deploy", "--overlay", "azure")
    assert done.exit_code == 2
    assert "no overlay 'azure'" in done.output


@pytest.mark.parametrize("verb", ["deploy", "sync", "down"])
def test_missing_engine_is_named(verb, run):
    done = run("compose", verb)
    assert done.exit_code == 2
    assert "install Docker" in done.output


def test_unknown_lock_is_refused(run):
    done = run("compose", "deploy", "--lock", "rocm")
    assert done.exit_code == 2
    assert "'rocm'" in done.output

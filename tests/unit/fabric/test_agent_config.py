"""The settings of our agents, on the installed NIXL."""

import importlib
import inspect

import pytest

from rdt_e2e.fabric import agent_config


@pytest.fixture
def bindings(monkeypatch):
    """The installed variant's bindings, put back afterwards."""
    for variant in agent_config.VARIANTS:
        if importlib.util.find_spec(variant) is not None:
            module = importlib.import_module(f"{variant}._bindings")
            monkeypatch.setattr(module, "nixlAgentConfig", module.nixlAgentConfig)
            return module
    pytest.fail("no NIXL is installed")


def test_nixl_still_asks_for_no_delay_and_no_lock_through_the_class_we_replace():
    """When this fails, NIXL has changed: look whether `agent_config.py` is still needed, and works."""
    from nixl._api import nixl_agent

    source = inspect.getsource(nixl_agent.__init__)
    assert "nixlBind.nixlAgentConfig()" in source
    assert "agent_config.pthrDelay = 0" in source
    assert "NIXL_THREAD_SYNC_NONE" in source


def test_a_config_takes_our_settings_whatever_is_asked_for(bindings):
    assert agent_config.configure_agents(700)
    assert agent_config.configure_agents(900), "a second call replaces the first"
    config = bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = 0
    config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
    assert config.pthrDelay == 900
    assert config.syncMode == bindings.NIXL_THREAD_SYNC_STRICT
    assert config.useProgThread


def test_the_progress_thread_sleeps_unless_told_otherwise(bindings):
    assert agent_config.configure_agents()
    config = bindings.nixlAgentConfig()
    config.pthrDelay = 0
    assert config.pthrDelay == agent_config.SLEEP_US > 0


def test_an_untested_release_is_left_alone(bindings, monkeypatch, caplog):
    before = bindings.nixlAgentConfig
    monkeypatch.setattr(agent_config, "version", lambda _name: "2.0.0")
    assert not agent_config.configure_agents()
    assert bindings.nixlAgentConfig is before
    assert "NIXL 2.0.0" in caplog.text

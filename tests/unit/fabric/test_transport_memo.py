"""The question that Ray asks on every pull is asked once per actor."""

import pytest

from rdt_e2e.fabric import transport_memo
from rdt_e2e.fabric.transport_memo import METHOD, remember_transports


class Actor:
    def __init__(self, identity):
        self._actor_id = identity


class Manager:
    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def actor_has_tensor_transport(self, actor):
        self.asked.append(actor._actor_id)
        return self.answers[actor._actor_id]


@pytest.fixture
def manager(monkeypatch):
    made = Manager({"a": True, "b": False})
    monkeypatch.setattr(transport_memo, "get_tensor_transport_manager", lambda _name: made)
    return made


def test_a_yes_is_remembered_and_a_no_is_asked_again(manager):
    assert remember_transports()
    assert remember_transports()
    for _ in range(3):
        assert manager.actor_has_tensor_transport(Actor("a"))
        assert not manager.actor_has_tensor_transport(Actor("b"))
    assert manager.asked == ["a", "b", "b", "b"]


def test_another_ray_is_left_alone(monkeypatch):
    monkeypatch.setattr(transport_memo, "get_tensor_transport_manager", lambda _name: object())
    assert not remember_transports()


def test_this_ray_has_the_method():
    from ray.experimental.rdt.nixl_tensor_transport import NixlTensorTransport

    assert hasattr(NixlTensorTransport, METHOD)

"""Attributes that a call, or the game, sets in a network are noticed, once."""

import torch
from torch import nn

from strategies.placing.attributes import Attributes


class Dial:
    def __init__(self) -> None:
        self.turn = 1.0


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.strength, self.seen, self.cache, self.dial = 1.0, [], None, Dial()
        self.register_buffer("shift", torch.zeros(2))


def test_only_what_has_changed_is_told_and_only_once():
    network = Network()
    attributes = Attributes(network)
    assert attributes.changed() == {}
    network.strength = 1.0
    network.seen = network.seen
    assert attributes.changed() == {}
    network.strength, network.cache = 2.0, torch.ones(1)
    network.seen.append(3)
    network.dial.turn = 2.0
    network.inner[1].eval()
    network.shift.add_(1)
    found = attributes.changed()
    assert found.keys() == {
        ("", "strength"),
        ("", "cache"),
        ("", "seen"),
        ("", "dial"),
        ("inner.1", "training"),
        ("", "shift"),
    }
    assert found["", "strength"] == 2.0 and found["inner.1", "training"] is False
    assert attributes.changed() == {}


def test_what_is_set_from_elsewhere_does_not_count():
    network, other = Network(), Network()
    here, there = Attributes(network), Attributes(other)
    network.strength, network.shift = 3.0, torch.ones(2)
    there.set(here.changed())
    assert other.strength == 3.0 and torch.equal(other.shift, torch.ones(2)) and "shift" in dict(other.named_buffers())
    assert there.changed() == {}


def test_what_is_elsewhere_cannot_be_read():
    network = Network()
    attributes = Attributes(network)
    attributes.forget([("", "cache"), ("", "shift")])
    assert not hasattr(network, "cache") and not hasattr(network, "shift")
    assert attributes.changed() == {}


def test_a_module_that_was_replaced_is_named():
    network = Network()
    attributes = Attributes(network)
    assert attributes.replaced(network) is None
    network.inner[1] = nn.Identity()
    assert attributes.replaced(network) == "inner.1"
    network.inner[1] = attributes.modules["inner.1"]
    network.more = nn.Identity()
    assert attributes.replaced(network) == "more"

"""What is set or written in a served network is noticed, by its name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from strategies.placing.server import Fingerprint


class Dial:
    def __init__(self) -> None:
        self.turn = 1.0


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.strength, self.seen, self.cache, self.dial = 1.0, [], None, Dial()
        self.register_buffer("shift", torch.zeros(2))


CHANGES: list[tuple[str, Callable[[Network], Any]]] = [
    ("strength", lambda network: setattr(network, "strength", 2.0)),
    ("cache", lambda network: setattr(network, "cache", torch.ones(1))),
    ("seen", lambda network: network.seen.append(3)),
    ("dial", lambda network: setattr(network.dial, "turn", 2.0)),
    ("shift", lambda network: network.shift.add_(1)),
    ("inner.1.momentum", lambda network: setattr(network.inner[1], "momentum", 0.2)),
    ("inner.1", lambda network: network.inner.__setitem__(1, nn.Identity())),
    ("more", lambda network: setattr(network, "more", nn.Identity())),
    ("strength", lambda network: delattr(network, "strength")),
    ("forward", lambda network: setattr(network, "forward", print)),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[name for name, _ in CHANGES])
def test_what_is_set_is_named(name, change):
    network = Network()
    before = Fingerprint(network)
    change(network)
    found = before.changed()
    assert found is not None and (found == name or found.startswith(f"{name}."))


def test_what_is_the_same_is_no_change():
    network = Network()
    before = Fingerprint(network)
    network.strength, network.seen = 1.0, network.seen
    network.eval()
    network.shift.copy_(network.shift.clone())  # as a checkpoint that is loaded
    assert before.changed() is None
    network.shift.add_(1)
    assert before.changed() == "shift"

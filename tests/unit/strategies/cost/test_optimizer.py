"""What steps on small weights say of an optimizer."""

from functools import partial

import pytest
from torch import nn
from torch.optim import SGD, Adafactor, Adam

from gan import Player
from strategies.policies.costs import optimizer_cost


def cost(optimizer):
    return optimizer_cost(Player("net", nn.Linear(2, 2), optimizer))


@pytest.mark.parametrize(
    ("optimizer", "state", "elementwise"),
    [
        (partial(Adam, lr=0.1), 2, True),
        (partial(SGD, lr=0.1), 0, True),
        (partial(SGD, lr=0.1, momentum=0.5), 1, True),
        (partial(Adafactor, lr=0.1), 2 / 64, False),
        (None, 0, True),
    ],
)
def test_the_state_is_counted(optimizer, state, elementwise):
    found = cost(optimizer)
    assert (found.state, found.elementwise) == (pytest.approx(state), elementwise)


def test_adam_needs_memory_for_a_while():
    """On a CPU for one weight at a time, and on a GPU for all of them."""
    found = cost(partial(Adam, lr=0.1))
    assert (found.one, found.left) == (2, 1)  # two of one weight, and what is left of the one before
    assert found.on_cpu([100, 10, 50, 50], 1000) == 200
    assert found.on_cpu([100, 90], 1000) == 280
    assert found.on_cpu([100, 90], 20) == 40  # a rank owns a part of one of them
    assert found.all == 1
    assert cost(partial(SGD, lr=0.1)).all == 0

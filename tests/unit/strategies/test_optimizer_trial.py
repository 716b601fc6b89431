"""Which optimizers can step some of the weights without the others."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, Muon

from gan import Player
from strategies.optimizer_trial import why_not_apart
from tests.support.matrix_optimizers import Drawing, MuonAndAdam, NormedTogether, Shampoo


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5, bias=False))


def why(optimizer, net=None):
    net = net or network()
    return why_not_apart(Player("net", net, optimizer), dict(net.named_parameters()))


class Own(Adam):
    """A class of one's own."""


class Counting(SGD):
    """Its rate depends on how many weights it has."""

    def step(self, closure=None):
        before, group = self.param_groups[0]["lr"], self.param_groups[0]
        group["lr"] = before / len(group["params"])
        super().step(closure)
        group["lr"] = before


@pytest.mark.parametrize("optimizer", [Shampoo, Adafactor, Adagrad, Adam, Own, partial(MuonAndAdam, lr=1e-2)])
def test_these_treat_each_weight_by_itself(optimizer):
    assert why(optimizer) is None


def test_muon_on_matrices_does():
    assert why(partial(Muon, lr=1e-2), nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 5, bias=False))) is None


@pytest.mark.parametrize("optimizer", [NormedTogether, Drawing, partial(Counting, lr=1e-2)])
def test_these_do_not(optimizer):
    assert why(optimizer).startswith("its step on weight '")


def test_one_that_fails_with_some_of_the_weights_says_how():
    def picky(weights):
        optimizer = SGD(weights, lr=1e-2)
        optimizer.step = lambda: torch.cat([w.grad.reshape(-1) for w in optimizer.param_groups[0]["params"]]).reshape(7)
        return optimizer

    assert why(picky).startswith("it fails if it has only some of the weights (RuntimeError: ")
    assert why(LBFGS).startswith("it fails if")


def test_an_optimizer_that_exists_already_is_left_alone():
    net = network()
    optimizer = Shampoo(net.parameters())
    assert "returns the same optimizer twice" in why(lambda _: optimizer, net)
    assert not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_weights_and_random_numbers_are_as_before(dtype):
    net = network().to(dtype)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    places = [weight.data_ptr() for weight in net.parameters()]
    torch.manual_seed(3)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert why(Drawing, net)
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [weight.data_ptr() for weight in net.parameters()] == places
    assert all(weight.grad is None for weight in net.parameters())

"""Adapters: what they are of, that they begin as nothing, and that they share the network's parameters."""

import pytest
import torch
from torch import nn

from nets.lora import LowRank, adapted, adapters


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode="circular"),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
    )


def test_it_begins_as_the_network_and_shares_its_parameters():
    base = network()
    own, x = adapted(base, 2), torch.randn(5, 3, 6, 6)
    torch.testing.assert_close(own(x), base(x))
    shared = {id(weight) for weight in base.parameters()}
    assert [weight for weight in own.parameters() if id(weight) not in shared] == list(adapters(own))
    assert shared <= {id(weight) for weight in own.parameters()}
    assert [type(layer) for layer in own] == [LowRank, nn.Tanh, nn.Conv2d, nn.Sequential]
    assert [type(layer) for layer in base] == [nn.Conv2d, nn.Tanh, nn.Conv2d, nn.Sequential]
    assert own[2] is not base[2]


@pytest.mark.parametrize("place", ["0", "3.1"])
def test_an_adapter_is_an_addition_of_low_rank_to_the_weight(place):
    own, rank = adapted(network().double(), 2), 2
    layer = own.get_submodule(place)
    nn.init.normal_(layer.up.weight)
    change = layer.up.weight.flatten(1) @ layer.down.weight.flatten(1)
    assert torch.linalg.matrix_rank(change) == rank
    x = torch.randn(5, 3, 6, 6) if place == "0" else torch.randn(5, 4)
    x, found = x.double(), layer(x.double())
    with torch.no_grad():
        layer.layer.weight += change.view_as(layer.layer.weight)
    torch.testing.assert_close(found, layer.layer(x))


def test_a_learner_moves_its_adapters_alone():
    base = network()
    own = adapted(base.requires_grad_(False), 2)
    assert all(weight.requires_grad for weight in adapters(own))
    own(torch.randn(5, 3, 6, 6)).square().sum().backward()
    assert all(weight.grad is None for weight in base.parameters())
    assert own[0].up.weight.grad.abs().sum() > 0

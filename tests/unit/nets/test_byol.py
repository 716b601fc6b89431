"""BYOL's encoder and perceptrons."""

import pytest
import torch

from nets.byol import Online, ResnetEncoder, perceptron


@pytest.mark.parametrize("size", [16, 32])
def test_a_picture_of_any_size_becomes_one_vector(size):
    net = ResnetEncoder((4, 8, 12))
    assert net(torch.rand(3, 3, size, size)).shape == (3, 12)
    smallest = []
    net.stages.register_forward_hook(lambda module, given, found: smallest.append(found.shape[-1]))
    net(torch.rand(3, 3, size, size))
    assert smallest == [size // 8]


def test_every_weight_has_a_gradient_that_is_no_rounding_noise():
    """A bias before a batch norm would have such a gradient."""
    torch.manual_seed(0)
    online, predictor = Online(ResnetEncoder((4, 8)), perceptron(8, 16, 6)).double(), perceptron(6, 16, 6).double()
    found = torch.nn.functional.normalize(predictor(online(torch.rand(8, 3, 16, 16).double())))
    (found * torch.rand(8, 6).double()).sum().backward()
    for name, weight in [*online.named_parameters(), *predictor.named_parameters()]:
        assert weight.grad.abs().max() > 1e-9, name

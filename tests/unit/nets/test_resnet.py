"""CycleGAN's generator."""

import pytest
import torch

from nets.resnet import ResnetGenerator


def test_sizes_come_back_and_every_weight_learns():
    torch.manual_seed(0)
    net = ResnetGenerator(3, 3, 2, blocks=2, gain=1.0)
    image = net(torch.randn(2, 3, 12, 16))
    assert image.shape == (2, 3, 12, 16)
    assert image.abs().max() <= 1
    image.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in net.parameters())


def test_a_picture_does_not_depend_on_the_rest_of_the_batch():
    net = ResnetGenerator(3, 3, 2, blocks=1, gain=1.0)
    x = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(net(x)[:1], net(x[:1]))


def test_the_published_size_has_the_published_number_of_weights():
    with torch.device("meta"):
        net = ResnetGenerator()
    # 11.378 M with the biases that instance norm cancels, which ours leaves out.
    assert sum(parameter.numel() for parameter in net.parameters()) == pytest.approx(11.378e6, rel=1e-3)

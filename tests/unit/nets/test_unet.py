"""pix2pix's U-Net."""

import pytest
import torch

from gan.files.errors import UserError
from nets.blocks import Dropout
from nets.unet import UNet


@pytest.mark.parametrize("depth", [2, 4])
def test_sizes_come_back_and_every_weight_learns(depth):
    torch.manual_seed(0)
    net = UNet(5, 3, 2, depth, gain=1.0)
    image = net(torch.randn(2, 5, 16, 32))
    assert image.shape == (2, 3, 16, 32)
    image.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in net.parameters())


def test_the_innermost_steps_up_drop_out():
    net = UNet(5, 3, 2, depth=5, dropouts=2)
    assert [isinstance(up[-1], Dropout) for up in net.up] == [True, True, False, False]
    assert not any(isinstance(module, Dropout) for module in UNet(5, 3, 2, depth=5, dropouts=0).modules())


def test_a_shortcut_carries_what_the_innermost_layer_does_not():
    torch.manual_seed(0)
    net = UNet(5, 3, 2, depth=2, dropouts=0, gain=1.0).eval()
    with torch.no_grad():
        net.down[-1][1].weight.zero_()
        one, other = net(torch.zeros(1, 5, 8, 8)), net(torch.ones(1, 5, 8, 8))
    assert not torch.allclose(one, other)


def test_refusals_name_what_fits():
    with pytest.raises(UserError, match="12 x 8 cannot be halved 3 times; choose a size divisible by 8"):
        UNet(5, 3, 2, depth=3)(torch.zeros(1, 5, 12, 8))
    with pytest.raises(UserError, match="depth=1"):
        UNet(5, 3, 2, depth=1)

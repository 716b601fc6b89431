"""R3GAN's networks."""

import torch

from nets.r3 import R3Block, R3Discriminator

WIDTHS = (8, 8, 4)


def test_a_block_starts_as_its_shortcut():
    x = torch.randn(2, 8, 4, 4)
    assert torch.equal(R3Block(8, 2, 4, 6)(x), x)


def test_samples_keep_to_themselves():
    torch.manual_seed(0)
    net = R3Discriminator(WIDTHS)
    x = torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(net(x)[1:2], net(x[1:2]))


def test_the_discriminator_can_be_differentiated_twice():
    torch.manual_seed(0)
    net = R3Discriminator((4, 4)).double()
    for module in net.modules():
        if isinstance(module, R3Block):
            torch.nn.init.normal_(module.narrow.weight)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda image: net(image).square(), x, atol=1e-4)

"""R3GAN's networks."""

import torch

from nets.r3 import R3Block, R3Discriminator, R3Generator

WIDTHS = (8, 8, 4)


def test_a_block_starts_as_its_shortcut():
    x = torch.randn(2, 8, 4, 4)
    assert torch.equal(R3Block(8, 2, 4, 6)(x), x)


def test_latents_become_pictures_and_pictures_scores():
    torch.manual_seed(0)
    images = R3Generator(5, WIDTHS)(torch.randn(3, 5))
    assert images.shape == (3, 3, 16, 16)
    assert R3Discriminator(WIDTHS)(images).shape == (3,)


def test_the_first_pictures_and_scores_have_a_sensible_size():
    torch.manual_seed(0)
    images = R3Generator(32, (64, 64, 64, 32))(torch.randn(64, 32))
    assert 0.2 < images.std() < 5
    scores = R3Discriminator((64, 64, 64, 32))(torch.randn(64, 3, 32, 32))
    assert 0.01 < scores.std() < 5


def test_every_weight_learns_once_the_last_layers_are_off_zero():
    torch.manual_seed(0)
    for net, x in ((R3Generator(5, WIDTHS), torch.randn(3, 5)), (R3Discriminator(WIDTHS), torch.randn(3, 3, 16, 16))):
        for module in net.modules():
            if isinstance(module, R3Block):
                torch.nn.init.normal_(module.narrow.weight)
        net(x).square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in net.parameters())


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

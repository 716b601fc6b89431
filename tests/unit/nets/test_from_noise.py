"""What generators from noise and their discriminators have in common."""

from functools import partial

import pytest
import torch

from nets.r3 import R3Block, R3Discriminator, R3Generator
from nets.wgan import WganCritic, WganGenerator

WIDTHS, WIDE = (8, 8, 4), (64, 64, 64, 32)
SMALL = {
    "r3": (partial(R3Generator, 5), R3Discriminator),
    "wgan": (partial(WganGenerator, 5), WganCritic),
}


@pytest.fixture(params=SMALL)
def pair(request):
    torch.manual_seed(0)
    return [make(widths=WIDTHS) for make in SMALL[request.param]]


def test_latents_become_pictures_and_pictures_scores(pair):
    generator, discriminator = pair
    images = generator(torch.randn(3, 5))
    assert images.shape == (3, 3, 16, 16)
    assert discriminator(images).shape == (3,)


def test_every_weight_learns_once_the_last_layers_are_off_zero(pair):
    for net, x in zip(pair, (torch.randn(3, 5), torch.randn(3, 3, 16, 16)), strict=True):
        for module in net.modules():
            if isinstance(module, R3Block):
                torch.nn.init.normal_(module.LinearLayer3.Layer.weight)
        net(x).square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in net.parameters())


@pytest.mark.parametrize(
    ("generator", "discriminator", "spread", "largest"),
    [
        (partial(R3Generator, 32), R3Discriminator, 5, torch.inf),
        (partial(WganGenerator, 32), WganCritic, 0.9, 1),
    ],
)
def test_the_first_pictures_and_scores_have_a_sensible_size(generator, discriminator, spread, largest):
    torch.manual_seed(0)
    images = generator(widths=WIDE)(torch.randn(64, 32))
    assert 0.2 < images.std() < spread
    assert images.abs().max() <= largest
    scores = discriminator(widths=WIDE)(torch.randn(64, 3, 32, 32))
    assert 0.01 < scores.std() < 5

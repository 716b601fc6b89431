"""StyleGAN's networks."""

import pytest
import torch
from torch.nn import functional as F

from nets.stylegan import (
    EqualConv,
    EqualLinear,
    Mapping,
    MinibatchDeviation,
    ModulatedConv,
    StyleDiscriminator,
    StyleGenerator,
)

WIDTHS = (8, 8, 4)


@pytest.mark.parametrize("demodulate", [True, False])
def test_a_modulated_convolution_is_one_with_weights_of_each_samples_own(demodulate):
    torch.manual_seed(0)
    layer = ModulatedConv(5, 4, 6, 3, demodulate).double()
    torch.nn.init.normal_(layer.bias)
    x, style = torch.randn(3, 4, 7, 7, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    found = layer(x, style)
    for row in range(3):
        # Karras et al. 2020, equations 1 and 3, letter by letter.
        scales = style[row] @ layer.affine.weight.T / 5**0.5 + layer.affine.bias
        weight = layer.weight / (4 * 9) ** 0.5 * scales[None, :, None, None]
        if demodulate:
            weight = weight / (weight.square().sum((1, 2, 3), keepdim=True) + 1e-8).sqrt()
        expected = F.conv2d(x[row : row + 1], weight, layer.bias, padding=1)
        torch.testing.assert_close(found[row : row + 1], expected)


def test_demodulated_outputs_have_unit_variance_whatever_the_style():
    torch.manual_seed(0)
    layer = ModulatedConv(8, 32, 16, 3)
    x = torch.randn(4, 32, 32, 32)
    for size in (0.1, 10.0):
        assert layer(x, size * torch.randn(4, 8)).std().item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("rate", [1.0, 0.01])
def test_an_equalised_layer_keeps_the_variance_and_learns_at_its_rate(rate):
    torch.manual_seed(0)
    layer = EqualLinear(256, 512, rate, bias=0.5)
    x = torch.randn(64, 256)
    before = layer(x)
    assert (before - 0.5).std().item() == pytest.approx(1, rel=0.05)
    with torch.no_grad():
        layer.weight += 1  # what an optimizer of unit steps does
    moved = layer(x) - before
    torch.testing.assert_close(moved, rate / 16 * x.sum(1, keepdim=True).expand(64, 512), rtol=1e-3, atol=1e-3)


def test_an_equalised_convolution_keeps_the_variance():
    torch.manual_seed(0)
    assert EqualConv(16, 32, 3)(torch.randn(4, 16, 32, 32)).std().item() == pytest.approx(1, rel=0.1)


def test_the_mapping_sees_the_direction_of_a_latent_only():
    torch.manual_seed(0)
    mapping, z = Mapping(6, 8, 3), torch.randn(4, 6)
    assert mapping(z).shape == (4, 8)
    torch.testing.assert_close(mapping(z), mapping(5 * z))
    assert not torch.allclose(mapping(z), mapping(-z), atol=1e-2)


def test_styles_come_with_the_pictures_that_were_made_of_them():
    torch.manual_seed(0)
    net, z = StyleGenerator(5, 6, WIDTHS, mapping=2), torch.randn(3, 5)
    images, styles = net.styled(z)
    assert styles.shape == (3, 6, 6)
    torch.testing.assert_close(images, net(z))
    (slope,) = torch.autograd.grad(images.square().sum(), styles)
    assert (slope.abs().sum((0, 2)) > 0).all()  # every layer has a style that counts


def test_samples_keep_to_themselves():
    torch.manual_seed(0)
    for net, x in (
        (StyleGenerator(5, 6, WIDTHS), torch.randn(4, 5)),
        (StyleDiscriminator(WIDTHS, group=1), torch.randn(4, 3, 16, 16)),
    ):
        torch.testing.assert_close(net(x)[1:2], net(x[1:2]), rtol=1e-4, atol=1e-5)


def plain_deviation(x, group):
    """A figure for each sample, group by group: sample i is in group i mod (B / G)."""
    groups = len(x) // group
    found = []
    for number in range(len(x)):
        members = x[number % groups :: groups]
        found.append(((members - members.mean(0)).square().mean(0) + 1e-8).sqrt().mean())
    return torch.stack(found)


@pytest.mark.parametrize(("batch", "group", "taken"), [(8, 4, 4), (12, 4, 4), (2, 4, 2), (6, 4, 3), (5, 4, 1)])
def test_the_deviation_is_that_of_the_samples_group(batch, group, taken):
    x = torch.randn(batch, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = MinibatchDeviation(group)(x)
    assert torch.equal(found[:, :3], x)
    expected = plain_deviation(x, taken)[:, None, None].expand(-1, 4, 4)
    torch.testing.assert_close(found[:, 3], expected, rtol=1e-12, atol=0)


def deviation_on_rank(world):
    x = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = x.split(8 // world)[torch.distributed.get_rank() if world > 1 else 0].requires_grad_()
    y = MinibatchDeviation()(own)
    (slope,) = torch.autograd.grad(y.pow(3).sum(), own, create_graph=True)
    (bend,) = torch.autograd.grad(slope.square().sum(), own)
    return [each.detach() for each in (y, slope, bend)]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_has_the_samples_of_all_ranks_and_so_have_its_gradients(world, ranks):
    found = [torch.cat(each) for each in zip(*ranks(world).run(deviation_on_rank, world), strict=True)]
    for ours, theirs in zip(found, deviation_on_rank(1), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_control_that_gathers_nothing_differs():
    whole = torch.randn(8, 2, 4, 4, dtype=torch.float64)
    halves = torch.cat([MinibatchDeviation()(half) for half in whole.split(4)])
    assert (halves - MinibatchDeviation()(whole)).abs().max() > 1e-3


def test_both_can_be_differentiated_twice():
    torch.manual_seed(0)
    generator, discriminator = StyleGenerator(2, 2, (4, 4), mapping=1).double(), StyleDiscriminator((4, 4)).double()
    styles = torch.randn(1, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda s: generator.synthesis(s).mean((2, 3)), styles, atol=1e-4)
    image = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: discriminator(x).square(), image, atol=1e-4)

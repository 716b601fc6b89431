"""SEAN's generator against a slow and plain computation of the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gan.errors import UserError
from nets.blocks import onehot
from nets.sean import ACE, SeanGenerator

LABELS, STYLE = 5, 6


@pytest.fixture
def mask() -> torch.Tensor:
    """Two masks of 8 x 12; label 4 is in none, label 3 only in the second."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, 3, (2, 8, 12), generator=generator)
    label[1, :3, :3] = 3
    return onehot(label, LABELS, torch.zeros((), dtype=torch.float64))


@pytest.fixture
def codes() -> torch.Tensor:
    return torch.randn(2, LABELS, STYLE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def ace(style: int | None = STYLE) -> ACE:
    """An ACE whose every parameter matters."""
    torch.manual_seed(2)
    made = ACE(4, LABELS, 7, style, 1.0).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def plain_affine(net: ACE, mask: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SEAN's equations 1 to 3 word by word: loops over pictures and labels, and the whole style map."""
    pictures, labels, height, width = mask.shape
    mask_affine = net.mask_affine(F.relu(net.mask_features(mask)))
    if net.style_affine is None:
        return mask_affine.chunk(2, 1)
    spread = torch.zeros(pictures, STYLE, height, width, dtype=mask.dtype)
    for picture in range(pictures):
        for label in range(labels):
            code = F.relu(codes[picture, label] @ net.region_weight[label] + net.region_bias[label, 0])
            spread[picture] += code[:, None, None] * mask[picture, label]
    style_affine = net.style_affine(spread)
    shares = torch.sigmoid(net.blend)
    return tuple(
        share * style + (1 - share) * plain
        for share, style, plain in zip(shares, style_affine.chunk(2, 1), mask_affine.chunk(2, 1), strict=True)
    )


@pytest.mark.parametrize("style", [STYLE, None])
def test_the_folded_ace_is_the_plain_one(style, mask, codes):
    net = ace(style)
    x = torch.randn(2, 4, 8, 12, dtype=torch.float64)
    torch.manual_seed(3)
    found = net(x, mask, codes)
    torch.manual_seed(3)
    noisy = x + torch.randn(2, 1, 8, 12, dtype=torch.float64) * net.noise_scale
    centred = noisy - noisy.mean((0, 2, 3), keepdim=True)
    normal = centred / (noisy.var((0, 2, 3), correction=0, keepdim=True) + net.norm.eps).sqrt()
    scale, shift = plain_affine(net, mask, codes)
    torch.testing.assert_close(found, normal * (1 + scale) + shift, rtol=1e-11, atol=1e-11)


def test_the_folded_gradients_are_the_plain_ones(mask, codes):
    net = ace()
    codes.requires_grad_()
    wanted = [codes, *net.style_affine.parameters(), net.region_weight, net.region_bias, net.blend]
    weight = torch.randn(2, 8, 8, 12, dtype=torch.float64)
    folded = torch.autograd.grad((net.affine(mask, codes) * weight).sum(), wanted)
    plain = torch.autograd.grad((torch.cat(plain_affine(net, mask, codes), 1) * weight).sum(), wanted)
    for one, other in zip(folded, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_an_absent_region_has_a_zero_gradient_and_not_none(mask, codes):
    net = ace()
    net(torch.randn(2, 4, 8, 12, dtype=torch.float64), mask, codes).square().sum().backward()
    assert net.region_weight.grad[4].abs().sum() == 0
    assert net.region_weight.grad[3].abs().sum() > 0


def test_a_code_reaches_its_own_region_only(mask, codes):
    """Up to the one pixel that a 3x3 convolution sees around it."""
    net = ace()
    changed = codes.clone()
    changed[1, 3] += 1
    moved = (net.affine(mask, changed) - net.affine(mask, codes)).abs().sum(1) > 0
    near = F.max_pool2d(mask[:, 3:4], 3, 1, 1)[:, 0] > 0
    assert moved.any()
    assert not (moved & ~near).any()


@pytest.mark.parametrize("upsamplings", [2, 3, 6])
def test_any_size_comes_back(upsamplings):
    net = SeanGenerator(LABELS, STYLE, 2, 3, upsamplings)
    size = (2**upsamplings, 2 * 2**upsamplings)
    planes = onehot(torch.zeros(2, *size, dtype=torch.int64), LABELS, torch.zeros(()))
    image = net(planes, torch.zeros(2, LABELS, STYLE))
    assert image.shape == (2, 3, *size)
    assert image.abs().max() <= 1


def test_the_published_size_has_the_published_parts():
    with torch.device("meta"):
        net = SeanGenerator()
    aces = [module for module in net.modules() if isinstance(module, ACE)]
    assert len(aces) == 18
    assert sum(each.style_affine is not None for each in aces) == 15
    assert sum(each.region_weight.numel() for each in aces if each.style_affine is not None) == 15 * 19 * 512 * 512
    assert [block.conv_1.out_channels for block in (net.head, net.middle_0, net.middle_1, *net.ups)] == [
        1024, 1024, 1024, 512, 256, 128, 64,
    ]  # fmt: skip
    assert [block.learned_shortcut for block in (net.head, net.middle_0, net.middle_1, *net.ups)] == [False] * 3 + [
        True
    ] * 4


def test_every_parameter_but_those_of_absent_regions_learns(mask, codes):
    torch.manual_seed(0)
    net = SeanGenerator(LABELS, STYLE, 2, 3, upsamplings=2, gain=1.0).double()
    net(mask, codes).square().sum().backward()
    still = [name for name, parameter in net.named_parameters() if not parameter.grad.abs().sum() > 0]
    assert still == []


def test_no_parameter_is_cancelled_by_a_norm(mask, codes):
    """Adding a constant to any bias changes the picture: else its gradient would be rounding noise."""
    torch.manual_seed(0)
    net = SeanGenerator(LABELS, STYLE, 2, 3, upsamplings=2, gain=1.0).double()
    with torch.no_grad():
        before = net(mask, codes)
        for name, parameter in net.named_parameters():
            if name.endswith("bias"):
                parameter += 0.5
                assert (net(mask, codes) - before).abs().max() > 1e-6, name
                parameter -= 0.5


def test_grain_differs_by_sample_and_only_where_it_is_wanted(mask, codes):
    net = ace()
    x = torch.zeros(2, 4, 8, 12, dtype=torch.float64)
    assert not torch.equal(net(x, mask, codes), net(x, mask, codes))
    nn.init.zeros_(net.noise_scale)
    assert torch.equal(net(x, mask, codes), net(x, mask, codes))


def test_a_size_that_cannot_be_halved_says_which_one_can(mask, codes):
    net = SeanGenerator(LABELS, STYLE, 2, 3, upsamplings=3).double()
    with pytest.raises(UserError, match="a mask of 8 x 12 cannot be halved 3 times; choose a size divisible by 8"):
        net(mask, codes)
    with pytest.raises(UserError, match="upsamplings=7 is not in 2 to 6"):
        SeanGenerator(upsamplings=7)

"""SEAN's normalisation against its equations, written out with loops, in both ways that it is computed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nets.blocks import conv, onehot
from nets.sean.ace import ACE, Affine
from nets.sean.neighbourhood import SizedMasks, find_neighbourhoods

LABELS, STYLE, CHANNELS = 5, 6, 4
WAYS = pytest.mark.parametrize("way", ["tables", "maps"])
EDGES = pytest.mark.parametrize("edges", [False, True])


def masks(edges: bool = False) -> torch.Tensor:
    """Two masks of 16 x 20; label 4 is in none, label 3 only in the second."""
    label = torch.zeros(2, 16, 20, dtype=torch.int64)
    label[:, 4:11] = 1
    label[:, :, 13:] += 1
    label[1, :3, :3] = 3
    edge = torch.zeros(2, 1, 16, 20, dtype=torch.float64)
    edge[:, :, 7, 2:18] = 1
    return torch.cat([onehot(label, LABELS, edge), edge[:, : int(edges)]], 1)


def view(way: str, edges: bool = False) -> SizedMasks:
    planes = masks(edges)
    found = find_neighbourhoods(planes, LABELS) if way == "tables" else None
    assert (found is None) == (way == "maps")
    return SizedMasks(planes, found)


def codes() -> torch.Tensor:
    return torch.randn(2, LABELS, STYLE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def ace(style: int | None = STYLE, edges: bool = False, recompute: bool = True) -> ACE:
    """An ACE whose every parameter matters."""
    torch.manual_seed(2)
    made = ACE(CHANNELS, LABELS, LABELS + edges, 7, style, 1.0, recompute).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def convolved(rows: torch.Tensor, affine: Affine) -> torch.Tensor:
    return F.conv2d(rows, affine.weight.permute(2, 3, 0, 1), affine.bias, padding=1)


def plain_affine(net: ACE, planes: torch.Tensor, codes: torch.Tensor) -> list[torch.Tensor]:
    """SEAN's equations 1 to 3 word by word: loops over pictures and labels, and the whole style map."""
    from_mask = convolved(F.relu(net.mask_features(planes)), net.mask_affine).chunk(2, 1)
    if net.style_affine is None:
        return list(from_mask)
    spread = torch.zeros(len(planes), STYLE, *planes.shape[2:], dtype=planes.dtype)
    for picture in range(len(planes)):
        for label in range(LABELS):
            code = F.relu(codes[picture, label] @ net.region_weight[label] + net.region_bias[label, 0])
            spread[picture] += code[:, None, None] * planes[picture, label]
    from_style = convolved(spread, net.style_affine).chunk(2, 1)
    shares = torch.sigmoid(net.blend)
    return [
        share * style + (1 - share) * mask for share, style, mask in zip(shares, from_style, from_mask, strict=True)
    ]


def spread_out(parts: tuple[torch.Tensor, ...], where: SizedMasks) -> list[torch.Tensor]:
    """Scale and shift as maps, however they came."""
    if where.neighbourhoods is None:
        return list(parts)
    index = where.neighbourhoods.pixels.expand(-1, CHANNELS, -1)
    return [part.gather(2, index).unflatten(2, where.planes.shape[2:]) for part in parts]


@WAYS
@EDGES
@pytest.mark.parametrize("style", [STYLE, None])
def test_scale_and_shift_and_their_gradients_are_the_plain_ones(style, edges, way):
    net, where, learned = ace(style, edges), view(way, edges), codes().requires_grad_()
    wanted = [p for name, p in net.named_parameters() if name != "noise_scale"] + [learned] * (style is not None)
    weight = torch.randn(2, 2, CHANNELS, 16, 20, dtype=torch.float64)
    parts = spread_out(net.affine(where, learned), where), plain_affine(net, where.planes, learned)
    torch.testing.assert_close(*parts, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad((torch.stack(each) * weight).sum(), wanted) for each in parts]
    torch.testing.assert_close(*slopes, rtol=1e-11, atol=1e-11)


@WAYS
@pytest.mark.parametrize(("kernel", "slope"), [(3, 0.2), (1, 1.0)])
def test_noise_norm_scale_and_convolution_come_one_after_the_other(way, kernel, slope):
    net, where, then = ace(), view(way), conv(CHANNELS, 3, kernel).double()
    x = torch.randn(2, CHANNELS, 16, 20, dtype=torch.float64)
    torch.manual_seed(4)
    found = net(x, where, codes(), then, slope)
    torch.manual_seed(4)
    noisy = x + torch.randn(2, 1, 16, 20, dtype=torch.float64) * net.noise_scale
    centred = noisy - noisy.mean((0, 2, 3), keepdim=True)
    normal = centred / (noisy.var((0, 2, 3), correction=0, keepdim=True) + net.norm.eps).sqrt()
    scale, shift = plain_affine(net, where.planes, codes())
    wanted = then(F.leaky_relu(normal * (1 + scale) + shift, slope))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_each_half_of_an_affine_starts_as_a_convolution_of_its_own():
    torch.manual_seed(0)
    affine = Affine(40, 50, 0.02)
    kernel = affine.kernel()
    assert kernel.shape == (100, 40, 3, 3)
    wanted = 0.02 * (2 / ((40 + 50) * 9)) ** 0.5  # Glorot and Bengio 2010
    for half in kernel.chunk(2):
        assert half.std().item() == pytest.approx(wanted, rel=0.02)
    assert affine.bias.abs().sum() == 0

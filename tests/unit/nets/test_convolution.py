"""Convolutions that are differentiated twice, and the low-pass filter, which a GPU computes in another way."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from nets.convolution import OURS, convolve
from nets.filters import doubled, filtered

SETTINGS = [
    ((2, 3, 6, 5), (4, 3, 3, 3), {}),
    ((2, 3, 7, 6), (4, 3, 3, 3), dict(padding=1, stride=2)),
    ((2, 6, 5, 5), (9, 2, 3, 3), dict(padding=1, groups=3)),
    ((2, 3, 4, 5), (3, 2, 3, 3), dict(stride=2, transposed=True)),
    ((2, 4, 4, 5), (4, 3, 4, 4), dict(stride=2, padding=1, groups=2, transposed=True)),
]


@pytest.fixture
def ours():
    """As on a GPU, and not torch's own."""
    OURS.add("cpu")
    yield
    OURS.remove("cpu")


def random(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("x", "weight", "how"), SETTINGS)
def test_a_convolution_and_both_derivatives_are_torchs(x, weight, how, ours):
    x, weight, bias = random(x, weight, [weight[1] * how.get("groups", 1) if "transposed" in how else weight[0]])
    how = dict(how)
    theirs = F.conv_transpose2d if how.get("transposed") else F.conv2d
    rest = {name: value for name, value in how.items() if name != "transposed"}
    assert torch.equal(convolve(x, weight, bias, **how), theirs(x, weight, bias, **rest))
    assert gradcheck(lambda *given: convolve(*given, **how), (x, weight, bias))
    assert gradgradcheck(lambda *given: convolve(*given, **how), (x, weight, bias))


def test_inside_of_autocast_it_computes_and_is_differentiated_as_torchs(ours):
    x, weight = (value.detach().float().requires_grad_() for value in random((2, 3, 8, 8), (4, 3, 3, 3)))
    found = []
    for function in (convolve, F.conv2d):
        with torch.autocast("cpu", torch.bfloat16):
            made = function(x, weight, padding=1)
        (slope,) = torch.autograd.grad(made.float().square().mean(), x, create_graph=True)
        found.append([made, slope, *torch.autograd.grad(slope.square().sum(), weight)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.detach().abs().max()))


@pytest.mark.parametrize(("padding", "stride"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_gpu_filters_by_means_as_a_cpu_by_a_convolution(padding, stride, request):
    (x,) = random((2, 3, 8, 6))
    wanted, more = filtered(x, padding, stride), filtered(x, padding + 1, stride)
    request.getfixturevalue("ours")
    found = filtered(x, padding, stride)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-14)
    assert found.grad_fn.name() == "AvgPool2DBackward0"
    assert more.shape != wanted.shape or (more - wanted).abs().max() > 0.01


def test_a_gpu_doubles_by_means_as_a_cpu_by_a_convolution(request):
    (x,) = random((2, 3, 8, 6))
    wanted = doubled(x)
    request.getfixturevalue("ours")
    assert wanted.shape == (2, 3, 16, 12)
    assert torch.allclose(doubled(x), wanted, rtol=0, atol=1e-14)
    assert (F.interpolate(x, scale_factor=2) - wanted).abs().max() > 0.1

"""Convolutions that are differentiated twice."""

import pytest
import torch
from torch.nn import functional as F

from nets.convolution import OURS, convolve

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
    made = convolve(x, weight, bias, **how), theirs(x, weight, bias, **rest)
    assert torch.equal(*made) and type(made[0].grad_fn).__name__ == "_ConvolutionBackward"
    found = []
    for each in made:
        slopes = torch.autograd.grad(each.tanh().sum(), (x, weight, bias), create_graph=True)
        found.append([*slopes, *torch.autograd.grad(sum(slope.tanh().sum() for slope in slopes), (x, weight, bias))])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


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

"""What a GPU computes in one pass, by Triton's interpreter on the CPU, and convolutions differentiated twice."""

from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from nets.blocks import SLOPE, TRITON, convolve, filtered, taps
from tests.support.fused import as_on_a_gpu


def activated(x, limit):
    from nets import fused

    return fused.activated(x, limit)


@pytest.fixture(autouse=True)
def on_a_gpu():
    with as_on_a_gpu(block=2**6):  # one or two of Triton's programs
        yield


def alike(one, other, x):
    """Two functions and their derivatives, the second ones too."""
    found = []
    for function in (one, other):
        out = function(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found.append([out, slope, *torch.autograd.grad(slope.square().sum(), x)])
    pairs = zip(*found, strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-12 * float(b.detach().abs().max())) for a, b in pairs)


ROWS, CHANNELS = torch.contiguous_format, torch.channels_last


@pytest.fixture
def x(request):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 3, dtype=torch.float64)
    return x.contiguous(memory_format=getattr(request, "param", ROWS)).requires_grad_()


@pytest.mark.parametrize(("padding", "stride", "x"), [(1, 1, ROWS), (2, 2, CHANNELS)], indirect=["x"])
def test_a_gpu_filters_in_one_pass(padding, stride, x):
    def by(weight):
        return lambda x: F.conv2d(x, weight.double().expand(3, 1, -1, -1), None, stride, padding, groups=3)

    made, other = filtered(x, padding, stride), by(taps() * torch.tensor([1.0, 1.0, 1.0, 2.0]))
    assert alike(lambda x: filtered(x, padding, stride), by(taps()), x)
    assert made.is_contiguous(memory_format=ROWS if x.is_contiguous() else CHANNELS)
    assert not torch.allclose(made, other(x), rtol=0, atol=1e-12)  # the control


def test_a_compiled_network_filters_in_one_pass_too(x):
    compiled = torch.compile(lambda x: filtered(2 * x, 1) * 2, backend="eager")
    assert alike(compiled, lambda x: 4 * filtered(x, 1), x)
    assert type(compiled(x).grad_fn.next_functions[0][0]).__name__ == "_FilteredBackward"


@pytest.mark.parametrize(("limit", "x"), [(None, ROWS), (0.7, CHANNELS)], indirect=["x"])
def test_a_gpu_activates_in_one_pass(limit, x):
    most = float("inf") if limit is None else limit
    assert alike(lambda x: activated(x * x, limit), lambda x: F.leaky_relu(x * x, SLOPE).clamp(-most, most), x)
    assert activated(torch.full_like(x, torch.nan).detach(), limit).isnan().all()
    slope = torch.randn(2, 3, 4, 3, dtype=torch.float64).permute(0, 3, 2, 1)  # lies in another order
    found = [
        torch.autograd.grad(function(x), x, slope)[0]
        for function in (lambda x: activated(-x, limit), lambda x: F.leaky_relu(-x, SLOPE).clamp(-most, most))
    ]
    assert torch.equal(*found)


def test_rounding_the_limit_lets_no_gradient_through():
    x = torch.tensor([3.0, 0.5, -30.0], dtype=torch.bfloat16, requires_grad=True)
    activated(x.clone(), 0.7).sum().backward()  # 0.7 is 0.69921875 in bfloat16
    assert x.grad.tolist() == [0, 1, 0]


def test_where_triton_does_not_work_a_gpu_computes_by_torch(x):
    weight, failing = taps().double().expand(3, 1, -1, -1), mock.Mock(side_effect=RuntimeError("Failed to find gcc"))
    with mock.patch.dict(TRITON, clear=True), mock.patch("nets.fused._launch", failing):
        with pytest.warns(UserWarning, match=r"^Triton does not work on cpu \(.*Failed to find gcc\), so StyleGAN2"):
            assert torch.allclose(filtered(x, 1), F.conv2d(x, weight, padding=1, groups=3), rtol=0, atol=1e-14)
        filtered(x, 1)
    assert failing.call_count == 1  # it is tried once


# ---- convolutions ----


SETTINGS = [
    ((2, 3, 6, 5), (4, 3, 3, 3), {}),
    ((2, 3, 7, 6), (4, 3, 3, 3), dict(padding=1, stride=2)),
    ((2, 6, 5, 5), (9, 2, 3, 3), dict(padding=1, groups=3)),
    ((2, 3, 4, 5), (3, 2, 3, 3), dict(stride=2, transposed=True)),
    ((2, 4, 4, 5), (4, 3, 4, 4), dict(stride=2, padding=1, groups=2, transposed=True)),
]


def random(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("x", "weight", "how"), SETTINGS)
def test_a_convolution_and_both_derivatives_are_torchs(x, weight, how):
    x, weight, bias = random(x, weight, [weight[1] * how.get("groups", 1) if "transposed" in how else weight[0]])
    rest = {name: value for name, value in how.items() if name != "transposed"}
    theirs = F.conv_transpose2d if "transposed" in how else F.conv2d
    made = convolve(x, weight, bias, **how), theirs(x, weight, bias, **rest)
    assert torch.equal(*made) and type(made[0].grad_fn).__name__ == "_ConvolutionBackward"
    found = []
    for each in made:
        slopes = torch.autograd.grad(each.tanh().sum(), (x, weight, bias), create_graph=True)
        found.append([*slopes, *torch.autograd.grad(sum(slope.tanh().sum() for slope in slopes), (x, weight, bias))])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_inside_of_autocast_it_computes_and_is_differentiated_as_torchs():
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

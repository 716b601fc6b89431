"""What a GPU computes in one pass, by Triton's interpreter on the CPU."""

from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from nets.blocks import SLOPE
from nets.convolution import TRITON, doubled, filtered, taps
from tests.support.fused import as_on_a_gpu


def activated(x, limit):
    from nets import fused

    return fused.activated(x, limit)


@pytest.fixture(autouse=True)
def on_a_gpu():
    with as_on_a_gpu(block=2**6):  # two or three of Triton's programs
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
    x = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    return x.contiguous(memory_format=getattr(request, "param", ROWS)).requires_grad_()


@pytest.mark.parametrize(
    ("padding", "stride", "x"),
    [
        *((1, 1, ROWS), (1, 2, CHANNELS)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1, CHANNELS), (2, 2, ROWS))),
    ],
    indirect=["x"],
)
def test_a_gpu_filters_in_one_pass(padding, stride, x):
    def by(weight):
        return lambda x: F.conv2d(x, weight.double().expand(3, 1, -1, -1), None, stride, padding, groups=3)

    assert alike(lambda x: filtered(x, padding, stride), by(taps()), x)
    form = ROWS if x.is_contiguous() else CHANNELS
    assert filtered(x, padding, stride).is_contiguous(memory_format=form)
    other = by(taps() * torch.tensor([1.0, 1.0, 1.0, 2.0]))  # the control
    assert not torch.allclose(filtered(x, padding, stride), other(x), rtol=0, atol=1e-12)


def test_a_compiled_network_filters_in_one_pass_too(x):
    compiled = torch.compile(lambda x: filtered(2 * x, 1) * 2, backend="eager")
    assert alike(compiled, lambda x: 4 * filtered(x, 1), x)
    assert type(compiled(x).grad_fn.next_functions[0][0]).__name__ == "_FilteredBackward"


@pytest.mark.parametrize("x", [CHANNELS], indirect=True)
@pytest.mark.slow
def test_a_gpu_doubles_in_one_pass(x):
    weight = 4 * taps().double().expand(3, 1, -1, -1)
    assert alike(doubled, lambda x: F.conv_transpose2d(x, weight, None, 2, 1, groups=3), x)
    assert (doubled(x) - F.interpolate(x, scale_factor=2)).abs().max() > 0.1


@pytest.mark.parametrize(("limit", "x"), [(None, ROWS), (0.7, CHANNELS)], indirect=["x"])
def test_a_gpu_activates_in_one_pass(limit, x):
    most = float("inf") if limit is None else limit
    assert alike(lambda x: activated(x * x, limit), lambda x: F.leaky_relu(x * x, SLOPE).clamp(-most, most), x)
    assert activated(torch.full_like(x, torch.nan).detach(), limit).isnan().all()
    slope = torch.randn(2, 4, 6, 3, dtype=torch.float64).permute(0, 3, 2, 1)  # lies in another order
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

"""Spectral norm against torch's own of the published networks."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from nets.spectral import spectral_norm


def classic(layer: nn.Conv2d) -> nn.Conv2d:
    """The same layer under torch.nn.utils.spectral_norm, with the same weight, u and v."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = torch.nn.utils.spectral_norm(nn.Conv2d(3, 5, 3, dtype=torch.float64))
    ours = layer.parametrizations.weight
    parts = {"weight_orig": ours.original, "weight_u": ours[0]._u, "weight_v": ours[0]._v, "bias": layer.bias}
    other.load_state_dict({name: part.detach().clone() for name, part in parts.items()})
    return other


@pytest.fixture
def layer() -> nn.Conv2d:
    torch.manual_seed(0)
    made = spectral_norm(nn.Conv2d(3, 5, 3, dtype=torch.float64))
    parametrization = made.parametrizations.weight[0]
    for vector in (parametrization._u, parametrization._v):
        vector.copy_(torch.nn.functional.normalize(torch.randn_like(vector), dim=0))
    return made


@pytest.mark.parametrize("modes", [[True], [False], [True, True, False]])
def test_it_is_the_classic_spectral_norm(modes, layer):
    """Values, gradients, u and v, one forward after the other."""
    other = classic(layer)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    totals = [torch.zeros((), dtype=torch.float64)] * 2
    for training in modes:
        found, wanted = layer.train(training)(x), other.train(training)(x)
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
        totals = [totals[0] + found.square().sum(), totals[1] + wanted.square().sum()]
    for total in totals:
        total.backward()
    ours = layer.parametrizations.weight
    torch.testing.assert_close(ours.original.grad, other.weight_orig.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[0]._u, other.weight_u, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ours[0]._v, other.weight_v, rtol=1e-13, atol=1e-13)


def test_a_new_layer_is_bounded_at_once():
    torch.manual_seed(0)
    layer = spectral_norm(nn.Conv2d(8, 8, 3)).eval()
    assert is_parametrized(layer, "weight")
    assert torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2).item() == pytest.approx(1, abs=0.1)


def test_the_largest_singular_value_is_taken_in_full_precision_under_autocast(layer):
    layer.float().eval()
    plain = layer.weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.weight, plain)
        layer.train()
        layer(torch.randn(1, 3, 6, 6))
    parametrization = layer.parametrizations.weight[0]
    assert parametrization._u.norm().item() == pytest.approx(1, abs=1e-6)


def test_gradients_of_gradients_are_the_plain_divisions(layer):
    """A gradient penalty goes through the division twice."""
    layer.eval()
    ours = layer.parametrizations.weight
    u, v, weight = ours[0]._u, ours[0]._v, ours.original
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)

    def penalty(divided: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = torch.nn.functional.conv2d(x, divided, layer.bias).tanh().sum()
        slopes = torch.autograd.grad(out, (x, weight), create_graph=True)
        return torch.autograd.grad(sum(slope.square().sum() for slope in slopes), (x, weight))

    found = penalty(layer.weight)
    wanted = penalty(weight / torch.dot(u, weight.flatten(1) @ v))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)

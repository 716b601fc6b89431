"""Two convolutions of a mask in one step: the same values and gradients as one by one, and nothing kept between."""

import pytest
import torch

from nets.sean.normconv import mask_conv, plain_mask_conv


@pytest.fixture
def parts() -> list[torch.Tensor]:
    """Planes, the first convolution, the second."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 6, 5), (4, 3, 3, 3), (4,), (6, 4, 3, 3), (6,)]
    made = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return [part.requires_grad_(number > 0) for number, part in enumerate(made)]


def test_values_and_gradients_are_those_of_one_after_the_other(parts):
    outs = mask_conv(*parts), plain_mask_conv(*parts)
    torch.testing.assert_close(*outs)
    weight = torch.randn(outs[0].shape, dtype=torch.float64)
    pairs = zip(*(torch.autograd.grad((out * weight).sum(), parts[1:]) for out in outs), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_are_the_slopes_to_the_second_order(parts):
    parts[0].requires_grad_()
    assert torch.autograd.gradcheck(mask_conv, parts)
    assert torch.autograd.gradgradcheck(mask_conv, parts)


def test_what_is_frozen_gets_no_gradient(parts):
    parts[1].requires_grad_(False)
    parts[4].requires_grad_(False)
    mask_conv(*parts).square().sum().backward()
    assert [part.grad is not None for part in parts] == [False, False, True, True, False]


def test_nothing_is_kept_but_what_comes_in(parts):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        mask_conv(*parts)
    known = {part.untyped_storage().data_ptr() for part in parts}
    assert {tensor.untyped_storage().data_ptr() for tensor in saved} == known


def test_half_precision(parts):
    parts = [part.detach().float().requires_grad_(part.requires_grad) for part in parts]
    wanted = mask_conv(*parts)
    with torch.autocast("cpu", torch.bfloat16):
        found = mask_conv(*parts)
    assert found.dtype == torch.bfloat16
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()
    found.sum().backward()
    assert {part.grad.dtype for part in parts[1:]} == {torch.float32}

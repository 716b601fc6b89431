"""Losses against their formulas, computed in plain numbers."""

import copy
import math

import pytest
import torch
from torch import nn

from gan import losses, noise

REAL, FAKE = [1.5, -0.25, 0.5], [-2.0, 0.75, -0.5]


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


LOSSES = {
    "hinge_discriminator": mean(max(0, 1 - r) for r in REAL) + mean(max(0, 1 + f) for f in FAKE),
    "non_saturating_discriminator": mean(softplus(-r) for r in REAL) + mean(softplus(f) for f in FAKE),
    "least_squares_discriminator": mean((r - 1) ** 2 for r in REAL) / 2 + mean(f**2 for f in FAKE) / 2,
    "relativistic": mean(softplus(-(r - f)) for r, f in zip(REAL, FAKE, strict=True)),
    "wasserstein_critic": mean(FAKE) - mean(REAL),
    "hinge_generator": -mean(FAKE),
    "non_saturating_generator": -mean(math.log(1 / (1 + math.exp(-f))) for f in FAKE),
    "least_squares_generator": mean((f - 1) ** 2 for f in FAKE),
    "wasserstein_generator": -mean(FAKE),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula_of_both_scores_or_of_the_fakes(name):
    scores = [torch.tensor(FAKE)] if name.endswith("generator") else [torch.tensor(REAL), torch.tensor(FAKE)]
    assert getattr(losses, name)(*scores).item() == pytest.approx(LOSSES[name], rel=1e-5)


@pytest.mark.parametrize("penalty", [losses.r1, losses.r2])
def test_the_penalty_is_half_the_mean_squared_slope(penalty):
    """Against a network whose gradient is known by hand: f(x) = sum(a * x^2), so df/dx = 2 a x."""
    a = torch.arange(12, dtype=torch.float64).view(3, 2, 2).requires_grad_()
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    scores, slope = penalty(lambda image: (a * image.square()).flatten(1).sum(1), x)
    torch.testing.assert_close(scores, (a * x.square()).flatten(1).sum(1))
    torch.testing.assert_close(slope, 0.5 * (2 * a * x).square().flatten(1).sum(1).mean())
    # It can be differentiated again: d(slope)/da = mean over the batch of 4 a x^2.
    slope.backward()
    torch.testing.assert_close(a.grad, (4 * a.detach() * x.square()).mean(0))


def test_the_penalty_sends_no_gradient_to_who_drew_the_fakes_and_works_where_gradients_are_off():
    pen = torch.ones(2, 3, requires_grad=True)
    judge, fakes = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), pen * 2
    with torch.no_grad():
        scores, slope = losses.r2(judge, fakes)
    (scores.sum() + slope).backward()
    assert pen.grad is None and judge[0].weight.grad.abs().sum() > 0


# ---- WGAN-GP, path lengths, distillation ----


def test_the_penalty_teaches_the_critic_and_neither_pictures_nor_fakes():
    critic = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))
    real, fake = torch.randn(2, 4, 3, 2, 2).requires_grad_().unbind()
    with torch.no_grad():
        loss = losses.gradient_penalty(critic, real, fake)
    assert torch.autograd.grad(loss, (real, fake), allow_unused=True, retain_graph=True) == (None, None)
    loss.backward()
    assert critic[1].weight.grad.abs().sum() > 0
    nn.init.zeros_(critic[3].weight)  # a critic without any slope is no NaN
    loss = losses.gradient_penalty(critic, real, fake)
    loss.backward()
    assert loss.item() == 1 and critic[3].weight.grad.isfinite().all()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_penalties_are_exact_under_autocast(half):
    """A slope of 1e-5 squares to 1e-10, which float16 does not hold; bfloat16 would be off by a percent."""
    torch.manual_seed(0)
    critic, net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Linear(5, 12)
    faint = copy.deepcopy(critic)
    with torch.no_grad():
        faint[3].weight.mul_(1e-5)

    def styled(z):
        styles = (z + net.bias[:5]).unsqueeze(1)
        return torch.tanh(net(styles[:, 0])).view(-1, 3, 2, 2), styles

    real, fake, latents = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2), torch.randn(4, 5)

    def penalties():
        with noise.at(noise.Place(("test",), 4, 4, 16)):
            others = losses.gradient_penalty(critic, real, fake), losses.path_lengths(styled, latents)[1]
        return *losses.r1(faint, real), *others

    wanted = penalties()
    with torch.autocast("cpu", half):
        found = penalties()
        assert found[0].dtype == losses.r1(faint, real.to(half))[0].dtype == torch.float32
        assert critic(real).dtype == half  # autocast goes on afterwards
    found, wanted = ([*each, *torch.autograd.grad(each[1], faint[1].weight)] for each in (found, wanted))
    torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-6, atol=0)


def test_denoising_is_weighted_by_the_size_of_the_noise():
    clean, denoised = torch.randn(2, 2, 3, 2, 2, dtype=torch.float64).requires_grad_().unbind()
    sigma = [0.2, 3.0]
    found = losses.denoising(denoised, clean, torch.tensor(sigma, dtype=torch.float64), 0.5)
    errors = (denoised - clean).square().flatten(1).mean(1).tolist()
    expected = mean((s**2 + 0.5**2) / (s * 0.5) ** 2 * error for s, error in zip(sigma, errors, strict=True))
    assert found.item() == pytest.approx(expected)
    assert torch.autograd.grad(found, clean, allow_unused=True) == (None,)


def test_distribution_matching_has_the_published_gradient():
    pictures, real, fake = torch.randn(3, 4, 3, 2, 2, dtype=torch.float64)
    pictures.requires_grad_()
    (found,) = torch.autograd.grad(losses.distribution_matching(pictures, real, fake), pictures)
    for row in range(4):
        size = (pictures[row] - real[row]).abs().mean()
        torch.testing.assert_close(found[row] * pictures.numel(), (fake[row] - real[row]) / size)
    loss = losses.distribution_matching(pictures, pictures.detach(), pictures.detach())  # the teacher's own pictures
    assert not torch.autograd.grad(loss, pictures)[0].any()

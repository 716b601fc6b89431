"""Losses against their formulas, computed in plain numbers."""

import math

import pytest
import torch
from torch import nn

from gan import losses

REAL, FAKE = [1.5, -0.25, 0.5], [-2.0, 0.75, -0.5]


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


PAIRS = {
    "hinge_discriminator": mean(max(0, 1 - r) for r in REAL) + mean(max(0, 1 + f) for f in FAKE),
    "non_saturating_discriminator": -mean(math.log(sigmoid(r)) for r in REAL)
    - mean(math.log(1 - sigmoid(f)) for f in FAKE),
    "least_squares_discriminator": mean((r - 1) ** 2 for r in REAL) / 2 + mean(f**2 for f in FAKE) / 2,
    "relativistic": mean(softplus(-(r - f)) for r, f in zip(REAL, FAKE, strict=True)),
}
SINGLES = {
    "hinge_generator": -mean(FAKE),
    "non_saturating_generator": -mean(math.log(sigmoid(f)) for f in FAKE),
    "least_squares_generator": mean((f - 1) ** 2 for f in FAKE),
}


@pytest.mark.parametrize("name", PAIRS)
def test_losses_of_two_scores(name):
    loss = getattr(losses, name)(torch.tensor(REAL), torch.tensor(FAKE))
    assert loss.item() == pytest.approx(PAIRS[name], rel=1e-5)


@pytest.mark.parametrize("name", SINGLES)
def test_losses_of_the_fakes_score(name):
    assert getattr(losses, name)(torch.tensor(FAKE)).item() == pytest.approx(SINGLES[name], rel=1e-5)


def test_the_hinge_stops_pulling_beyond_one():
    real, fake = torch.tensor([1.5], requires_grad=True), torch.tensor([-1.5], requires_grad=True)
    losses.hinge_discriminator(real, fake).backward()
    assert real.grad == 0
    assert fake.grad == 0


def test_feature_matching_leaves_out_the_score_and_the_real_side():
    def scales(shift: float) -> list[list[torch.Tensor]]:
        made = [[torch.zeros(2, 3, 4, 4) + shift, torch.zeros(2, 5, 2, 2) + 2 * shift, torch.full((2, 1), 99 * shift)]]
        made += [[torch.zeros(2, 3, 2, 2) + 3 * shift, torch.full((2, 1), 99 * shift)]]
        return [[features.requires_grad_() for features in scale] for scale in made]

    real, fake = scales(0.0), scales(1.0)
    loss = losses.feature_matching(real, fake)
    assert loss.item() == pytest.approx((1 + 2 + 3) / 2)
    loss.backward()
    assert all(features.grad is None for scale in real for features in scale)
    assert [[features.grad is not None for features in scale] for scale in fake] == [[True, True, False], [True, False]]


def test_the_perceptual_loss_weighs_five_layers_and_leaves_out_the_real_side():
    real = [torch.zeros(2, 3, 4, 4, requires_grad=True) for _ in range(5)]
    fake = [torch.full((2, 3, 4, 4), step, requires_grad=True) for step in (32.0, -16.0, 24.0, 2.0, -7.0)]
    loss = losses.perceptual(real, fake)
    assert loss.item() == pytest.approx(1 + 1 + 3 + 0.5 + 7)
    loss.backward()
    assert all(features.grad is None for features in real)
    assert all(features.grad.abs().sum() > 0 for features in fake)
    with pytest.raises(ValueError, match="zip"):
        losses.perceptual(real[:4], fake[:4])


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


def test_the_penalty_sends_no_gradient_to_who_drew_the_fakes():
    pen = torch.ones(2, 3, requires_grad=True)
    scores, slope = losses.r2(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), pen * 2)
    (scores.sum() + slope).backward()
    assert pen.grad is None


def test_the_penalty_works_where_gradients_are_off():
    with torch.no_grad():
        _, slope = losses.r1(nn.Linear(3, 1), torch.ones(2, 3))
    assert slope.requires_grad


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_the_penalty_is_exact_under_autocast(half):
    """A slope of 1e-5 squares to 1e-10, which float16 does not hold; bfloat16 would be off by a percent."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        net[2].weight.mul_(1e-5)
    images = torch.randn(4, 6)
    _, wanted = losses.r1(net, images)
    (wanted_gradient,) = torch.autograd.grad(wanted, net[0].weight)
    with torch.autocast("cpu", half):
        for given in (images, images.to(half).float(), images.to(half)):
            scores, found = losses.r1(net, given)
        assert scores.dtype == torch.float32
        _, found = losses.r1(net, images)
        assert net(images).dtype == half  # autocast goes on afterwards
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found, net[0].weight)[0], wanted_gradient, rtol=1e-6, atol=0)


def test_shares_of_a_batch_average_to_the_whole():
    """What data parallelism rests on: the mean of the shares' losses is the loss of the batch."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    real, fake = torch.randn(2, 8, 6, dtype=torch.float64)
    for loss in (
        lambda r, f: losses.hinge_discriminator(net(r), net(f)),
        lambda r, f: losses.relativistic(net(r), net(f)),
        lambda r, f: losses.r1(net, r)[1],
        lambda r, f: losses.feature_matching([[r, r]], [[f, f]]),
        lambda r, f: losses.perceptual([r] * 5, [f] * 5),
    ):
        shares = [loss(r, f) for r, f in zip(real.chunk(4), fake.chunk(4), strict=True)]
        torch.testing.assert_close(torch.stack(shares).mean(), loss(real, fake))

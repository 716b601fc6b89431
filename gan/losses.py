"""The losses of the games: one small function a formula, each with its source.

Scores are a discriminator's raw outputs, of any shape; a loss is their mean, so that the average over equal
shares of a batch is the loss of the whole batch.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Features = Sequence[Tensor]


def hinge_discriminator(real: Tensor, fake: Tensor) -> Tensor:
    """Push real scores above 1 and fake scores below -1; what is beyond pulls no more."""
    # Lim and Ye 2017, Tran et al. 2017.
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def hinge_generator(fake: Tensor) -> Tensor:
    """Raise the score of the fakes; the hinge has no bend on this side, or a good fake would stop learning."""
    # Lim and Ye 2017, Tran et al. 2017.
    return -fake.mean()


def non_saturating_discriminator(real: Tensor, fake: Tensor) -> Tensor:
    """Binary cross-entropy of real against fake."""
    # Goodfellow et al. 2014, equation 1: -log D(x) - log(1 - D(G(z))), with D the sigmoid of the score.
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def non_saturating_generator(fake: Tensor) -> Tensor:
    """The generator's loss that keeps a slope where the discriminator is sure."""
    # Goodfellow et al. 2014, section 3: maximise log D(G(z)).
    return F.softplus(-fake).mean()


def least_squares_discriminator(real: Tensor, fake: Tensor) -> Tensor:
    """Real scores towards 1, fake scores towards 0; halved, as the discriminator shall not run ahead."""
    # Mao et al. 2017; the half is of Zhu et al. 2017 (CycleGAN), section 7.1.
    return 0.5 * ((real - 1).square().mean() + fake.square().mean())


def least_squares_generator(fake: Tensor) -> Tensor:
    """Fake scores towards 1."""
    # Mao et al. 2017.
    return (fake - 1).square().mean()


def relativistic(better: Tensor, worse: Tensor) -> Tensor:
    """Wish that each score of `better` exceeds the one of `worse` it is paired with.

    The discriminator passes (real, fake) and the generator (fake, real): judging in pairs leaves no constant
    score that satisfies it, which is what lets a generator drop modes.
    """
    # Jolicoeur-Martineau 2019 in the pairing form of R3GAN, Huang et al. 2024, equation 2.
    return F.softplus(worse - better).mean()


def feature_matching(real: Sequence[Features], fake: Sequence[Features]) -> Tensor:
    """How far the discriminator's inner features of the fakes are from those of the reals, mean over scales.

    A list of features a scale, the score last, which is left out. The real side is a target and gets no gradient.
    """
    # Wang et al. 2018 (pix2pixHD), equation 4.
    parts = [
        F.l1_loss(ours, theirs.detach())
        for real_scale, fake_scale in zip(real, fake, strict=True)
        for ours, theirs in zip(fake_scale[:-1], real_scale[:-1], strict=True)
    ]
    return torch.stack(parts).sum() / len(real)


def perceptual(real: Features, fake: Features) -> Tensor:
    """How far VGG-19's features of the fakes are from those of the reals, the deeper ones counting more.

    The features are relu1_1 to relu5_1, fine to coarse. The real side is a target and gets no gradient.
    """
    # Johnson et al. 2016, with the layers, L1 and weights of Wang et al. 2018 (pix2pixHD), which SPADE and SEAN use.
    weights = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1)
    layers = zip(weights, fake, real, strict=True)
    return torch.stack([weight * F.l1_loss(ours, theirs.detach()) for weight, ours, theirs in layers]).sum()


def r1(discriminator: Callable[[Tensor], Tensor], real: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of real pictures, and half the squared slope of the discriminator there.

    Use the scores for the loss as well: one forward serves both. See [Note: penalties under autocast].
    """
    # R1 of Mescheder et al. 2018, equation 9, for gamma = 1.
    return _scores_and_slope(discriminator, real)


def r2(discriminator: Callable[[Tensor], Tensor], fake: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of fakes, and half the squared slope of the discriminator there; the fakes get no gradient."""
    # R2 of Mescheder et al. 2018, equation 10, for gamma = 1.
    return _scores_and_slope(discriminator, fake)


def _scores_and_slope(discriminator: Callable[[Tensor], Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, and half the squared norm of their gradient with respect to the images, mean over the batch.

    [Note: penalties under autocast]
    The penalty squares a gradient and is then differentiated again. Under autocast that gradient would come
    in the half precision of the layers it went through: below 6e-8 it is zero in float16, no loss scale
    protects it (that one is applied to the loss, later), and bfloat16 leaves it two digits. So the forward
    that is differentiated runs outside autocast, in the precision of the weights, and its scores too.
    """
    kind = images.device.type
    if torch.is_autocast_enabled(kind):
        images = images.float()
    with torch.autocast(kind, enabled=False), torch.enable_grad():
        images = images.detach().requires_grad_()
        scores = discriminator(images)
        (slope,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
        return scores, 0.5 * slope.square().flatten(1).sum(1).mean()

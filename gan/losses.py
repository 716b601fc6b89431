"""The losses of the games: one small function a formula, each with its source.

Scores are a discriminator's raw outputs, of any shape; a loss is their mean, so that the average over equal
shares of a batch is the loss of the whole batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gan import noise

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


def wasserstein_critic(real: Tensor, fake: Tensor) -> Tensor:
    """Raise real scores above fake ones without bound; only a critic with bounded slope may be asked to."""
    # Arjovsky et al. 2017, equation 3: the negative of what the critic maximises, E f(x) - E f(G(z)).
    return fake.mean() - real.mean()


def wasserstein_generator(fake: Tensor) -> Tensor:
    """Raise the critic's score of the fakes."""
    # Arjovsky et al. 2017, equation 4.
    return -fake.mean()


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
    with _precisely(images) as images:
        images = images.detach().requires_grad_()
        scores = discriminator(images)
        (slope,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
        return scores, 0.5 * slope.square().flatten(1).sum(1).mean()


def gradient_penalty(critic: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor) -> Tensor:
    """How far the critic's slope is from 1, squared, at a random place between each picture and its fake.

    Neither of them gets a gradient. See [Note: penalties under autocast].
    """
    # WGAN-GP, Gulrajani et al. 2017, equation 3 and algorithm 1, for lambda = 1.
    with _precisely(real, fake) as (real, fake):
        share = noise.rand((len(real), *[1] * (real.dim() - 1)), like=real)
        between = torch.lerp(fake.detach(), real.detach(), share).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return (torch.linalg.vector_norm(slope.flatten(1), dim=1) - 1).square().mean()


def path_lengths(styled: Callable[[Tensor], tuple[Tensor, Tensor]], latents: Tensor) -> Tensor:
    """How far each picture moves when its styles do, in a random direction of picture space: [B].

    `styled` makes of latents the pictures [B, 3, H, W] and the styles [B, L, D] they were made of, one for each
    of L layers. The penalty is the squared difference of the lengths from their running mean.
    See [Note: penalties under autocast].
    """
    # StyleGAN2, Karras et al. 2020, equation 4: the norm of J^T y, y of unit normal noise. As published in code, y
    # is scaled by 1 / sqrt(H * W), which makes the length not depend on the size, and the squares of the norms are
    # averaged over layers.
    with _precisely(latents) as latents:
        pictures, styles = styled(latents)
        direction = noise.randn(pictures.shape, like=pictures) / (pictures.shape[-2] * pictures.shape[-1]) ** 0.5
        (slope,) = torch.autograd.grad((pictures * direction).sum(), styles, create_graph=True)
        return torch.linalg.vector_norm(slope.flatten(1), dim=1) / styles.shape[1] ** 0.5


def denoising(denoised: Tensor, clean: Tensor, sigma: Tensor, spread: float) -> Tensor:
    """How far pictures freed of noise of size `sigma` [B] are from the clean ones, about equal for every sigma.

    `spread` is the standard deviation of the clean pictures. Their side is a target and gets no gradient.
    """
    # EDM, Karras et al. 2022, equations 2 and 8 and table 1: lambda = (sigma^2 + spread^2) / (sigma * spread)^2.
    weight = (sigma**2 + spread**2) / (sigma * spread) ** 2
    return (weight * (denoised - clean.detach()).square().flatten(1).mean(1)).mean()


def distribution_matching(pictures: Tensor, real: Tensor, fake: Tensor) -> Tensor:
    """A loss whose gradient moves the pictures' distribution towards the real one.

    `real` and `fake` are the pictures, noised and then denoised by a denoiser of real pictures (the teacher) and
    one of these fakes (the fake score). A denoiser D holds the score of noised pictures x, (D(x) - x) / sigma^2, so
    the difference of the scores is that of the denoised pictures. Its value says nothing; its gradient does.
    """
    # DMD, Yin et al. 2024a, equations 7 and 8: the gradient of the Kullback-Leibler divergence, weighted to the same
    # size at every noise by the mean error of the teacher, |pictures - real|.
    with torch.no_grad():
        size = (pictures - real).abs().flatten(1).mean(1).clamp_min(1e-8)
        direction = (fake - real) / size.view(-1, *[1] * (pictures.dim() - 1))
        target = pictures - direction
    # The half and the square are the published way to say "this is the gradient", divided by the number of values.
    return 0.5 * (pictures - target).square().mean()


@contextmanager
def _precisely(*tensors: Tensor) -> Iterator[Any]:
    """Outside autocast and with gradients on, the tensors as wide as the weights.

    See [Note: penalties under autocast].
    """
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        tensors = tuple(tensor.float() for tensor in tensors)
    with torch.autocast(kind, enabled=False), torch.enable_grad():
        yield tensors if len(tensors) > 1 else tensors[0]

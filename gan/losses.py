"""The losses of the games: a small function for each formula, with its source.

Scores are a discriminator's raw outputs, of any shape. A loss is a mean over samples, so the average over equal parts
of a batch is the loss of the whole batch.
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
    """Push real scores above 1 and fake scores below -1. Scores beyond that have no gradient."""
    # Lim and Ye 2017, Tran et al. 2017.
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def hinge_generator(fake: Tensor) -> Tensor:
    """Raise the scores of the fakes. There is no hinge here, or a good fake would stop learning."""
    # Lim and Ye 2017, Tran et al. 2017.
    return -fake.mean()


def non_saturating_discriminator(real: Tensor, fake: Tensor) -> Tensor:
    """Binary cross-entropy of real against fake."""
    # Goodfellow et al. 2014, equation 1: -log D(x) - log(1 - D(G(z))), with D the sigmoid of the score.
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def non_saturating_generator(fake: Tensor) -> Tensor:
    """The generator's loss that keeps a gradient where the discriminator is sure."""
    # Goodfellow et al. 2014, section 3: maximise log D(G(z)).
    return F.softplus(-fake).mean()


def least_squares_discriminator(real: Tensor, fake: Tensor) -> Tensor:
    """Real scores towards 1 and fake scores towards 0; halved, to slow the discriminator down."""
    # Mao et al. 2017; the half is from Zhu et al. 2017 (CycleGAN), section 7.1.
    return 0.5 * ((real - 1).square().mean() + fake.square().mean())


def least_squares_generator(fake: Tensor) -> Tensor:
    """Fake scores towards 1."""
    # Mao et al. 2017.
    return (fake - 1).square().mean()


def relativistic(better: Tensor, worse: Tensor) -> Tensor:
    """Push each score of `better` above the score of `worse` that it is paired with.

    The discriminator passes (real, fake), the generator (fake, real). No constant score can satisfy a loss on pairs,
    which is what lets a generator drop modes elsewhere.
    """
    # Jolicoeur-Martineau 2019 in the pairing form of R3GAN, Huang et al. 2024, equation 2.
    return F.softplus(worse - better).mean()


def wasserstein_critic(real: Tensor, fake: Tensor) -> Tensor:
    """Raise real scores above fake ones without limit. The critic needs a bounded slope, as by gradient_penalty."""
    # Arjovsky et al. 2017, equation 3: the negative of what the critic maximises, E f(x) - E f(G(z)).
    return fake.mean() - real.mean()


def wasserstein_generator(fake: Tensor) -> Tensor:
    """Raise the critic's score of the fakes."""
    # Arjovsky et al. 2017, equation 4.
    return -fake.mean()


def feature_matching(real: Sequence[Features], fake: Sequence[Features]) -> Tensor:
    """The distance of the discriminator's inner features between fakes and reals, averaged over scales.

    Each scale is a list of features. The score comes last in it and is left out. The reals get no gradient.
    """
    # Wang et al. 2018 (pix2pixHD), equation 4.
    parts = [
        F.l1_loss(ours, theirs.detach())
        for real_scale, fake_scale in zip(real, fake, strict=True)
        for ours, theirs in zip(fake_scale[:-1], real_scale[:-1], strict=True)
    ]
    return torch.stack(parts).sum() / len(real)


def perceptual(real: Features, fake: Features) -> Tensor:
    """The distance of VGG-19's features between fakes and reals; deeper features count more.

    The features are relu1_1 to relu5_1, fine to coarse. The reals get no gradient.
    """
    # Johnson et al. 2016, with the layers, L1 and weights of Wang et al. 2018 (pix2pixHD), which SPADE and SEAN use.
    weights = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1)
    layers = zip(weights, fake, real, strict=True)
    return torch.stack([weight * F.l1_loss(ours, theirs.detach()) for weight, ours, theirs in layers]).sum()


def r1(discriminator: Callable[[Tensor], Tensor], real: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of real pictures, and the penalty: half the squared gradient of the scores at the pictures.

    Use the scores for the loss too: one forward is enough for both. See [Note: penalties under autocast].
    """
    # R1 of Mescheder et al. 2018, equation 9, for gamma = 1.
    #
    # [Note: penalties under autocast]
    # The penalty squares a gradient and is then differentiated again. Under autocast this gradient would have half
    # precision. In float16 it is zero below 6e-8, and the loss scale cannot help, because it is applied later, to the
    # loss. In bfloat16 it has two digits. So this forward runs outside autocast, in the precision of the weights.
    with _full_precision(real) as real:
        images = real.detach().requires_grad_()
        scores = discriminator(images)
        (slope,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
        return scores, 0.5 * slope.square().flatten(1).sum(1).mean()


def r2(discriminator: Callable[[Tensor], Tensor], fake: Tensor) -> tuple[Tensor, Tensor]:
    """As `r1`, for fakes. The fakes get no gradient."""
    # R2 of Mescheder et al. 2018, equation 10, for gamma = 1.
    return r1(discriminator, fake)


def gradient_penalty(critic: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor) -> Tensor:
    """The squared distance from 1 of the critic's slope, at a random point between each picture and its fake.

    Pictures and fakes get no gradient. See [Note: penalties under autocast].
    """
    # WGAN-GP, Gulrajani et al. 2017, equation 3 and algorithm 1, for lambda = 1.
    with _full_precision(real, fake) as (real, fake):
        share = noise.rand((len(real), *[1] * (real.dim() - 1)), like=real)
        between = torch.lerp(fake.detach(), real.detach(), share).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return (torch.linalg.vector_norm(slope.flatten(1), dim=1) - 1).square().mean()


def path_lengths(styled: Callable[[Tensor], tuple[Tensor, Tensor]], latents: Tensor) -> tuple[Tensor, Tensor]:
    """The pictures, and how far each moves in a random direction when its styles change: lengths [B].

    `styled` makes pictures [B, 3, H, W] from latents, and also returns their styles [B, L, D], one for each of L
    layers. The penalty is the squared difference of the lengths from their running mean. See
    [Note: penalties under autocast].
    """
    # StyleGAN2, Karras et al. 2020, equation 4: the norm of J^T y, where y is normal noise. As in the published code,
    # y is scaled by 1 / sqrt(H * W), so lengths do not depend on the size, and squares are averaged over layers.
    with _full_precision(latents) as latents:
        pictures, styles = styled(latents)
        direction = noise.randn(pictures.shape, like=pictures) / (pictures.shape[-2] * pictures.shape[-1]) ** 0.5
        (slope,) = torch.autograd.grad((pictures * direction).sum(), styles, create_graph=True)
        return pictures, torch.linalg.vector_norm(slope.flatten(1), dim=1) / styles.shape[1] ** 0.5


def denoising(denoised: Tensor, clean: Tensor, sigma: Tensor, spread: float) -> Tensor:
    """The squared error of denoised pictures, weighted to about the same size at every noise size `sigma` [B].

    `spread` is the standard deviation of clean pictures. The clean pictures get no gradient.
    """
    # EDM, Karras et al. 2022, equations 2 and 8 and table 1: lambda = (sigma^2 + spread^2) / (sigma * spread)^2.
    weight = (sigma**2 + spread**2) / (sigma * spread) ** 2
    return (weight * (denoised - clean.detach()).square().flatten(1).mean(1)).mean()


def distribution_matching(pictures: Tensor, real: Tensor, fake: Tensor) -> Tensor:
    """A loss whose gradient moves the distribution of the pictures towards the real one.

    `real` and `fake` are the pictures, noised and then denoised: by a denoiser for real pictures (the teacher), and by
    one for these fakes (the fake score). A denoiser D has the score of noised pictures x: (D(x) - x) / sigma^2. So the
    difference of the scores is the difference of the denoised pictures. Only the gradient has a meaning, not the value.
    """
    # DMD, Yin et al. 2024a, equations 7 and 8: the gradient of the Kullback-Leibler divergence, divided by the mean
    # error of the teacher, |pictures - real|, to have the same size at every noise.
    with torch.no_grad():
        size = (pictures - real).abs().flatten(1).mean(1).clamp_min(1e-8)
        direction = (fake - real) / size.view(-1, *[1] * (pictures.dim() - 1))
        target = pictures - direction
    # The published trick: the gradient of this expression is `direction`, divided by the number of values.
    return 0.5 * (pictures - target).square().mean()


@contextmanager
def _full_precision(*tensors: Tensor) -> Iterator[Any]:
    """Turn autocast off and gradients on, and make the tensors float32. See [Note: penalties under autocast]."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        tensors = tuple(tensor.float() for tensor in tensors)
    with torch.autocast(kind, enabled=False), torch.enable_grad():
        yield tensors if len(tensors) > 1 else tensors[0]

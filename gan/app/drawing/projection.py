"""The styles and the noise in which a StyleGAN2 draws a given picture, and the generator tuned to that picture."""

from collections.abc import Callable
from copy import deepcopy
from math import cos, pi

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from gan.app.drawing.drawer import Drawer
from gan.app.drawing.latents import Latent, noise_maps, noise_of
from gan.noise import seed_for
from nets.stylegan import StyleGenerator

SAMPLES = 10_000  # latents whose w tell the mean and how far w are from it
RATE, RAMP_UP, RAMP_DOWN = 0.1, 0.05, 0.25  # the learning rate, and in which shares of the steps it rises and falls
WANDER, CALM = 0.05, 0.75  # the noise in w at first, of w's own deviation, and the share of the steps that have it
REGULAR = 1e5  # weight of the noise maps' correlations
COARSEST = 8  # pixels of the smallest noise map that is looked at
TUNING_RATE = 3e-4

Watch = Callable[[int, Tensor, float], None]  # is told each step, its picture and its distance
Distance = Callable[[Tensor], Tensor]


def some_w(drawer: Drawer, label: int | None = None) -> Tensor:
    """The w of many latents [SAMPLES, W]: of the first seeds."""
    seeds = range(SAMPLES)
    with torch.no_grad():
        return drawer.net.mapping(drawer.z(seeds), drawer.labels(seeds, label))


def project(
    drawer: Drawer, distance: Distance, *, steps: int, source: str, seed: int, label: int | None, watch: Watch
) -> Latent:
    """Find the latent whose picture has the least distance, as the published projector does.

    That is projector.py of stylegan2-ada-pytorch; Karras et al. 2020, appendix D. All layers get the same w, which
    starts from the mean. It wanders less and less around where it is, so that it finds its way out of small hollows.
    """
    net = _copy(drawer.net)
    dice = torch.Generator().manual_seed(seed_for("project", seed))
    known = some_w(drawer, label)
    mean = known.mean(0)
    deviation = (known - mean).square().sum(1).mean().sqrt()
    w, maps = mean.clone().requires_grad_(), list(noise_maps(net).values())
    for each in maps:
        each.copy_(torch.randn(each.shape, generator=dice)).requires_grad_()
    optimizer = Adam([w, *maps], betas=(0.9, 0.999))
    for step in range(steps):
        done = step / steps
        optimizer.param_groups[0]["lr"] = RATE * _ramp(done)
        wandering = WANDER * max(0.0, 1 - done / CALM) ** 2 * deviation
        near = w + wandering * torch.randn(w.shape, generator=dice).to(w)
        picture = net.drawn(near.expand(1, drawer.layers, -1), "const")
        found = distance(picture)
        optimizer.zero_grad()
        (found + REGULAR * sum(map(correlation, maps))).backward()
        optimizer.step()
        with torch.no_grad():
            for each in maps:
                each -= each.mean()
                each *= each.square().mean().rsqrt()
        watch(step, picture.detach(), found.item())
    styles = w.detach().expand(drawer.layers, -1).cpu().clone()
    return Latent(styles, {name: each.detach().cpu() for name, each in noise_maps(net).items()}, source)


def tuned(
    net: StyleGenerator, latent: Latent, target: Tensor, distance: Distance, steps: int, watch: Watch
) -> StyleGenerator:
    """A copy of the generator that draws the target at this latent: pivotal tuning, Roich et al. 2021, section 3.2.

    The copy has the latent's noise as its own.
    """
    net = _copy(net)
    net.load_state_dict(latent.maps, strict=False)
    net.synthesis.requires_grad_(True)
    optimizer = Adam(net.synthesis.parameters(), lr=TUNING_RATE)
    w = latent.w.to(target).unsqueeze(0)
    for step in range(steps):
        picture = net.drawn(w, "const")
        found = distance(picture)
        optimizer.zero_grad()
        (found + (picture - target).square().mean()).backward()
        optimizer.step()
        watch(step, picture.detach(), found.item())
    return net.requires_grad_(False)


def drawn(drawer: Drawer, latent: Latent) -> Tensor:
    """The picture of a latent [channels, height, width]."""
    with torch.no_grad(), noise_of(drawer.net, latent):
        return drawer.from_w(latent.w.to(drawer.like).unsqueeze(0))[0]


def correlation(noise: Tensor) -> Tensor:
    """How much each pixel of a noise map tells of its neighbours, at all scales: Karras et al. 2020, appendix D, eq. 6.

    Noise that is not white would carry the picture, which w is to carry.
    """
    total, noise = noise.new_zeros(()), noise[None, None]
    while True:
        total = total + sum((noise * noise.roll(1, dim)).mean().square() for dim in (2, 3))
        if noise.shape[2] <= COARSEST:
            return total
        noise = F.avg_pool2d(noise, 2)


def _ramp(done: float) -> float:
    """The share of the learning rate: it rises at once and falls as a cosine."""
    return min(1.0, done / RAMP_UP) * (0.5 - 0.5 * cos(pi * min(1.0, (1 - done) / RAMP_DOWN)))


def _copy(net: StyleGenerator) -> StyleGenerator:
    return deepcopy(net).eval().requires_grad_(False)

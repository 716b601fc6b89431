"""Where a picture lies in a StyleGAN2: its styles and its noise, how they are found, saved and moved.

Pictures are compared in the features of a network: by LPIPS, or by a run's own discriminator.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from gan.app.sampling.drawer import Drawer
from gan.app.sampling.sheet import writing
from gan.files.disk import read_plain, whole_file
from gan.files.errors import UserError, reading
from nets.stylegan import DiscriminatorBlock, StyleDiscriminator, StyleGenerator
from nets.stylegan_layers import ModulatedConv
from nets.vgg import SMALLEST, load_lpips

SAMPLES = 10_000  # latents whose w tell the mean of w, and how far w are from it
AGAIN = "make one with python -m gan.sample RUN project --picture me.jpg"
RATE, RAMP_UP, RAMP_DOWN = 0.1, 0.05, 0.25  # the learning rate, and in which shares of the steps it rises and falls
WANDER, CALM = 0.05, 0.75  # the noise in w at first, of w's own deviation, and the share of the steps that have it
REGULAR, COARSEST = 1e5, 8  # the weight of the noise maps' correlations, and the pixels of the smallest map
TUNING_RATE = 3e-4
LARGEST = 256  # pixels of a side that LPIPS looks at, as in the published projector

Distance = Callable[[Tensor], Tensor]
Watch = Callable[[Tensor, float], None]  # is told the picture of each step, and its distance
Features = Callable[[Tensor], list[Tensor]]  # of pictures, what some layers make of them
Way = Literal["weights", "pca"]


@dataclass(frozen=True)
class Latent:
    """The style of each layer [layers, W], and the noise map of each convolution by its name.

    Without maps, the noise is the network's own.
    """

    w: Tensor
    maps: dict[str, Tensor]

    def save(self, path: Path) -> None:
        """Write a file of tensors and numbers only, so that it is read without running code."""
        with writing(path, RuntimeError), whole_file(path) as part:
            torch.save(vars(self), part)

    @classmethod
    def load(cls, path: Path, net: StyleGenerator) -> "Latent":
        """Read a file for this network, without running any code in it."""
        saved = read_plain(path, "a latent file", AGAIN)
        with reading(f"'{path}'", f"it holds no latent; {AGAIN}"):
            latent = cls(saved["w"], saved["maps"])
            (layers, length), shapes = latent.w.shape, {name: each.shape for name, each in latent.maps.items()}
        rows, wide = net.synthesis.rows, len(net.mapping.w_avg)
        if (layers, length) != (rows, wide) or shapes != {name: each.shape for name, each in noise_maps(net).items()}:
            raise UserError(
                f"'{path}' has styles of length {length} for {layers} layers, and this network has {rows} layers and "
                f"styles of length {wide}, or noise of other sizes; project the picture with this network"
            )
        return latent


def noise_maps(net: StyleGenerator) -> dict[str, Tensor]:
    """The noise that each convolution of a generator adds, by its name."""
    return {name: each for name, each in net.named_buffers() if name.endswith("noise_const")}


def some_w(drawer: Drawer, label: int | str | None = None) -> Tensor:
    """The w of the first seeds [SAMPLES, W]."""
    seeds = range(SAMPLES)
    with torch.no_grad():
        return drawer.net.mapping(drawer.z(seeds), drawer.labels(seeds, label))


def directions(drawer: Drawer, way: Way) -> Tensor:
    """Steps of w [N, W], the most important direction first: each is as long as w's standard deviation along it.

    By "weights" they are those to which the convolutions' styles answer most, for all layers together: Shen and Zhou
    2021 (SeFa). By "pca" they are those in which the w of many pictures differ most: Härkönen et al. 2020 (GANSpace).
    """
    net, known = drawer.styled(), some_w(drawer)
    affine: list[Tensor] = [layer.affine.weight for layer in net.modules() if isinstance(layer, ModulatedConv)]
    rows = torch.cat(affine) if way == "weights" else known - known.mean(0)
    vectors = torch.linalg.svd(rows.detach().cpu().double(), full_matrices=False).Vh
    # Of two opposite vectors, the one whose largest element is positive.
    vectors = (vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign() * vectors).float()
    return vectors * (known.cpu() @ vectors.T).std(0)[:, None]


# ---- a picture is found ----


def project(drawer: Drawer, distance: Distance, steps: int, watch: Watch, label: int | str | None = None) -> Latent:
    """Find the latent whose picture has the least distance, as the published projector does.

    That is projector.py of stylegan2-ada-pytorch; Karras et al. 2020, appendix D. All layers get the same w, which
    starts from the mean. It wanders less and less around where it is, so that it finds its way out of small hollows.
    """
    net, dice, known = _copy(drawer.net), torch.Generator().manual_seed(0), some_w(drawer, label)
    w, maps = known.mean(0).requires_grad_(), list(noise_maps(net).values())
    deviation = (known - w.detach()).square().sum(1).mean().sqrt()
    for each in maps:
        each.copy_(torch.randn(each.shape, generator=dice)).requires_grad_()
    optimizer = Adam([w, *maps], betas=(0.9, 0.999))
    for step in range(steps):
        done = step / steps
        ramp = 0.5 - 0.5 * cos(pi * min(1.0, (1 - done) / RAMP_DOWN))
        optimizer.param_groups[0]["lr"] = RATE * ramp * min(1.0, done / RAMP_UP)
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
        watch(picture.detach(), found.item())
    styles = w.detach().cpu().repeat(drawer.layers, 1)
    return Latent(styles, {name: each.detach().cpu() for name, each in noise_maps(net).items()})


def tuned(
    net: StyleGenerator, latent: Latent, target: Tensor, distance: Distance, steps: int, watch: Watch
) -> StyleGenerator:
    """A copy of the generator that draws the target at this latent, and has its noise.

    This is pivotal tuning, Roich et al. 2021, section 3.2.
    """
    net = _copy(net, latent)
    net.synthesis.requires_grad_(True)
    optimizer = Adam(net.synthesis.parameters(), lr=TUNING_RATE)
    for _ in range(steps):
        picture = net.drawn(latent.w.to(target).unsqueeze(0), "const")
        found = distance(picture)
        optimizer.zero_grad()
        (found + (picture - target).square().mean()).backward()
        optimizer.step()
        watch(picture.detach(), found.item())
    return net.requires_grad_(False)


def drawn(net: StyleGenerator, latent: Latent) -> Tensor:
    """The picture of a latent [1, channels, height, width]."""
    with torch.no_grad():
        return _copy(net, latent).drawn(latent.w.to(net.mapping.w_avg).unsqueeze(0), "const")


def between_latents(net: StyleGenerator, ends: tuple[Latent, Latent], shares: Sequence[float]) -> Iterator[Tensor]:
    """Pictures on the way from one latent to another: a share of 0 is the first one, 1 the other."""
    one, other = ends
    own = {name: each.cpu() for name, each in noise_maps(net).items()} if one.maps or other.maps else {}
    for share in shares:
        maps = {name: _noise(one.maps.get(name, each), other.maps.get(name, each), share) for name, each in own.items()}
        yield drawn(net, Latent(one.w.lerp(other.w, share), maps))[0]


def _noise(one: Tensor, other: Tensor, share: float) -> Tensor:
    """Noise between two maps, as strong as they are: the mean of two would be weaker."""
    mean = one.lerp(other, share)
    return mean * one.std().lerp(other.std(), share) / mean.std().clamp_min(1e-12)


def correlation(noise: Tensor) -> Tensor:
    """How much each pixel of a noise map tells of its neighbours, at all scales: Karras et al. 2020, appendix D.

    Noise that is not white would carry the picture, which w is to carry.
    """
    total, noise = noise.new_zeros(()), noise[None, None]
    while True:
        total = total + sum((noise * noise.roll(1, dim)).mean().square() for dim in (2, 3))
        if noise.shape[2] <= COARSEST:
            return total
        noise = F.avg_pool2d(noise, 2)


def _copy(net: StyleGenerator, latent: Latent | None = None) -> StyleGenerator:
    net = deepcopy(net).eval().requires_grad_(False)
    net.load_state_dict({} if latent is None else latent.maps, strict=False)
    return net


def distance_from(target: Tensor, features: Features) -> Callable[[Tensor], Tensor]:
    """The distance of pictures from a target: that of LPIPS, in any features whose vectors have unit length."""
    with torch.no_grad():
        wanted = features(target)

    # Zhang et al. 2018, equation 1
    def distance(pictures: Tensor) -> Tensor:
        pairs = zip(features(pictures), wanted, strict=True)
        return torch.stack([(one - other).square().sum(1).mean() for one, other in pairs]).sum()

    return distance


def by_discriminator(net: StyleDiscriminator) -> Features:

    def features(pictures: Tensor) -> list[Tensor]:
        found = [pictures]
        for block in net.children():
            if isinstance(block, DiscriminatorBlock):
                found.append(block(found[-1]))
        return [each / (each.square().sum(1, keepdim=True) + 1e-8).sqrt() for each in found[1:]]

    return features


def by_lpips(file: Path, device: torch.device) -> Features:
    """LPIPS with the weights of torchvision's VGG-16 in that file."""
    net = load_lpips(str(file)).to(device)

    def features(pictures: Tensor) -> list[Tensor]:
        sides = pictures.shape[2:]
        if min(sides) < SMALLEST:
            raise UserError(f"LPIPS cannot see pictures below {SMALLEST} pixels; leave --perceptual out")
        if max(sides) > LARGEST:
            pictures = F.interpolate(pictures, [round(side * LARGEST / max(sides)) for side in sides], mode="area")
        return net.embed(pictures)

    return features

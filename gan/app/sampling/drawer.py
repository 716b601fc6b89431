"""A network that draws a picture from each seed, whether a run of ours has trained it or a published file has it."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from gan.app.run.reopen import SavedRun, device_of
from gan.app.sampling.grids import picture
from gan.files.errors import UserError
from gan.games.from_noise import noise_of
from nets.biggan import BigGenerator, Norm
from nets.published.from_noise import ours
from nets.published.pickles import read
from nets.stylegan import StyleGenerator

PIXELS, MOST = 2**20, 64  # at once: pixels of all pictures together, and pictures
LONGEST = 10_000  # numbers in a list
FARTHEST = 2.0  # truncation: how far from the mean, where 1 is as trained
Numbers = str | int | Iterable[int | str]  # as typed, such as 0-63 or 1,5,8-10; in Python also range(64)


class How(TypedDict, total=False):
    """How seeds are drawn. `label` is the number or the name of a class; without it the classes take turns.

    With a `truncation` below 1 pictures are nearer to the average, and differ less: in all layers, or in the first
    `cutoff` ones.
    """

    label: int | str | None
    truncation: float
    cutoff: int | None


class Drawer:
    """A network that draws from seeds, in evaluation mode: on any device, some pictures at once.

    A seed gives the same picture whatever others are drawn with it, to rounding. In a run it is the picture with that
    number in the run's grids and scores; for a published file, the one that the published code draws.

    A network with styles, which is StyleGAN2's, draws a picture from `layers` vectors w, in two halves: `w`
    and `from_w`. Other networks have no `layers`. Gradients flow through all methods but `pictures` and `between`.
    """

    def __init__(
        self, net: Any, title: str, class_names: Sequence[str] = (), latent_of: Callable[[int, int], Tensor] = noise_of
    ) -> None:
        """`latent_of` gives the noise of a seed, of so many numbers."""
        self.net, self.title, self.class_names, self._latent_of = net, title, tuple(class_names), latent_of
        self.latent: int = net.latent
        self.classes: int = getattr(net, "classes", 0)
        self.layers, self.at_once = 0, 1
        if isinstance(net, StyleGenerator):
            self.layers, self.channels, self.size = net.synthesis.rows, net.channels, net.size
        else:
            with torch.no_grad():
                _, self.channels, *size = self.from_z(self.z([0]), self.labels([0])).shape
            self.size = size[0], size[1]
        self.at_once = max(1, min(MOST, PIXELS // (self.size[0] * self.size[1])))

    @classmethod
    def of_run(cls, opened: SavedRun) -> "Drawer":
        """The network of an opened run, with averaged weights where the run has some."""
        net = opened.run.game.drawer
        return cls(net, str(opened.folder.path), opened.class_names)

    @classmethod
    def of_networks(cls, path: Path, device: str = "auto") -> "Drawer":
        """The averaged generator of a published file of StyleGAN2 or R3GAN (.pkl)."""
        networks = read(path)
        found = networks.get("G_ema") or networks.get("G")
        if found is None:
            raise UserError(f"'{path}' holds no generator, but {', '.join(networks)}")
        net = ours(found).float().requires_grad_(False).to(device_of(device))
        return cls(net, str(path), latent_of=as_published)

    @property
    def like(self) -> Tensor:
        """A weight, which has the device and the number format of the network."""
        return next(self.net.parameters())

    def z(self, seeds: Sequence[int]) -> Tensor:
        """The latents of seeds [B, latent]."""
        return torch.stack([self._latent_of(seed, self.latent) for seed in seeds]).to(self.like)

    def class_of(self, name: int | str) -> int:
        if not self.classes:
            raise UserError("the network has no classes; leave --class out")
        if name in self.class_names:
            return self.class_names.index(str(name))
        if str(name).isdecimal() and int(name) < self.classes:
            return int(name)
        names = f", or a name such as {', '.join(self.class_names[:5])}" if self.class_names else ""
        raise UserError(f"there is no class '{name}'; type --class and a number from 0 to {self.classes - 1}{names}")

    def labels(self, seeds: Sequence[int], label: int | str | None = None) -> Tensor | None:
        """The labels as vectors [B, classes]: of one class, or with None the classes in turn, by the seeds."""
        one = None if label is None else self.class_of(label)
        if not self.classes:
            return None
        numbers = [seed % self.classes if one is None else one for seed in seeds]
        return F.one_hot(torch.tensor(numbers), self.classes).to(self.like)

    def w(self, z: Tensor, labels: Tensor | None = None, psi: float = 1.0, cutoff: int | None = None) -> Tensor:
        """The vectors w of latents [B, layers, W]. With `psi` below 1 the first `cutoff` are nearer the mean.

        With a negative one they lie on its other side.
        """
        if isinstance(psi, str) or isinstance(cutoff, str):
            raise UserError("--truncation and --cutoff take numbers; type e.g. --truncation 0.7")
        if not abs(psi) <= FARTHEST:
            raise UserError(f"--truncation {psi:g} is far from all that was trained; type e.g. --truncation 0.7")
        if psi == 1 and cutoff is not None:
            raise UserError("a cutoff is for truncation; type --truncation too, such as --truncation 0.7")
        return self.styled().styles(z, labels, psi=psi, cutoff=cutoff)

    def from_w(self, w: Tensor) -> Tensor:
        """Pictures of vectors w [B, layers, W]: [B, channels, height, width] in about -1 to 1."""
        net = self.styled()
        return torch.cat([net.drawn(part, "const") for part in w.split(self.at_once)])

    def from_z(self, z: Tensor, labels: Tensor | None = None) -> Tensor:
        """Pictures of latents and labels, without truncation."""
        known = (z,) if labels is None else (z, labels)
        parts = zip(*(rows.split(self.at_once) for rows in known), strict=True)
        return torch.cat([self.net(*part) for part in parts])

    def w_of(
        self, seeds: Sequence[int], label: int | str | None = None, truncation: float = 1.0, cutoff: int | None = None
    ) -> Tensor:
        """The vectors w of seeds [B, layers, W]."""
        return self.w(self.z(seeds), self.labels(seeds, label), truncation, cutoff)

    @torch.no_grad()
    def pictures(self, seeds: Sequence[int], **how: Unpack[How]) -> Tensor:
        """The pictures of seeds [B, channels, height, width], in about -1 to 1."""
        if self._by_w(**how):
            return self.from_w(self.w_of(seeds, **how))
        return self.from_z(self.z(seeds), self.labels(seeds, how.get("label")))

    def images(self, seeds: Sequence[int], **how: Unpack[How]) -> Iterator[Image.Image]:
        """The pictures of any number of seeds, some drawn at once."""
        for first in range(0, len(seeds), self.at_once):
            for sample in self.pictures(seeds[first : first + self.at_once], **how):
                yield picture(sample, transparent=True)

    @torch.no_grad()
    def between(self, ends: tuple[int, int], shares: Sequence[float], **how: Unpack[How]) -> Tensor:
        """Pictures on the way from one seed to another: a share of 0 is the first one, 1 the other."""
        share = torch.tensor(shares).to(self.like)[:, None]
        if self._by_w(**how):
            w = self.w_of(ends, **how)
            return self.from_w(w[0].lerp(w[1], share[:, None]))
        z, labels = self.z(ends), self.labels(ends, how.get("label"))
        # Noise is as long everywhere on this arc: a straight line would come nearer to zero than noise does.
        arc = (share * torch.pi / 2).cos() * z[0] + (share * torch.pi / 2).sin() * z[1]
        return self.from_z(arc, None if labels is None else labels[0].lerp(labels[1], share))

    @torch.no_grad()
    def stand(self, batches: int) -> None:
        """Replace a BigGAN's running statistics by means over so many batches of random classes, as published."""
        if not isinstance(self.net, BigGenerator):
            raise UserError(f"{self.title} has no standing statistics, which BigGAN's networks have; leave it out")
        norms = [each for each in self.net.modules() if isinstance(each, Norm)]
        generator = torch.Generator().manual_seed(0)
        for batch in range(batches):
            for norm in norms:
                norm.train().momentum = 1 / (batch + 1)
            z = torch.randn(MOST, self.latent, generator=generator)
            numbers = torch.randint(max(1, self.classes), (MOST,), generator=generator)
            labels = F.one_hot(numbers, self.classes).to(self.like) if self.classes else None
            self.net(z.to(self.like), labels)
        for norm in norms:
            norm.eval().momentum = Norm.momentum

    def _by_w(self, label: int | str | None = None, truncation: float = 1.0, cutoff: int | None = None) -> bool:
        return bool(self.layers) or (truncation, cutoff) != (1, None)

    def styled(self) -> StyleGenerator:
        if not isinstance(self.net, StyleGenerator):
            what = f"{type(self.net).__name__} has no styles to truncate or to mix"
            raise UserError(f"{what}; take a run of StyleGAN2 or a file of it, or leave this out")
        return self.net


def as_published(seed: int, length: int) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).randn(length)).float()


def parse_numbers(given: Numbers, option: str = "--seeds") -> list[int]:
    """The numbers of a list as it is typed: 0-63, or 1,5,8-10."""
    parts = [given] if isinstance(given, str | int) else given
    found: list[int] = []
    for part in (part for each in parts for part in str(each).split(",")):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first or last - first + len(found) >= LONGEST:
            raise UserError(
                f"{option} '{part}' is no list of at most {LONGEST:,} numbers; type e.g. {option} 0-63 or 1,5,8-10"
            )
        found += range(first, last + 1)
    return found


def parse_numbers_once(given: Numbers, option: str = "--seeds") -> list[int]:
    return [*dict.fromkeys(parse_numbers(given, option))]

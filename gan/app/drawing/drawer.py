"""A network that draws a picture from each seed, whether a run of ours has trained it or a published file has it."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gan import noise
from gan.app.painting.reopen import SavedRun, device_of
from gan.files.errors import UserError
from gan.games.from_noise import FromNoise, noise_of
from nets.published.from_noise import ours
from nets.published.pickles import read
from nets.stylegan import StyleGenerator

PIXELS, MOST = 2**20, 64  # at once: pixels of all pictures together, and pictures
Grain = Literal["const", "none"] | int


class Drawer:
    """A network that draws from seeds, in evaluation mode: on any device, some pictures at once.

    A seed gives the same picture whatever others are drawn with it, to rounding. In a run it is the picture with that
    number in the run's grids and scores; for a published file, the one that the published code draws.

    A network with styles, which is StyleGAN2's, draws a picture from `layers` vectors w, in two halves: `w` and
    `from_w`. Other networks have no `layers`. Gradients flow through all methods but `pictures`.
    """

    def __init__(
        self, net: Any, title: str, latent_of: Callable[[int], Tensor], class_names: Sequence[str] = ()
    ) -> None:
        self.net, self.title, self.class_names, self._latent_of = net, title, tuple(class_names), latent_of
        self.latent: int = net.latent
        self.classes: int = getattr(net, "classes", 0)
        self.layers: int = net.synthesis.rows if isinstance(net, StyleGenerator) else 0

    @classmethod
    def of_run(cls, opened: SavedRun) -> "Drawer":
        """The network of an opened run, with averaged weights where the run has some."""
        game = opened.run.game
        if not isinstance(game, FromNoise):
            raise UserError(
                f"{opened.folder.path} is a run of {opened.name}, whose game {type(game).__name__} does not draw from "
                f"noise; type python -m gan.sample {opened.folder.path} show"
            )
        names = getattr(getattr(opened.run.data, "train", None), "class_names", ())
        net = game.drawer
        return cls(net, str(opened.folder.path), lambda seed: noise_of(seed, net.latent), names)

    @classmethod
    def of_file(cls, path: Path, device: str = "auto") -> "Drawer":
        """The averaged generator of a published file of StyleGAN2 or R3GAN; no code in the file is run."""
        networks = read(path)
        found = networks.get("G_ema") or networks.get("G")
        if found is None:
            raise UserError(f"'{path}' holds no generator, but {', '.join(networks)}")
        net = ours(found).float().requires_grad_(False).to(device_of(device))
        latent: Any = net.latent
        return cls(net, str(path), lambda seed: torch.from_numpy(np.random.RandomState(seed).randn(latent)))

    @property
    def like(self) -> Tensor:
        """A weight, which has the device and the number format of the network."""
        return next(self.net.parameters())

    @property
    def device(self) -> torch.device:
        return self.like.device

    @property
    def channels(self) -> int:
        return self._shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of the pictures."""
        return self._shape[1], self._shape[2]

    @cached_property
    def _shape(self) -> torch.Size:
        with torch.no_grad():
            return self._drawn(self.z([0]), self.labels([0]))[0].shape

    @property
    def mean_w(self) -> Tensor:
        """The mean of w over all latents [W], to which truncation pulls."""
        return self._styled().mapping.w_avg

    def z(self, seeds: Sequence[int]) -> Tensor:
        """The latents of seeds [B, latent]."""
        return torch.stack([self._latent_of(seed) for seed in seeds]).to(self.like)

    def labels(self, seeds: Sequence[int], label: int | None = None) -> Tensor | None:
        """The labels as vectors [B, classes]: of one class, or with None the classes in turn, by the seeds."""
        if not self.classes:
            if label is not None:
                raise UserError("the network has no classes; leave --class out")
            return None
        if not 0 <= (label or 0) < self.classes:
            raise UserError(f"--class {label} is not there: the network has classes 0 to {self.classes - 1}")
        numbers = [seed % self.classes if label is None else label for seed in seeds]
        return F.one_hot(torch.tensor(numbers), self.classes).to(self.like)

    def w(self, z: Tensor, labels: Tensor | None = None, psi: float = 1.0, cutoff: int | None = None) -> Tensor:
        """The vectors w of latents [B, layers, W]. With `psi` below 1 the first `cutoff` are nearer the mean."""
        return self._styled().styles(z, labels, psi=psi, cutoff=cutoff)

    def from_w(self, w: Tensor, grain: Grain = "const") -> Tensor:
        """Pictures of vectors w [B, layers, W]: [B, channels, height, width] in about -1 to 1.

        `grain` is the noise in each layer: "const" for that of the network, "none", or a seed, whose noise is the same
        in every picture.
        """
        net = self._styled()
        if not isinstance(grain, int):
            return torch.cat([net.drawn(part, grain) for part in self._parts(w)])
        pictures = []
        for row in w.split(1):
            with noise.at(noise.Place(("sample", grain), 0, 1, 1)):
                pictures.append(net.drawn(row, "random"))
        return torch.cat(pictures)

    @torch.no_grad()
    def pictures(
        self, seeds: Sequence[int], label: int | None = None, psi: float = 1.0, cutoff: int | None = None
    ) -> Tensor:
        """The pictures of seeds [B, channels, height, width], in about -1 to 1."""
        z, labels = self.z(seeds), self.labels(seeds, label)
        if self.layers:
            return self.from_w(self.w(z, labels, psi, cutoff))
        if psi != 1 or cutoff is not None:
            raise UserError(f"{type(self.net).__name__} has no w to truncate; leave --truncation and --cutoff out")
        known = [None] * len(z) if labels is None else self._parts(labels)
        return torch.cat([self._drawn(part, label) for part, label in zip(self._parts(z), known, strict=False)])

    def _drawn(self, z: Tensor, labels: Tensor | None) -> Tensor:
        return self.net(z) if labels is None else self.net(z, labels)

    def _styled(self) -> StyleGenerator:
        if not isinstance(self.net, StyleGenerator):
            raise UserError(f"{type(self.net).__name__} has no w; take a run of StyleGAN2, or a file of it")
        return self.net

    def _parts(self, rows: Tensor) -> Iterator[Tensor]:
        """The rows in parts of bounded size."""
        return iter(rows.split(self.at_once))

    @property
    def at_once(self) -> int:
        """How many pictures are drawn at once."""
        height, width = self.net.size if self.layers else self.size
        return max(1, min(MOST, PIXELS // (height * width)))

"""SPADE, Park et al. 2019: a picture from a mask only. Its optional style image (VAE) is not here."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from gan import GanModule, Phase, Player
from gan.games.pix2pix import linear_decay
from gan.losses import feature_matching, hinge_discriminator, hinge_generator, perceptual
from nets.blocks import edges_of, onehot
from nets.discriminator import MultiScaleDiscriminator
from nets.sean.generator import SeanGenerator
from nets.vgg import Vgg19

Scales = list[list[Tensor]]


class Spade(GanModule):
    """Learns to paint label maps, with the losses, rates and turns that SEAN took over from it.

    A batch is {"image", "label"}. A generator with edges also sees where one thing ends and the next one begins: by
    "edges" where the data have instances, else by the label map. `vgg` is the network of the perceptual loss. Without
    it there can be a plain L1 loss on the pixels, with the weight `pixels`.

    The published training makes a new fake for the discriminator's turn, because the generator has just learned. With
    `fake_once` both turns use the same fake.
    """

    painters: tuple[str, ...] = ("generator",)

    def __init__(
        self,
        generator: SeanGenerator,
        discriminator: MultiScaleDiscriminator,
        vgg: Vgg19 | None = None,
        *,
        labels: int = 19,
        steps: int = 100_000,
        generator_rate: float = 1e-4,
        discriminator_rate: float = 4e-4,
        matching: float = 10.0,
        perceptual: float = 10.0,
        pixels: float = 0.0,
        fake_once: bool = False,
    ) -> None:
        super().__init__()
        self.generator, self.discriminator, self.vgg = generator, discriminator, vgg
        self.labels, self.steps = labels, steps
        self.edges = generator.fc.in_channels == labels + 1
        self.generator_rate, self.discriminator_rate = generator_rate, discriminator_rate
        self.matching, self.perceptual, self.pixels = matching, perceptual, pixels
        self.fake_once = fake_once

    def configure_players(self) -> Iterator[Player]:
        """The discriminator learns at four times the generator's rate (TTUR). All rates fall over the second half.

        The published rates are constant for 50 epochs and then fall for 50 epochs, once an epoch; here they fall a
        little with every update. The VGG is not a player: it is not trained, saved or sharded.
        """
        adam, decay = partial(Adam, betas=(0.0, 0.9), fused=True), linear_decay(self.steps)
        for name in self.painters:
            yield Player(name, getattr(self, name), partial(adam, lr=self.generator_rate), decay)
        yield Player("discriminator", self.discriminator, partial(adam, lr=self.discriminator_rate), decay)

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("generator", self.fool, self.painters)
        yield Phase("discriminator", self.judge, "discriminator")

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Please the discriminator, with features like those of the real picture, in the discriminator and in VGG."""
        image, mask = batch["image"], self.shared("mask", self.mask, batch["label"], batch.get("edges"))
        fake = self.shared("fake", self.repaint, image, mask) if self.fake_once else self.repaint(image, mask)
        on_fake, on_real = self.compare(mask, fake, image)
        losses = {
            "hinge": torch.stack([hinge_generator(scale[-1]) for scale in on_fake]).mean(),
            "matching": self.matching * feature_matching(on_real, on_fake),
        }
        if self.vgg is not None:
            with torch.no_grad():
                seen = self.vgg(image)
            losses["perceptual"] = self.perceptual * perceptual(seen, self.vgg(fake))
        if self.pixels:
            losses["pixels"] = self.pixels * F.l1_loss(fake, image)
        return losses

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell the fake from the picture, each together with its mask."""
        image, mask = batch["image"], self.shared("mask", self.mask, batch["label"], batch.get("edges"))
        if self.fake_once:
            fake = self.shared("fake", self.repaint, image, mask).detach()
        else:
            with torch.no_grad():
                fake = self.repaint(image, mask)
        pairs = zip(*self.compare(mask, fake, image), strict=True)
        return {"hinge": torch.stack([hinge_discriminator(real[-1], fake[-1]) for fake, real in pairs]).mean()}

    def repaint(self, image: Tensor, mask: Tensor) -> Tensor:
        """Paint a picture again: here from its mask only."""
        return self.generator(mask, None)

    def compare(self, mask: Tensor, fake: Tensor, real: Tensor) -> tuple[Scales, Scales]:
        """The discriminator's features of fake and real, from one pass over both."""
        both = torch.cat([torch.cat([mask, fake], 1), torch.cat([mask, real], 1)])
        halves = [[features.chunk(2) for features in scale] for scale in self.discriminator(both)]
        return [[fake for fake, _ in scale] for scale in halves], [[real for _, real in scale] for scale in halves]

    def mask(self, label: Tensor, edges: Tensor | None = None) -> Tensor:
        """A label map as one-hot planes, followed by a plane of edges where the generator takes edges."""
        like = self.generator.conv_img.weight
        planes = onehot(label, self.labels, like)
        if not self.edges:
            return planes
        edges = edges_of(label) if edges is None else edges
        return torch.cat([planes, edges.unsqueeze(1).to(planes)], 1)

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        image = batch["image"]
        painted = self.repaint(image, self.mask(batch["label"], batch.get("edges")))
        self.log("val/paint_error", F.l1_loss(painted, image) / 2, sync_dist=True, batch_size=len(image))

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        image, label = batch["image"], batch["label"]
        return {"shape": label, "output": self.repaint(image, self.mask(label, batch.get("edges"))), "truth": image}

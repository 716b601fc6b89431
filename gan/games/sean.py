"""SEAN, Zhu et al. 2020: a picture from a mask and one style code a region."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from gan import GanModule, Phase, Player
from gan.games.decay import linear_decay
from gan.losses import feature_matching, hinge_discriminator, hinge_generator
from nets.blocks import onehot
from nets.discriminator import MultiScaleDiscriminator
from nets.sean import SeanGenerator
from nets.style import StyleEncoder

Scales = list[list[Tensor]]


class Sean(GanModule):
    """Learns to repaint a picture from its own mask and styles, and so to paint any mask in any styles.

    A batch is {"image", "label"}; for validation also {"style_image", "style_label", "truth"}. Its perceptual
    loss needs the weights of a VGG; a plain L1 on the pixels stands in its place, `pixels` times.
    """

    def __init__(
        self,
        encoder: StyleEncoder,
        generator: SeanGenerator,
        discriminator: MultiScaleDiscriminator,
        *,
        labels: int = 19,
        steps: int = 100_000,
        generator_rate: float = 1e-4,
        discriminator_rate: float = 4e-4,
        pixels: float = 10.0,
        matching: float = 10.0,
    ) -> None:
        super().__init__()
        self.encoder, self.generator, self.discriminator = encoder, generator, discriminator
        self.labels, self.steps = labels, steps
        self.generator_rate, self.discriminator_rate = generator_rate, discriminator_rate
        self.pixels, self.matching = pixels, matching

    def configure_players(self) -> Iterator[Player]:
        """Encoder and generator learn at one rate, the discriminator at four times that (TTUR)."""
        adam = partial(Adam, betas=(0.0, 0.9))
        decay = linear_decay(self.steps)
        yield Player("encoder", self.encoder, partial(adam, lr=self.generator_rate), decay)
        yield Player("generator", self.generator, partial(adam, lr=self.generator_rate), decay)
        yield Player("discriminator", self.discriminator, partial(adam, lr=self.discriminator_rate), decay)

    def configure_phases(self) -> Iterator[Phase]:
        """The generator's turn comes first; the discriminator then judges a fake of the updated one."""
        yield Phase("generator", self.fool, ("encoder", "generator"))
        yield Phase("discriminator", self.judge, "discriminator")

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Please the discriminator, with features like the real ones, and hit the pixels."""
        image, mask = batch["image"], self.mask(batch["label"])
        fake = self.repaint(image, mask)
        on_fake, on_real = self.compare(mask, fake, image)
        return {
            "hinge": torch.stack([hinge_generator(scale[-1]) for scale in on_fake]).mean(),
            "matching": self.matching * feature_matching(on_real, on_fake),
            "pixels": self.pixels * F.l1_loss(fake, image),
        }

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell a fresh fake from the picture."""
        image, mask = batch["image"], self.mask(batch["label"])
        with torch.no_grad():
            fake = self.repaint(image, mask)
        pairs = zip(*self.compare(mask, fake, image), strict=True)
        return {"hinge": torch.stack([hinge_discriminator(real[-1], fake[-1]) for fake, real in pairs]).mean()}

    def repaint(self, image: Tensor, mask: Tensor) -> Tensor:
        """A picture anew from its mask and its own styles."""
        return self.generator(mask, self.encoder(image, mask))

    def compare(self, mask: Tensor, fake: Tensor, real: Tensor) -> tuple[Scales, Scales]:
        """The discriminator's features of fake and real, which pass it together."""
        both = torch.cat([torch.cat([mask, fake], 1), torch.cat([mask, real], 1)])
        halves = [[features.chunk(2) for features in scale] for scale in self.discriminator(both)]
        return [[fake for fake, _ in scale] for scale in halves], [[real for _, real in scale] for scale in halves]

    def mask(self, label: Tensor) -> Tensor:
        """A label map as one-hot planes."""
        return onehot(label, self.labels, like=self.generator.paint.weight)

    def transfer(self, batch: dict[str, Tensor]) -> Tensor:
        """The shapes of "label" in the styles of "style_image", or in the picture's own where there is none."""
        source, label = batch.get("style_image", batch["image"]), batch.get("style_label", batch["label"])
        return self.generator(self.mask(batch["label"]), self.encoder(source, self.mask(label)))

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """How far a transfer is from the drawn truth, in 0..1, where the style's picture has the region at all."""
        label, style_label = batch["label"], batch.get("style_label", batch["label"])
        error = (self.transfer(batch) - batch.get("truth", batch["image"])).abs().mean(1) / 2
        present = self.mask(style_label).flatten(2).amax(2)
        known = present.gather(1, label.flatten(1)).view_as(label)
        score = (error * known).sum() / known.sum().clamp_min(1)
        self.log("val/transfer_error", score, on_epoch=True, on_step=False, sync_dist=True, batch_size=len(label))

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A row a sample: the shape, where the styles come from, what came out and what should have."""
        style, truth = batch.get("style_image", batch["image"]), batch.get("truth", batch["image"])
        return {"shape": batch["label"], "style": style, "output": self.transfer(batch), "truth": truth}

"""pix2pix, Isola et al. 2017: from a label map to its picture, learned from pairs."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gan import GanModule, Phase, Player
from gan.losses import non_saturating_discriminator, non_saturating_generator
from nets.blocks import onehot
from nets.discriminator import PatchDiscriminator
from nets.unet import UNet


def linear_decay(steps: int) -> Callable[[Optimizer], LambdaLR]:
    """A `Player(schedule=...)`: the full rate for half of the steps, then in a straight line down to zero."""
    return partial(LambdaLR, lr_lambda=partial(half_then_down, steps))


def half_then_down(steps: int, update: int) -> float:
    """The share of the rate to use for update number `update`."""
    return min(1.0, max(0.0, 2 * (steps - update) / steps))


class Pix2pix(GanModule):
    """Learns to paint label maps. A batch is {"image", "label"}.

    Both turns use the same fake, as in the published training. The discriminator learns first, and then the generator
    pleases the discriminator that has just learned.
    """

    def __init__(
        self,
        generator: UNet,
        discriminator: PatchDiscriminator,
        *,
        labels: int = 19,
        steps: int = 100_000,
        rate: float = 2e-4,
        pixels: float = 100.0,
    ) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.labels, self.steps, self.rate, self.pixels = labels, steps, rate, pixels

    def configure_players(self) -> Iterator[Player]:
        """Both learn at one rate, which falls to zero over the second half."""
        adam, decay = partial(Adam, lr=self.rate, betas=(0.5, 0.999)), linear_decay(self.steps)
        yield Player("generator", self.generator, adam, decay)
        yield Player("discriminator", self.discriminator, adam, decay)

    def configure_phases(self) -> Iterator[Phase]:
        """The discriminator's turn comes first."""
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("generator", self.fool, "generator")

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell the fake from the picture, each with its labels. Halved, so that this network learns more slowly."""
        mask = self.mask(batch)
        fake = self.shared("fake", self.generator, mask).detach()
        return {"gan": 0.5 * non_saturating_discriminator(self.score(mask, batch["image"]), self.score(mask, fake))}

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Please the discriminator, and be close to the picture's pixels."""
        mask = self.mask(batch)
        fake = self.shared("fake", self.generator, mask)
        return {
            "gan": non_saturating_generator(self.score(mask, fake)),
            "pixels": self.pixels * F.l1_loss(fake, batch["image"]),
        }

    def score(self, mask: Tensor, image: Tensor) -> Tensor:
        return self.discriminator(torch.cat([mask, image], 1))[-1]

    def mask(self, batch: dict[str, Tensor]) -> Tensor:
        return onehot(batch["label"], self.labels, like=batch["image"])

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Log the difference between painted label maps and their pictures, in 0..1."""
        error = F.l1_loss(self.generator(self.mask(batch)), batch["image"]) / 2
        self.log("val/paint_error", error, sync_dist=True, batch_size=len(batch["image"]))

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A row a sample: the labels, what was painted and the true picture."""
        return {"shape": batch["label"], "output": self.generator(self.mask(batch)), "truth": batch["image"]}

"""pix2pix, Isola et al. 2017: from a picture or a label map to another picture, learned from pairs."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gan import GanModule, Phase, Player, losses
from gan.games.translation import Translation, of_generator
from nets.blocks import onehot
from nets.published.files import PublishedFile, latest_nets
from nets.resnet import ResnetGenerator, UNet

Loss = Literal["vanilla", "lsgan", "wgangp"]
# What the discriminator and the generator learn by. The discriminator learns at half the speed, as published.
LOSSES = {
    "vanilla": (
        lambda real, fake: 0.5 * losses.non_saturating_discriminator(real, fake),
        losses.non_saturating_generator,
    ),
    "lsgan": (losses.least_squares_discriminator, losses.least_squares_generator),
    "wgangp": (lambda real, fake: 0.5 * losses.wasserstein_critic(real, fake), losses.wasserstein_generator),
}
PENALTY = 10.0  # the published weight of wgangp's gradient penalty


def linear_decay(steps: int) -> Callable[[Optimizer], LambdaLR]:
    """A `Player(schedule=...)`: the full rate for half of the steps, then in a straight line down to zero."""
    return partial(LambdaLR, lr_lambda=partial(half_then_down, steps))


def half_then_down(steps: int, update: int) -> float:
    """The share of the rate to use for update number `update`."""
    return min(1.0, max(0.0, 2 * (steps - update) / steps))


def epoch_decay(full: int, falling: int, batches: int, ahead: int = 2) -> Callable[[Optimizer], LambdaLR]:
    """A `Player(schedule=...)`: the full rate, then lower in each epoch of so many batches.

    As published by pix2pix and CycleGAN, the fall begins in epoch `full` and the last epoch has no rate; CUT, which is
    one `ahead`, begins an epoch later and ends above zero.
    """
    return partial(LambdaLR, lr_lambda=partial(down_by_epochs, full, falling, batches, ahead))


def down_by_epochs(full: int, falling: int, batches: int, ahead: int, update: int) -> float:
    """The share of the rate to use for update number `update`."""
    return max(0.0, 1.0 - max(0, update // batches + ahead - full) / (falling + 1))


class Pix2pix(GanModule):
    """Learns to translate "a" into "b". A batch is {"a", "b"}; with `labels` {"label", "image"}, from label maps.

    Both turns use the same fake, as in the published training. The discriminator learns first, and then the generator
    pleases the discriminator that has just learned. `direction` says which of a person's sides are "a" and "b".
    """

    def __init__(
        self,
        generator: UNet | ResnetGenerator,
        discriminator: nn.Module,
        decay: Callable[[Optimizer], LambdaLR],
        *,
        labels: int = 0,
        loss: Loss = "vanilla",
        rate: float = 2e-4,
        pixels: float = 100.0,
        direction: Literal["AtoB", "BtoA"] = "AtoB",
    ) -> None:
        super().__init__()
        self.generator, self.discriminator, self.decay = generator, discriminator, decay
        self.labels, self.loss, self.rate, self.pixels, self.direction = labels, loss, rate, pixels, direction

    def configure_players(self) -> Iterator[Player]:
        adam = partial(Adam, lr=self.rate, betas=(0.5, 0.999), fused=True)
        yield Player("generator", self.generator, adam, self.decay)
        yield Player("discriminator", self.discriminator, adam, self.decay)

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("discriminator", self.judge, "discriminator", second_order=self.loss == "wgangp")
        yield Phase("generator", self.fool, "generator")

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell the fake from the picture, each with its source."""
        source, image = self.pair(batch)
        fake = self.shared("fake", self.generator, source).detach()
        on_fake, on_real = self.score(source, fake), self.score(source, image)
        found = {"gan": LOSSES[self.loss][0](on_real, on_fake)}
        if self.loss == "wgangp":
            pairs = torch.cat([source, image], 1), torch.cat([source, fake], 1)
            found["penalty"] = PENALTY * losses.gradient_penalty(self.discriminator, *pairs)
        return found

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Please the discriminator, and be close to the picture's pixels."""
        source, image = self.pair(batch)
        fake = self.shared("fake", self.generator, source)
        return {"gan": LOSSES[self.loss][1](self.score(source, fake)), "pixels": self.pixels * F.l1_loss(fake, image)}

    def score(self, source: Tensor, image: Tensor) -> Tensor:
        return self.discriminator(torch.cat([source, image], 1))

    def pair(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What is translated, and what it should become."""
        if self.labels:
            return onehot(batch["label"], self.labels, like=batch["image"]), batch["image"]
        return batch["a"], batch["b"]

    def published(self) -> list[PublishedFile]:
        return latest_nets({"G": self.generator, "D": self.discriminator})

    def translations(self) -> dict[str, Translation]:
        """From pictures; a network that reads label maps has no way from pictures."""
        return {} if self.labels else {self.direction: of_generator(self.generator)}

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        source, image = self.pair(batch)
        error = F.l1_loss(self.generator(source), image) / 2
        self.log("val/paint_error", error, sync_dist=True, batch_size=len(image))

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        source, image = self.pair(batch)
        first = {"shape": batch["label"]} if self.labels else {"input": source}
        return {**first, "output": self.generator(source), "truth": image}

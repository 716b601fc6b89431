"""R3GAN, Huang et al. 2024: pictures from noise, by a loss that converges without further tricks."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gan import Phase, Player
from gan.games.from_noise import FromNoise
from gan.losses import r1, r2, relativistic
from nets.ada import Augmentation, switch
from nets.published.files import PublishedFile
from nets.published.from_noise import snapshot
from nets.r3 import R3Discriminator, R3Generator

Range = tuple[float, float]  # what a schedule begins with, and what it ends with


class R3Gan(FromNoise):
    """Learns to draw pictures like {"image"}, with {"class"} where the networks have classes.

    Pictures are judged in pairs, with both gradient penalties. The networks learn in turns, each with a batch of its
    own: so one turn of both, which is an iteration of the published code, is two steps.

    Everything moves by a cosine, until `images` pictures have been shown to each network: the learning `rate`, Adam's
    `beta2`, the weight `gamma` of both penalties (R1 and R2), the half-life `ema` of the generator's average in
    pictures, and the probability `p` of the augmentation. `batch_size` counts the samples of all ranks.
    """

    def __init__(
        self,
        generator: R3Generator,
        discriminator: R3Discriminator,
        *,
        batch_size: int,
        rate: Range = (2e-4, 5e-5),
        beta2: Range = (0.9, 0.99),
        gamma: Range = (2.0, 0.2),
        ema: Range = (0.0, 5e5),
        p: Range = (0.0, 0.3),
        images: float = 2e7,
        augment: Augmentation | None = None,
    ) -> None:
        super().__init__()
        self.generator, self.discriminator, self.augment = generator, discriminator, augment
        self.batch_size, self.images = batch_size, images
        self.rate, self.beta2, self.gamma, self.ema, self.p = rate, beta2, gamma, ema, p

    def configure_players(self) -> Iterator[Player]:
        """No momentum. Samples come from the generator's averaged weights."""
        adam = partial(Adam, lr=self.rate[0], betas=(0.0, self.beta2[0]), eps=1e-8, fused=True)
        schedule = partial(Schedule, rate=partial(self.at, self.rate), beta2=partial(self.at, self.beta2))
        yield Player("generator", self.generator, adam, schedule, ema=self.decay)
        yield Player("discriminator", self.discriminator, adam, schedule)

    def configure_phases(self) -> Iterator[Phase]:
        """The discriminator's loss contains a gradient, so it needs second-order gradients."""
        yield Phase("discriminator", self.judge, "discriminator", every=2, second_order=True)
        yield Phase("generator", self.fool, "generator", every=2, start=1)

    def at(self, values: Range, turns: int) -> float:
        """The value of a schedule after so many turns of both networks."""
        first, last = values
        part = min(turns * self.batch_size / self.images, 1.0)
        return first + (1 - 0.5 * (1 + math.cos(math.pi * part))) * (last - first)

    def decay(self, turns: int) -> float:
        """The decay of the generator's average, whose half-life grows."""
        return 0.5 ** (self.batch_size / max(self.at(self.ema, turns), 1e-8))

    def training_step(self, batch: Any) -> None:
        if self.augment is not None:
            self.augment.p.fill_(self.at(self.p, self.step // 2))
        super().training_step(batch)

    def score(self, image: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The discriminator's scores of pictures, which it sees augmented, with the labels of the batch."""
        return self.discriminator(image if self.augment is None else self.augment(image), self.labels(batch))

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Score each picture above the fake it is paired with, with a small slope around both."""
        with torch.no_grad():
            fake = self.draw(batch["image"], self.labels(batch))
        score = partial(self.score, batch=batch)
        real_scores, real_slope = r1(score, batch["image"])
        fake_scores, fake_slope = r2(score, fake)
        gamma = self.at(self.gamma, self.step // 2)
        return {
            "relativistic": relativistic(real_scores, fake_scores),
            "r1": gamma * real_slope,
            "r2": gamma * fake_slope,
        }

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make each fake score above the picture it is paired with."""
        fake = self.draw(batch["image"], self.labels(batch))
        fake_scores = self.score(fake, batch)
        return {"relativistic": relativistic(fake_scores, self.score(batch["image"], batch))}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        switch(checkpoint["state_dict"], "augment", self.augment)

    def published(self) -> list[PublishedFile]:
        return [snapshot(self.generator, self.discriminator)]


class Schedule(LRScheduler):
    """Sets the learning rate and Adam's second beta, as functions of the number of updates."""

    def __init__(self, optimizer: Optimizer, rate: Any, beta2: Any) -> None:
        self.rate, self.beta2 = rate, beta2
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["betas"] = (0.0, self.beta2(self.last_epoch))
        return [self.rate(self.last_epoch) for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Without the functions, which the game makes again."""
        return {name: value for name, value in super().state_dict().items() if name not in ("rate", "beta2")}

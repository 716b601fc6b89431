"""R3GAN, Huang et al. 2024: pictures from noise, by a loss that converges without further tricks."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.optim import Adam

from gan import Phase, Player
from gan.games.from_noise import FromNoise
from gan.losses import r1, r2, relativistic
from nets.r3 import R3Discriminator, R3Generator


class R3Gan(FromNoise):
    """Learns to draw pictures like {"image"}. They are judged in pairs, with both gradient penalties in every step."""

    def __init__(
        self,
        generator: R3Generator,
        discriminator: R3Discriminator,
        *,
        rate: float = 2e-4,
        gamma: float = 1.0,
        ema: float = 0.999,
    ) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.rate, self.gamma, self.ema = rate, gamma, ema

    def configure_players(self) -> Iterator[Player]:
        """No momentum. Samples come from the generator's averaged weights."""
        adam = partial(Adam, lr=self.rate, betas=(0.0, 0.99))
        yield Player("generator", self.generator, adam, ema=self.ema)
        yield Player("discriminator", self.discriminator, adam)

    def configure_phases(self) -> Iterator[Phase]:
        """The discriminator's loss contains a gradient, so it needs second-order gradients."""
        yield Phase("discriminator", self.judge, "discriminator", second_order=True)
        yield Phase("generator", self.fool, "generator")

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Score each picture above the fake it is paired with, with a small slope around both."""
        with torch.no_grad():
            fake = self.draw(batch["image"])
        real_scores, real_slope = r1(self.discriminator, batch["image"])
        fake_scores, fake_slope = r2(self.discriminator, fake)
        return {
            "relativistic": relativistic(real_scores, fake_scores),
            "r1": self.gamma * real_slope,
            "r2": self.gamma * fake_slope,
        }

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make each fake score above the picture it is paired with."""
        fake_scores = self.discriminator(self.draw(batch["image"]))
        return {"relativistic": relativistic(fake_scores, self.discriminator(batch["image"]))}

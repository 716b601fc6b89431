"""A small StyleGAN2, Karras et al. 2020: regularised by gradients, which only some of the steps compute."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

from gan import Phase, Player
from gan.games.from_noise import FromNoise
from gan.losses import non_saturating_discriminator, non_saturating_generator, path_lengths, r1
from nets.stylegan import StyleDiscriminator, StyleGenerator

BETAS = (0.0, 0.99)
DECAY = 0.01  # of the running mean of path lengths: how much of it is new each time


class StyleGan(FromNoise):
    """Learns to draw pictures like {"image"}: two losses in every step, two penalties lazily.

    `r1_every` and `path_every` are how often the discriminator's R1 and the generator's path lengths are penalised;
    their weights `gamma` and `path` are per step, so a penalty that comes every 16 steps counts 16 times. `path_mean`
    is the running mean that path lengths are drawn to, the same on all ranks and a part of the checkpoint.
    """

    path_mean: Tensor

    def __init__(
        self,
        generator: StyleGenerator,
        discriminator: StyleDiscriminator,
        *,
        rate: float = 2e-3,
        gamma: float = 1.0,
        r1_every: int = 16,
        path: float = 2.0,
        path_every: int = 4,
        ema: float = 0.999,
    ) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.rate, self.gamma, self.r1_every = rate, gamma, r1_every
        self.path, self.path_every, self.ema = path, path_every, ema
        self.register_buffer("path_mean", torch.zeros(()))
        self._lengths: list[Tensor] = []

    def configure_players(self) -> Iterator[Player]:
        """Samples come from the generator's average, which moves with every update, also those of the penalty."""
        yield Player("generator", self.generator, lazy_adam(self.rate, self.path_every), ema=self.ema)
        yield Player("discriminator", self.discriminator, lazy_adam(self.rate, self.r1_every))

    def configure_phases(self) -> Iterator[Phase]:
        """In the published order; a penalty is a turn, and an update, of its own."""
        yield Phase("generator", self.fool, "generator")
        yield Phase("path", self.even, "generator", every=self.path_every, second_order=True)
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("r1", self.flatten, "discriminator", every=self.r1_every, second_order=True)

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make fakes that score high."""
        return {"adversarial": non_saturating_generator(self.discriminator(self.draw(batch["image"])))}

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Score pictures high and fakes low."""
        with torch.no_grad():
            fake = self.draw(batch["image"])
        scores = self.discriminator(batch["image"]), self.discriminator(fake)
        return {"adversarial": non_saturating_discriminator(*scores)}

    def flatten(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stay flat around pictures: Karras et al. 2020, section 3.1 (lazy regularisation)."""
        return {"r1": self.r1_every * self.gamma * r1(self.discriminator, batch["image"])[1]}

    def even(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Let a step in style space change every picture alike: Karras et al. 2020, section 3.2, equation 4.

        See [Note: a running mean for all].
        """
        lengths = path_lengths(self.generator.styled, self.latents(batch["image"]))
        self._lengths.append(lengths.detach().mean())
        return {"path": self.path_every * self.path * (lengths - self.path_mean).square().mean()}

    def training_step(self, batch: Any) -> None:
        """One step, after which the running mean follows the path lengths there were."""
        super().training_step(batch)
        self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the running mean of path lengths.

        [Note: a running mean for all]
        Each rank sees the path lengths of its own samples, so their means are gathered: one number a rank, in the
        steps where the penalty is due. The mean moves once a step and after the penalty, which so sees one constant
        in all of its micro-batches, on any number of ranks. (The published code moves it just before, lets gradient
        through the hundredth part that is the batch at hand, and keeps a mean of its own on each rank.) Lengths
        that are not finite, of a step whose update is skipped, leave it alone.
        """
        if not self._lengths:
            return
        mean = self.all_gather(torch.stack(self._lengths).mean()).mean()
        self._lengths.clear()
        self.path_mean.copy_(
            torch.where(mean.isfinite(), self.path_mean.lerp(mean.to(self.path_mean), DECAY), self.path_mean)
        )


def lazy_adam(rate: float, every: int) -> partial:
    """The recipe of an Adam that makes an update more every so many steps, for a penalty.

    Rate and betas are corrected so that it learns and forgets at the same pace per step as without: Karras et al.
    2020, appendix B: c = k / (k + 1), rate * c and betas ** c.
    """
    c = every / (every + 1)
    return partial(Adam, lr=rate * c, betas=tuple(beta**c for beta in BETAS), eps=1e-8)

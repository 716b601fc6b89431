"""A small StyleGAN2-ADA, Karras et al. 2020, with gradient penalties that only some of the steps compute."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

from gan import Phase, Player, ranks
from gan.games.from_noise import FromNoise
from gan.losses import non_saturating_discriminator, non_saturating_generator, path_lengths, r1
from nets.ada import Ada
from nets.stylegan import StyleDiscriminator, StyleGenerator

BETAS = (0.0, 0.99)
DECAY = 0.01  # the share of new path lengths in their running mean


class StyleGan(FromNoise):
    """Learns to draw pictures like {"image"}, with two losses in every step and two penalties in some steps.

    The discriminator's R1 is penalised every `r1_every` steps, the generator's path lengths every `path_every` steps.
    Their weights `gamma` and `path` are per step: a penalty of every 16th step is multiplied by 16. `path_mean` is the
    running mean that path lengths are pulled to. It is the same on all ranks, and saved in the checkpoint.

    With `ada`, the discriminator sees all pictures augmented, more and more while it is too sure about real ones. `ema`
    is a decay, or a function of the number of steps.
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
        ema: float | Callable[[int], float] = 0.999,
        ada: Ada | None = None,
    ) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.rate, self.gamma, self.r1_every = rate, gamma, r1_every
        self.path, self.path_every, self.ema = path, path_every, ema
        self.ada = ada
        self.register_buffer("path_mean", torch.zeros(()))
        self._lengths: list[Tensor] = []
        self._positive: list[Tensor] = []  # how many scores of real pictures are positive, and how many there are

    def configure_players(self) -> Iterator[Player]:
        """Samples come from the generator's averaged weights, which move once a step."""
        yield Player("generator", self.generator, lazy_adam(self.rate, self.path_every), ema=self.ema, ema_per="step")
        yield Player("discriminator", self.discriminator, lazy_adam(self.rate, self.r1_every))

    def configure_phases(self) -> Iterator[Phase]:
        """In the published order. A penalty has its own turn, with its own update."""
        yield Phase("generator", self.fool, "generator")
        yield Phase("path", self.even, "generator", every=self.path_every, second_order=True)
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("r1", self.flatten, "discriminator", every=self.r1_every, second_order=True)

    def score(self, image: Tensor) -> Tensor:
        """The discriminator's scores of pictures, which it sees augmented."""
        return self.discriminator(image if self.ada is None else self.ada(image))

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make fakes that score high."""
        return {"adversarial": non_saturating_generator(self.score(self.draw(batch["image"])))}

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Score pictures high and fakes low."""
        with torch.no_grad():
            fake = self.draw(batch["image"])
        real, fake = self.score(batch["image"]), self.score(fake)
        if self.ada is not None:
            signs = real.detach() > 0
            # Whole numbers over all ranks: their sum is the same in any order, and so p is.
            self._positive.append(ranks.sum(torch.stack([signs.sum(), torch.ones_like(signs).sum()])))
        return {"adversarial": non_saturating_discriminator(real, fake)}

    def flatten(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Keep the slope around pictures small: Karras et al. 2020, section 3.1 (lazy regularisation)."""
        return {"r1": self.r1_every * self.gamma * r1(self.score, batch["image"])[1]}

    def even(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Let a step in style space change every picture by as much: Karras et al. 2020, section 3.2, equation 4.

        See [Note: a running mean for all].
        """
        lengths = path_lengths(self.generator.styled, self.latents(batch["image"]))
        self._lengths.append(lengths.detach().mean())
        return {"path": self.path_every * self.path * (lengths - self.path_mean).square().mean()}

    def training_step(self, batch: Any) -> None:
        """Train a step. Then move the running mean towards the path lengths of this step, and adjust augmentation."""
        super().training_step(batch)
        self._follow()
        if self.ada is not None and self._positive:
            positive, count = torch.stack(self._positive).sum(0)
            self.ada.adjust(positive, count, count)
            self._positive.clear()

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the running mean of path lengths.

        [Note: a running mean for all]
        Each rank has the path lengths of its own samples, so the ranks' means are gathered: one number a rank, only in
        steps with the penalty. The running mean moves once a step, after the penalty. So the penalty sees the same
        constant in all of its micro-batches, on any number of ranks. (The published code moves the mean before the
        penalty, lets the gradient pass through the new batch's share of it, and keeps a separate mean on each rank.)
        Lengths that are not finite belong to a step whose update is skipped; they do not change the mean.
        """
        if not self._lengths:
            return
        mean = self._of_all_ranks(torch.stack(self._lengths).mean()).mean()
        self._lengths.clear()
        self.path_mean.copy_(
            torch.where(mean.isfinite(), self.path_mean.lerp(mean.to(self.path_mean), DECAY), self.path_mean)
        )


def lazy_adam(rate: float, every: int) -> partial:
    """An Adam for a player that has one extra update every `every` steps, for a penalty.

    Rate and betas are corrected for the extra update, by Karras et al. 2020, appendix B: c = k / (k + 1), rate * c and
    betas ** c.
    """
    c = every / (every + 1)
    return partial(Adam, lr=rate * c, betas=tuple(beta**c for beta in BETAS), eps=1e-8)

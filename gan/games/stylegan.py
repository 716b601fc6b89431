"""StyleGAN2-ADA, Karras et al. 2020, with the published loop: penalties in turns of their own, in some of the steps."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

from gan import Phase, Player, noise, ranks
from gan.files.errors import UserError
from gan.games.from_noise import FromNoise
from gan.losses import non_saturating_discriminator, non_saturating_generator, path_lengths, r1
from nets.ada import Ada, switch
from nets.published.files import PublishedFile
from nets.published.from_noise import snapshot
from nets.stylegan import StyleDiscriminator, StyleGenerator

BETAS = (0.0, 0.99)
DECAY = 0.01  # the share of new path lengths in their running mean


class StyleGan(FromNoise):
    """Learns to draw pictures like {"image"}, of classes {"class"} if the networks know any.

    The discriminator's R1 is penalised every `r1_every` steps, the generator's path lengths every `path_every` steps,
    of one in `path_shrink` samples. Their weights `gamma` and `path` are per step: a penalty of every 16th step is
    multiplied by 16. `path_mean` is the running mean that path lengths are pulled to.

    With probability `mixing`, the last layers of a whole batch, from a random one on, get the styles of other latents.
    With `ada`, the discriminator sees all pictures augmented, more and more while it is too sure about real ones, which
    is adjusted every `ada_every` steps. `ema` is a decay, or a function of the number of steps. The discriminator's
    first `freeze` layers do not learn (FreezeD).
    """

    path_mean: Tensor
    scored: Tensor

    def __init__(
        self,
        generator: StyleGenerator,
        discriminator: StyleDiscriminator,
        *,
        rate: float = 2.5e-3,
        gamma: float = 1.0,
        r1_every: int = 16,
        path: float = 2.0,
        path_every: int = 4,
        path_shrink: int = 2,
        mixing: float = 0.9,
        ema: float | Callable[[int], float] = 0.999,
        ada: Ada | None = None,
        ada_every: int = 4,
        freeze: int = 0,
    ) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.rate, self.gamma, self.r1_every = rate, gamma, r1_every
        self.path, self.path_every, self.path_shrink = path, path_every, path_shrink
        self.mixing, self.ema, self.ada, self.ada_every = mixing, ema, ada, ada_every
        self.frozen = discriminator.layers()[:freeze]
        self.register_buffer("path_mean", torch.zeros(()))
        # Since the augmentation was adjusted: positive scores of real pictures, all of them, and pictures.
        self.register_buffer("scored", torch.zeros(3))
        self._means: list[Tensor] = []
        self._scored: list[Tensor] = []

    def configure_players(self) -> Iterator[Player]:
        """Samples come from the generator's averaged weights, which move once a step."""
        yield Player("generator", self.generator, lazy_adam(self.rate, self.path_every), ema=self.ema, ema_per="step")
        freeze = self._frozen_in if self.frozen else None  # a lambda could not go to ranks that are spawned
        yield Player("discriminator", self.discriminator, lazy_adam(self.rate, self.r1_every), freeze=freeze)

    def configure_phases(self) -> Iterator[Phase]:
        """In the published order. A penalty has its own turn, with its own update."""
        yield Phase("generator", self.fool, "generator")
        if self.path:
            yield Phase("path", self.even, "generator", every=self.path_every, second_order=True)
        yield Phase("discriminator", self.judge, "discriminator")
        if self.gamma:
            yield Phase("r1", self.flatten, "discriminator", every=self.r1_every, second_order=True)

    def _frozen_in(self, step: int) -> list[str]:
        return self.frozen

    def styled(self, latents: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Pictures, and the styles of their layers [B, L, D], perhaps mixed: Karras et al. 2019, section 3.1."""
        styles = self.generator.styles(latents, labels)
        if self.mixing:
            rows = styles.shape[1]
            cutoff = noise.randint(1, rows, (), like=styles, common=True)
            mixed = noise.rand((), like=styles, common=True) < self.mixing
            others = self.generator.styles(self.latents(latents), labels, follow=False)
            late = torch.arange(rows, device=styles.device) >= cutoff
            styles = torch.where((late & mixed)[:, None], others, styles)
        return self.generator.drawn(styles), styles

    def score(self, image: Tensor, labels: Tensor | None) -> Tensor:
        """The discriminator's scores of pictures, which it sees augmented."""
        return self.discriminator(image if self.ada is None else self.ada(image), labels)

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make fakes that score high."""
        wanted = self.labels_of_fakes(batch)
        fake, _ = self.styled(self.latents(batch["image"]), wanted)
        return {"adversarial": non_saturating_generator(self.score(fake, wanted))}

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Score pictures high and fakes low."""
        image, wanted = batch["image"], self.labels_of_fakes(batch)
        with torch.no_grad():
            fake, _ = self.styled(self.latents(image), wanted)
        fake = self.score(fake, wanted)
        real = self._counted(self.score(image, self.labels(batch)), new=True)
        return {"adversarial": non_saturating_discriminator(real, fake)}

    def flatten(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """R1, now and then: keep the slope around pictures small. Karras et al. 2020, section 3.1."""
        scores, slope = r1(partial(self.score, labels=self.labels(batch)), batch["image"])
        # As published, parameters that the penalty does not reach have a gradient of zero, and Adam's averages move.
        return {"r1": self.r1_every * self.gamma * slope + 0 * self._counted(scores).mean()}

    def even(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Path length: a step in style space changes every picture by as much. Karras et al. 2020, equation 4."""
        image, wanted = batch["image"], self.labels_of_fakes(batch)
        place, (count, left) = noise.here(), divmod(len(image), self.path_shrink)
        count = max(1, count)
        if left and place is not None and place.rows < place.total:
            whole = place.total // place.rows * (place.rows + self.path_shrink - left)
            raise UserError(
                f"path lengths are of one in {self.path_shrink} samples, and a rank (or micro-batch) has {len(image)}; "
                f"take a batch size of {whole} (--batch-size {whole}), or one rank (--devices 1)"
            )
        if place is not None:  # that of one in so many samples: on any number of ranks they are the same ones
            rows, stride = max(1, place.rows // self.path_shrink), place.stride * self.path_shrink
            place = replace(place, rows=rows, stride=stride)
        with noise.at(place):
            pictures, lengths = path_lengths(
                lambda z: self.styled(z, None if wanted is None else wanted[:: self.path_shrink][:count]),
                self.latents(image[:count]),
            )
        # The gradient goes through the new mean, too.
        mean = self.path_mean.lerp(ranks.mean(lengths.mean()).to(self.path_mean), DECAY)
        self._means.append(mean.detach())
        penalty = (lengths - mean).square().mean()
        return {"path": self.path_every * self.path * penalty + 0 * pictures.mean()}

    def _counted(self, scores: Tensor, new: bool = False) -> Tensor:
        """Scores of real pictures, counted for the augmentation, and the pictures, if they are `new` in this step."""
        if self.ada is not None:
            count = torch.ones_like(scores, dtype=torch.int64).sum()
            # Whole numbers over all ranks: their sum is the same in any order, and so p is.
            self._scored.append(ranks.sum(torch.stack([(scores > 0).sum(), count, new * count])))
        return scores

    def training_step(self, batch: Any) -> None:
        """Train a step. Then move the running mean of path lengths, and adjust the augmentation."""
        super().training_step(batch)
        with torch.no_grad():
            # Lengths that are not finite belong to a step whose update is skipped.
            if self._means:
                mean = torch.stack(self._means).mean()
                self.path_mean.copy_(torch.where(mean.isfinite(), mean, self.path_mean))
            if self._scored:
                self.scored += torch.stack(self._scored).sum(0)
            if self.ada is not None and (self.step + 1) % self.ada_every == 0:
                self.ada.adjust(*self.scored)
                self.scored.zero_()
        self._means.clear()
        self._scored.clear()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        switch(checkpoint["state_dict"], "ada", self.ada)

    def published(self) -> list[PublishedFile]:
        return [snapshot(self.generator, self.discriminator)]


def lazy_adam(rate: float, every: int) -> partial:
    """An Adam for a player that has one extra update every `every` steps, for a penalty.

    Rate and betas are corrected for the extra update, by Karras et al. 2020, appendix B: c = k / (k + 1), rate * c and
    betas ** c.
    """
    c = every / (every + 1)
    return partial(Adam, lr=rate * c, betas=tuple(beta**c for beta in BETAS), eps=1e-8, fused=True)

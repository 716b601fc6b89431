"""BigGAN, Brock et al. 2019: pictures of classes from noise, by the hinge loss and large batches."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from gan import Phase, Player, noise
from gan.files.errors import UserError, explained
from gan.games.from_noise import FromNoise
from gan.losses import hinge_discriminator, hinge_generator
from nets.biggan import BigDiscriminator, BigGenerator
from nets.published.files import PublishedFile


class BigGan(FromNoise):
    """Learns to draw pictures like {"image"}, with {"class"} where the networks have classes.

    The discriminator learns in every step, from a batch of its own; the generator in one of `judge_steps` steps, after
    it. Fakes have random classes. Each learns from `micro_batches` parts of a batch, one after the other, which the
    published code calls accumulations.

    `ortho` is the weight of the orthogonal regularisation, of the generator and of the discriminator. `ema` is the
    decay of the generator's average, which is a copy until its update number `ema_start`; running statistics and
    singular vectors are averaged too. With `split` the discriminator sees fakes and pictures in two passes.
    """

    def __init__(
        self,
        generator: BigGenerator,
        discriminator: BigDiscriminator,
        *,
        rates: tuple[float, float] = (2e-4, 2e-4),
        judge_steps: int = 4,
        micro_batches: int = 1,
        ortho: tuple[float, float] = (0.0, 0.0),
        ema: float = 0.9999,
        ema_start: int = 1000,
        split: bool = False,
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.rates, self.judge_steps, self.micro_batches, self.eps = rates, judge_steps, micro_batches, eps
        self.ortho, self.ema, self.ema_start, self.split = ortho, ema, ema_start, split

    def configure_players(self) -> Iterator[Player]:
        """No momentum. Samples come from the generator's average."""
        adam = [partial(Adam, lr=rate, betas=(0.0, 0.999), eps=self.eps, fused=True) for rate in self.rates]
        yield Player("generator", self.generator, adam[0], ema=self.decay, ema_buffers="averaged")
        yield Player("discriminator", self.discriminator, adam[1])

    def configure_phases(self) -> Iterator[Phase]:
        turns = self.judge_steps
        yield Phase("discriminator", self.judge, "discriminator", micro_batches=self.micro_batches)
        yield Phase("generator", self.fool, "generator", turns, self.micro_batches, start=turns - 1)

    def decay(self, updates: int) -> float:
        return self.ema if updates + 1 >= self.ema_start else 0.0

    def labels_of_fakes(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Random classes, each as often as any other."""
        if not (classes := self.generator.classes):
            return None
        image = batch["image"]
        return F.one_hot(noise.randint(0, classes, (len(image),), like=image), classes).to(image)

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Score pictures above 1, and fakes below -1."""
        real, labels = batch["image"], self.labels(batch)
        with torch.no_grad():
            fake, classes = self.drawn(batch)
        if self.split:
            fake_scores, real_scores = self.discriminator(fake, classes), self.discriminator(real, labels)
        else:
            both = None if labels is None or classes is None else torch.cat([classes, labels])
            fake_scores, real_scores = self.discriminator(torch.cat([fake, real]), both).chunk(2)
        losses = {"hinge": hinge_discriminator(real_scores, fake_scores)}
        return losses | self.regular(self.discriminator, self.ortho[1])

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Raise the scores of fakes."""
        losses = {"hinge": hinge_generator(self.discriminator(*self.drawn(batch)))}
        return losses | self.regular(self.generator, self.ortho[0], self.generator.shared)

    def drawn(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        latents, labels = self.latents(batch["image"]), self.labels_of_fakes(batch)
        return self._drawn_from(latents, labels), labels

    def regular(self, net: nn.Module, weight: float, but: nn.Module | None = None) -> dict[str, Tensor]:
        """Brock et al. 2019, equation 3: rows of a weight are to be at right angles, whatever their lengths.

        The published code adds the gradient of this loss after the backward.
        """
        if not weight:
            return {}
        left_out = set() if but is None else set(but.parameters())
        weights = [each for each in net.parameters() if each.dim() > 1 and each not in left_out]
        with explained(
            "orthogonal regularisation reads weights outside of their network's forward, and this policy does not have "
            "them there; type --ortho 0, or --strategy zero3",
            UserError,
        ):
            products = [rows @ rows.t() for rows in (each.flatten(1) for each in weights)]
        squares = [(each - each.diagonal().diag()).square().sum() for each in products]
        return {"ortho": weight / 2 * torch.stack(squares).sum()}

    def published(self) -> list[PublishedFile]:
        """The published files. Of a folder's generators G.pth is read last, so a training goes on from it."""
        drawer, judge = {"": self.generator}, {"": self.discriminator}
        return [
            PublishedFile("G_ema.pth", drawer, "G_ema_*.pth"),
            PublishedFile("G.pth", drawer, "G_[bc]*.pth"),
            PublishedFile("D.pth", judge, "D_[bc]*.pth"),
        ]

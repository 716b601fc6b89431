"""R3GAN, Huang et al. 2024: pictures from noise, with a loss that converges and so needs no tricks."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from gan import GanModule, Phase, Player, noise
from gan.losses import r1, r2, relativistic
from nets.r3 import R3Discriminator, R3Generator

DIRECTIONS = 128


class R3Gan(GanModule):
    """Learns to draw pictures like {"image"}: judged in pairs, with both gradient penalties in every step."""

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
        self._drawn: list[Tensor] = []
        self._real: list[Tensor] = []

    def configure_players(self) -> Iterator[Player]:
        """No momentum; samples come from the generator's average."""
        adam = partial(Adam, lr=self.rate, betas=(0.0, 0.99))
        yield Player("generator", self.generator, adam, ema=self.ema)
        yield Player("discriminator", self.discriminator, adam)

    def configure_phases(self) -> Iterator[Phase]:
        """Turn by turn; the discriminator's loss differentiates its own gradient."""
        yield Phase("discriminator", self.judge, "discriminator", second_order=True)
        yield Phase("generator", self.fool, "generator")

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put each picture above the fake it is paired with, and stay flat around both."""
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
        """Put each fake above the picture it is paired with."""
        fake_scores = self.discriminator(self.draw(batch["image"]))
        return {"relativistic": relativistic(fake_scores, self.discriminator(batch["image"]))}

    def draw(self, like: Tensor) -> Tensor:
        """As many fakes as there are pictures."""
        return self.generator(noise.randn((len(like), self.generator.latent), like=like))

    def numbered(self, numbers: Tensor, like: Tensor) -> Tensor:
        """The fakes of some numbers, the same ones each time: what validation and grids look at."""
        latents = [
            torch.randn(self.generator.latent, generator=torch.Generator().manual_seed(noise.seed_for("fake", number)))
            for number in numbers.tolist()
        ]
        return self.generator(torch.stack(latents).to(like))

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Keep the projections of pictures and of as many fakes. See [Note: a distance over all ranks]."""
        image = batch["image"]
        rank, world = self.trainer.global_rank, self.trainer.world_size
        numbers = (sum(map(len, self._drawn)) + torch.arange(len(image))) * world + rank
        self._drawn.append(projections(self.numbered(numbers, like=image)))
        self._real.append(projections(image))

    def on_validation_epoch_end(self) -> None:
        """The sliced Wasserstein distance between all fakes and all pictures.

        [Note: a distance over all ranks]
        A distance of distributions is no mean over batches, so the projections of all ranks are gathered first;
        only they are, a few numbers a picture. The fakes are numbered through all ranks, so they are the same
        ones, and the score the same, at any number of ranks.
        """
        drawn, real = (self.all_gather(torch.cat(kept)).flatten(0, -2) for kept in (self._drawn, self._real))
        self._drawn, self._real = [], []
        self.log("val/distance", wasserstein(drawn, real), sync_dist=True)

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fakes, always of the same noise, beside pictures."""
        image = batch["image"]
        fakes = [self.numbered(torch.arange(len(image)) + k * len(image), like=image) for k in range(3)]
        return {"output": fakes[0], "more": fakes[1], "and more": fakes[2], "pictures": image}


def projections(images: Tensor) -> Tensor:
    """Pictures seen from fixed random directions, at three sizes: [B, 3 * DIRECTIONS]."""
    generator = torch.Generator().manual_seed(0)
    seen = []
    for shrink in (1, 2, 4):
        pixels = F.avg_pool2d(images, shrink).flatten(1)
        directions = torch.randn(pixels.shape[1], DIRECTIONS, generator=generator).to(pixels)
        seen.append(pixels @ F.normalize(directions, dim=0))
    return torch.cat(seen, 1)


def wasserstein(one: Tensor, other: Tensor) -> Tensor:
    """The distance of two equally large sets of projections, mean over the directions."""
    # Sliced Wasserstein distance of Rabin et al. 2011: on a line, the best transport pairs equal ranks.
    return (one.sort(0).values - other.sort(0).values).abs().mean()

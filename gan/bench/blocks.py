"""The grid's own game: a generator of many alike blocks, which a pipeline can cut anywhere, and a smaller judge."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam

from datasets import GlobalLoader
from gan import GanModule, Phase, Player, noise
from gan.runs import Run

LATENT = 4  # maps of noise
PICTURES = 256


class Block(nn.Module):
    """Two convolutions and a skip. What goes in has the size of what comes out, so a cut costs the same anywhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.act = nn.LeakyReLU(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.two(self.act(self.one(x)))


def _tower(maps: int, width: int, blocks: int, *end: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(maps, width, 3, padding=1), *(Block(width) for _ in range(blocks)), *end)


class Blocks(GanModule):
    """A GAN of blocks, without a gradient penalty, so that every policy takes both players."""

    def __init__(self, width: int, generator_blocks: int, discriminator_blocks: int, size: int, batch: int) -> None:
        super().__init__()
        self.size, self.batch_size = size, batch
        self.generator = _tower(LATENT, width, generator_blocks, nn.Conv2d(width, 3, 3, padding=1), nn.Tanh())
        self.discriminator = _tower(3, width, discriminator_blocks, nn.Flatten(), nn.Linear(width * size * size, 1))

    def configure_players(self) -> Iterator[Player]:
        adam = partial(Adam, lr=1e-4, betas=(0.0, 0.99))
        yield Player("generator", self.generator, adam, ema=0.999)
        yield Player("discriminator", self.discriminator, adam)

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("generator", self.fool, "generator")

    def train_dataloader(self) -> GlobalLoader:
        """Random pictures, so that no time goes into data."""
        dice, number = torch.Generator().manual_seed(0), max(PICTURES, self.batch_size)
        return GlobalLoader(list(torch.randn(number, 3, self.size, self.size, generator=dice)), self.batch_size)

    def fake(self, like: Tensor) -> Tensor:
        return self.generator(noise.randn((len(like), LATENT, self.size, self.size), like=like))

    def judge(self, image: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            fake = self.fake(image)
        real, fake = self.discriminator(image), self.discriminator(fake)
        return {"real": softplus(-real).mean(), "fake": softplus(fake).mean()}

    def fool(self, image: Tensor) -> Tensor:
        return softplus(-self.discriminator(self.fake(image))).mean()


def blocks(
    width: int = 128, generator_blocks: int = 8, discriminator_blocks: int = 2, size: int = 8, batch_size: int = 32
) -> Run:
    """A generator and a discriminator of convolutional blocks, on random pictures.

    Args:
        width: Channels of every block.
        generator_blocks: Blocks of the generator.
        discriminator_blocks: Blocks of the discriminator.
        size: Height and width of the pictures.
        batch_size: Pictures a step, of all ranks together.
    """
    return Run(Blocks(width, generator_blocks, discriminator_blocks, size, batch_size), None, max_steps=1000)

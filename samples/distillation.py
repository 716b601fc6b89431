"""A distillation of transformers, of any size: to plan it, or to begin one of your own with.

    python -m gan.plan samples/distillation.py:distillation --billions 14 --nodes 8 --devices 8 --memory 80G

The game is DMD2 (gan/games/dmd2.py). Its student, fake score and teacher are alike, and together they have so many
billions of parameters. The pictures are noise: only their shapes matter here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from datasets import GlobalLoader
from gan.games.dmd2 import Dmd2
from gan.losses import denoising, distribution_matching, non_saturating_discriminator, non_saturating_generator
from gan.runs import Run
from nets.denoiser import Head, OneStep

HEAD = 128  # the width of an attention's head
SHAPES = {0.02: (128, 8), 1.5: (1536, 18), 14: (3584, 30), 70: (6656, 44)}  # width and depth of each network


class Block(nn.Module):
    """A block of a transformer: attention, and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.ask, self.answer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        asked = self.ask(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.answer(F.scaled_dot_product_attention(*asked).transpose(1, 2).flatten(2))
        return x + self.think(self.norms[1](x))


class Transformer(nn.Module):
    """A denoiser of pictures, cut into patches. The size of the noise is one more token."""

    def __init__(self, size: int, patch: int, width: int, depth: int, spread: float = 0.5) -> None:
        super().__init__()
        self.side, self.patch, self.spread = size // patch, patch, spread
        self.see = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(self.side**2 + 1, width))
        self.loudness = nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.paint = nn.Linear(width, 3 * patch**2)

    def features(self, noisy: Tensor, sigma: Tensor) -> Tensor:
        """The inner features [B, width, h, w] of noisy pictures, for a critic."""
        seen = self.see(noisy).flatten(2).transpose(1, 2)
        x = torch.cat([self.loudness(sigma.log()[:, None])[:, None], seen], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return x[:, 1:].transpose(1, 2).unflatten(2, (self.side, self.side))

    def forward(self, noisy: Tensor, sigma: Tensor) -> Tensor:
        """The pictures without their noise of size `sigma` [B]."""
        return self.painted(noisy, self.features(noisy, sigma))

    def painted(self, noisy: Tensor, features: Tensor) -> Tensor:
        """The same from the features."""
        patches = self.paint(self.norm(features.flatten(2).transpose(1, 2)))
        return noisy + F.fold(patches.transpose(1, 2), noisy.shape[-2:], self.patch, stride=self.patch)


class Noise(Dataset):
    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"image": torch.rand(3, self.size, self.size)}


class Distillation(Dmd2):
    """DMD2 with data of its own, in which the fake score is called once a turn.

    If a loss calls a network twice, each gradient of the one call is kept until backward has the other's too: for a
    large network that is more memory than anything else.
    """

    fake_score: Transformer

    def __init__(self, *players: Any, size: int, batch_size: int, ema: float | None) -> None:
        super().__init__(*players, ema=ema)
        self.size, self.batch_size = size, batch_size

    def follow(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Denoise what the student draws now, and tell it from pictures, by the same features."""
        image = batch["image"]
        with torch.no_grad():
            fake = self.draw(image)
        noisy, sigma = self.diffuse(torch.cat([image, fake]))
        features = self.fake_score.features(noisy, sigma)
        (_, noisy), (_, sigma) = noisy.chunk(2), sigma.chunk(2)
        denoised = self.fake_score.painted(noisy, features.chunk(2)[1])
        return {
            "denoising": denoising(denoised, fake, sigma, self.fake_score.spread),
            "adversarial": self.head_weight * non_saturating_discriminator(*self.head(features).chunk(2)),
        }

    def distil(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move pictures towards the teacher's denoising and away from the fake score's, and deceive the head."""
        fake = self.draw(batch["image"])
        noisy, sigma = self.diffuse(fake)
        features = self.fake_score.features(noisy, sigma)
        with torch.no_grad():
            wanted, found = self.teacher(noisy, sigma), self.fake_score.painted(noisy, features)
        return {
            "matching": distribution_matching(fake, wanted, found),
            "adversarial": self.adversarial * non_saturating_generator(self.head(features)),
        }

    def train_dataloader(self) -> GlobalLoader:
        return GlobalLoader(Noise(self.batch_size * 4, self.size), self.batch_size)


def distillation(
    billions: float = 1.5,
    size: int = 512,
    patch: int = 16,
    batch_size: int = 64,
    max_steps: int = 1000,
    ema: float | None = 0.999,
    width: int | None = None,
    depth: int | None = None,
) -> Run:
    """DMD2 with three transformers and a head.

    Args:
        billions: Parameters of the game: 1.5, 14 or 70, or 0.02 to try it.
        size: Height and width of the pictures.
        patch: Height and width of a patch.
        batch_size: Pictures a step, of all ranks together.
        max_steps: Steps of the training.
        ema: Decay of the student's average.
        width: Width of the transformers, instead of that for `billions`.
        depth: How many blocks each of them has, instead of that for `billions`.
    """
    usual = SHAPES[min(SHAPES, key=lambda known: abs(known - billions))]
    shape = size, patch, width or usual[0], depth or usual[1]
    student, fake_score, teacher = (Transformer(*shape) for _ in range(3))
    players = OneStep(student, size, 10.0), fake_score, Head(shape[2]), teacher
    return Run(Distillation(*players, size=size, batch_size=batch_size, ema=ema), None, max_steps)

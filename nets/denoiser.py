"""Denoisers: a small trainable one, a critic of its inner features, and the exact one for a set of pictures."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nets.blocks import group_norm

GROUPS = 8  # of a norm, at most


class Denoiser(nn.Module):
    """A U-net that removes noise of a known size from pictures, preconditioned as in Karras et al. 2022 (EDM), table 1.

    `widths` are the channels at each size, from the full one down; each size is half of the one before. `spread` is
    the standard deviation of clean pictures.
    """

    def __init__(self, widths: Sequence[int] = (16, 32, 64, 64), embedding: int = 64, spread: float = 0.5) -> None:
        super().__init__()
        self.spread, self.frequencies = spread, embedding // 2
        self.embed = nn.Sequential(
            nn.Linear(2 * self.frequencies, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.see = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(_Block(a, b, embedding) for a, b in pairwise((widths[0], *widths)))
        self.middle = _Block(widths[-1], widths[-1], embedding)
        # For each size from the smallest up: the channels there, and the channels that come from the size below.
        climb = zip(reversed(widths), (widths[-1], *reversed(widths[1:])), strict=True)
        self.up = nn.ModuleList(_Block(a + b, a, embedding) for a, b in climb)
        self.norm = group_norm(widths[0], GROUPS)
        self.paint = nn.Conv2d(widths[0], 3, 3, padding=1)
        for parameter in self.paint.parameters():
            nn.init.zeros_(parameter)

    def forward(self, noisy: Tensor, sigma: Tensor) -> Tensor:
        """The pictures without their noise of size `sigma` [B]."""
        total = (sigma**2 + self.spread**2).sqrt()
        x, passed, embedded = self._descend(noisy, sigma)
        for block in self.up:
            other = passed.pop()
            x = x if x.shape[-1] == other.shape[-1] else F.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, other], 1), embedded)
        painted = self.paint(F.silu(self.norm(x)))
        keep, add = self.spread**2 / total**2, sigma * self.spread / total
        return _by_row(keep) * noisy + _by_row(add) * painted

    def features(self, noisy: Tensor, sigma: Tensor) -> Tensor:
        """The inner features [B, C, h, w] of noisy pictures, for a critic."""
        return self._descend(noisy, sigma)[0]

    def _descend(self, noisy: Tensor, sigma: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        octaves = torch.arange(self.frequencies, device=sigma.device, dtype=sigma.dtype)
        angles = (sigma.log() / 4)[:, None] * 2 ** (octaves * 6 / self.frequencies)
        embedded = self.embed(torch.cat([angles.cos(), angles.sin()], 1))
        x = self.see(noisy / _by_row((sigma**2 + self.spread**2).sqrt()))
        passed = []
        for number, block in enumerate(self.down):
            x = block(F.avg_pool2d(x, 2) if number else x, embedded)
            passed.append(x)
        return self.middle(x, embedded), passed, embedded


class OneStep(nn.Module):
    """A denoiser as a generator: it draws pictures in one step, from noise of size `sigma`."""

    def __init__(self, denoiser: nn.Module, size: int, sigma: float) -> None:
        super().__init__()
        self.denoiser, self.size, self.sigma = denoiser, size, sigma
        self.latent = 3 * size * size

    def forward(self, z: Tensor) -> Tensor:
        return self.denoiser(self.sigma * z.view(-1, 3, self.size, self.size), z.new_full((z.shape[0],), self.sigma))


class Head(nn.Module):
    """A score for each picture from a denoiser's inner features (Yin et al. 2024, DMD2, section 4.3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.look = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = group_norm(channels, GROUPS)
        self.score = nn.Linear(channels, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Scores [B]."""
        return self.score(F.silu(self.norm(self.look(features))).mean((2, 3))).squeeze(1)


class ExactDenoiser(nn.Module):
    """The best possible denoiser for the pictures [K, 3, H, W], each as likely as the others.

    Nothing is learned. The exact answer is the mean of the pictures, weighted by how likely each one is under the
    noise (Karras et al. 2022, equation 57), and this gives the exact score. It knows only these pictures. They are a
    parameter without gradient, so a strategy shards them like any other parameter.
    """

    def __init__(self, pictures: Tensor) -> None:
        super().__init__()
        self.pictures = nn.Parameter(pictures, requires_grad=False)

    def forward(self, noisy: Tensor, sigma: Tensor) -> Tensor:
        # Outside autocast, because the logits are large and differ by little.
        with torch.autocast(noisy.device.type, enabled=False):
            known = self.pictures.flatten(1)
            # -|x - y|^2 / (2 sigma^2) for all pictures y, without the part that is the same for all of them.
            near = noisy.to(known.dtype).flatten(1) @ known.T - known.square().sum(1) / 2
            likely = (near / sigma.to(known.dtype).square()[:, None]).softmax(1)
            return (likely @ known).view_as(noisy)


class _Block(nn.Module):
    """Norm, SiLU and 3x3, twice. In between, the size of the noise scales and shifts. The second 3x3 starts at zero."""

    def __init__(self, inside: int, outside: int, embedding: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([group_norm(inside, GROUPS), group_norm(outside, GROUPS)])
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.affine = nn.Linear(embedding, 2 * outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.shortcut = nn.Conv2d(inside, outside, 1, bias=False) if inside != outside else nn.Identity()
        for parameter in self.second.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        scale, shift = self.affine(F.silu(embedded))[:, :, None, None].chunk(2, 1)
        y = self.first(F.silu(self.norms[0](x)))
        y = self.second(F.silu(self.norms[1](y) * (1 + scale) + shift))
        return self.shortcut(x) + y


def _by_row(numbers: Tensor) -> Tensor:
    return numbers[:, None, None, None]

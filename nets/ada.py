"""Adaptive discriminator augmentation (ADA) of Karras et al. 2020, "Training GANs with limited data"."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import noise

SHIFT = 0.125  # of a side, at most
BRIGHTNESS, CONTRAST, SATURATION = 0.2, 0.5, 1.0  # standard deviations; the last two of a power of two


class Ada(nn.Module):
    """Changes each picture at random, in each of six ways with probability `p`, before a discriminator sees it.

    Both real pictures and fakes are changed, so the discriminator cannot tell them apart by that. No change is certain,
    so fakes do not learn it: see section 2.2 of the paper. The changes are those of its appendix B that suit small
    square pictures: mirroring, quarter turns, shifts of whole pixels, brightness, contrast and saturation. They can be
    differentiated twice.

    `p` is adjusted by `adjust`, so that the discriminator is right about a fixed share of the real pictures. It is a
    buffer, so checkpoints have it.
    """

    p: Tensor

    def __init__(self, target: float = 0.6, images: int = 500_000) -> None:
        """`target` is for the mean sign of the scores of real pictures. `images`: after so many, p can be 1."""
        super().__init__()
        self.target, self.images = target, images
        self.register_buffer("p", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Pictures in [-1, 1], each changed by draws of its own."""
        coins = (noise.rand((len(x), 6), like=x) < self.p).unbind(1)
        drawn = noise.rand((len(x), 4), like=x).unbind(1)
        colours = noise.randn((len(x), 3), like=x)[:, :, None, None, None].unbind(1)
        mirrored, quarters = coins[0] & (drawn[0] < 0.5), torch.where(coins[1], (4 * drawn[1]).long(), 0)
        shifts = (torch.where(coins[2], 2 * SHIFT * each - SHIFT, 0) for each in drawn[2:])
        x = moved(x, quarters, mirrored, *shifts)
        brightness, contrast, saturation = (
            torch.where(coin[:, None, None, None], colour, 0) for coin, colour in zip(coins[3:], colours, strict=True)
        )
        x = (x + BRIGHTNESS * brightness) * 2 ** (CONTRAST * contrast)
        grey = x.mean(1, keepdim=True)
        return grey + (x - grey) * 2 ** (SATURATION * saturation)

    @torch.no_grad()
    def adjust(self, positive: Tensor, count: Tensor) -> None:
        """Move p up if too many scores of real pictures are positive, else down: `positive` of `count`."""
        # Section 3.1: the mean sign r_t, and a step that is as large as the number of pictures.
        direction = torch.where(2 * positive - count > self.target * count, 1, -1)
        self.p.add_(direction * count / self.images).clamp_(0, 1)


def moved(x: Tensor, quarters: Tensor, mirrored: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Square pictures after quarter turns, mirroring, and shifts by parts of a side; reflected at the border."""
    x = torch.where((quarters % 2 == 1)[:, None, None, None], x.mT, x)
    rows = _picked(x.shape[-1], (quarters == 1) | (quarters == 2), down).to(x.dtype)
    columns = _picked(x.shape[-1], (quarters >= 2) ^ mirrored, right).to(x.dtype)
    # Products with zeros and ones move pixels exactly, and their gradients have one order of sums on every device.
    return rows[:, None] @ x @ columns[:, None].mT


def _picked(side: int, turned: Tensor, shift: Tensor) -> Tensor:
    """For each picture a matrix that picks its rows, in turned order and shifted."""
    last, place = side - 1, torch.arange(side, device=turned.device)
    place = torch.where(turned[:, None], last - place, place) - (shift * side).round().long()[:, None]
    return F.one_hot(last - (last - place.abs()).abs(), side)

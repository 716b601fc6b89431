"""VQGAN's autoencoder: a picture becomes a small map of code numbers, and the codes' vectors become the picture."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import noise, ranks
from nets.blocks import Residual, group_norm

DEAD = 1.0  # a code that fewer features of a batch choose, on average, is replaced
APART = 0.01  # how far two new codes from the same feature are apart, as a share of the spread of features
SMALLEST = 1e-12
GROUPS = 32  # of a norm, at most


class Codebook(nn.Module):
    """Replaces each feature vector by the nearest of `size` codes of length `width`, which follow the features.

    A code is the moving average of the features that chose it: their sum divided by their number (van den Oord et al.
    2017, appendix A.1). So it learns without gradients, in each forward in training mode. It must learn the same on
    all ranks. So sums and numbers are those of the global batch.

    A code that almost no feature chooses would never move again. It is replaced by a feature of the batch (Dhariwal et
    al. 2020, Jukebox, section 3.1), moved a little: between two equal codes rounding would choose, and rounding is not
    the same at every number of ranks. A new codebook has only dead codes. So it begins with features of the first
    batches, and needs no other start.
    """

    counts: Tensor
    sums: Tensor

    def __init__(self, size: int, width: int, decay: float = 0.99) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("counts", torch.zeros(size))
        self.register_buffer("sums", torch.zeros(size, width))

    @property
    def codes(self) -> Tensor:
        return self.sums / self.counts.clamp_min(SMALLEST)[:, None]

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """For features [B, D, h, w]: their codes, [B, D, h, w], and the codes' numbers, [B, h, w]."""
        # Outside autocast, because sums of many features need all digits.
        with torch.autocast(features.device.type, enabled=False):
            rows, codes = features.detach().movedim(1, -1).to(self.sums.dtype), self.codes
            # The square of a distance, without the part that is the same for all codes.
            numbers = (codes.square().sum(1) - 2 * rows @ codes.T).argmin(-1)
            if self.training:
                self.follow(rows, numbers)
            return codes[numbers].movedim(-1, 1).to(features.dtype), numbers

    @torch.no_grad()
    def follow(self, rows: Tensor, numbers: Tensor) -> None:
        """Move the codes towards the features [B, h, w, D] that chose them, and replace dead ones."""
        chose = F.one_hot(numbers.flatten(), len(self.counts)).to(rows)
        found = ranks.sum(torch.cat([chose.T @ rows.flatten(0, -2), chose.sum(0)[:, None]], 1))
        self.sums.lerp_(found[:, :-1], 1 - self.decay)
        self.counts.lerp_(found[:, -1], 1 - self.decay)

        # Each sample offers one of its features. The dead codes take them in turn, the same on all ranks.
        places = noise.randint(0, numbers[0].numel(), (len(rows),), like=rows)
        offered = ranks.gather(rows.flatten(1, -2)[torch.arange(len(rows), device=rows.device), places])
        turns = torch.arange(len(self.counts), device=rows.device) % len(offered)
        moved = APART * offered.std(0, correction=0) * noise.randn(self.sums.shape, like=rows, common=True)
        dead = self.counts < DEAD
        self.sums.copy_(torch.where(dead[:, None], offered[turns] + moved, self.sums))
        self.counts.masked_fill_(dead, DEAD)


class VqAutoencoder(nn.Module):
    """The autoencoder of Esser et al. 2021 (VQGAN), without attention: residual blocks, and a codebook in the middle.

    `widths` are the channels at each size, from the full one down; each size is half of the one before. The smallest
    is the size of the map of codes. `code` is the length of a code, `codes` is their number.
    """

    def __init__(self, widths: Sequence[int] = (32, 64, 64), code: int = 16, codes: int = 128) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1)]
        for number, (before, after) in enumerate(pairwise((widths[0], *widths))):
            halved = [nn.Conv2d(before, before, 3, stride=2, padding=1)] if number else []
            stages += [*halved, _block(before, after)]
        self.encoder = nn.Sequential(
            *stages, group_norm(widths[-1], GROUPS), nn.SiLU(), nn.Conv2d(widths[-1], code, 3, padding=1)
        )
        self.codebook = Codebook(codes, code)
        stages = [nn.Conv2d(code, widths[-1], 3, padding=1)]
        up = list(reversed(widths))
        for number, (before, after) in enumerate(pairwise((up[0], *up))):
            doubled = [nn.Upsample(scale_factor=2), nn.Conv2d(before, before, 3, padding=1)] if number else []
            stages += [*doubled, _block(before, after)]
        self.decoder = nn.Sequential(*stages, group_norm(widths[0], GROUPS), nn.SiLU())
        self.paint = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The picture painted again, the features, and the codes that took their place."""
        features = self.encoder(image)
        codes, _ = self.codebook(features)
        # The codes go forward; the gradient passes them by and goes to the features (Bengio et al. 2013).
        return self.decode(features + (codes - features).detach()), features, codes

    def decode(self, codes: Tensor) -> Tensor:
        return self.paint(self.decoder(codes))

    def numbers(self, image: Tensor) -> Tensor:
        """The numbers of a picture's codes, [B, h, w]."""
        return self.codebook(self.encoder(image))[1]


def _block(inside: int, outside: int) -> Residual:
    """Norm, SiLU and 3x3, twice (Ho et al. 2020, without time)."""
    layers = nn.Sequential(
        group_norm(inside, GROUPS),
        nn.SiLU(),
        nn.Conv2d(inside, outside, 3, padding=1, bias=False),
        group_norm(outside, GROUPS),
        nn.SiLU(),
        nn.Conv2d(outside, outside, 3, padding=1),
    )
    return Residual(layers, shortcut=nn.Conv2d(inside, outside, 1, bias=False) if inside != outside else nn.Identity())

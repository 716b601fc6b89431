"""VQGAN's autoencoder: a picture becomes a small map of code numbers, and the codes' vectors become the picture.

The names of modules and parameters are the published ones, so a published state dict fits.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import noise, ranks
from nets.blocks import NormedConv2d

DEAD = 1.0  # a code that fewer features of a batch choose, on average, is replaced
APART = 0.01  # how far two new codes from the same feature are apart, as a share of the spread of features
SMALLEST = 1e-12
Learning = Literal["learned", "fixed", "ema"]


class Codebook(nn.Module):
    """Replaces each feature vector by the nearest of `size` codes of length `width`.

    The codes learn by their gradient ("learned"), in a loss that pulls codes and features together. The published one
    gives its `weight` to the codes' half by mistake; "fixed" gives it to the features' half, as the paper has it.

    Or they follow the features ("ema"): a code is the moving average of the features that chose it, their sum divided
    by their number (van den Oord et al. 2017, appendix A.1). So it learns without gradients, in each forward in
    training mode. It must learn the same on all ranks. So sums and numbers are those of the global batch.

    A code that almost no feature chooses would never move again. If codes follow, such a code is replaced by a feature
    of the batch (Dhariwal et al. 2020, Jukebox, section 3.1), moved a little: between two equal codes rounding would
    choose, and rounding is not the same at every number of ranks. A new codebook of this kind has only dead codes. So
    it begins with features of the first batches, and needs no other start.
    """

    counts: Tensor
    sums: Tensor

    def __init__(
        self, size: int, width: int, learning: Learning = "ema", weight: float = 0.25, decay: float = 0.99
    ) -> None:
        super().__init__()
        self.size, self.learning, self.weight, self.decay = size, learning, weight, decay
        if learning == "ema":
            self.register_buffer("counts", torch.zeros(size))
            self.register_buffer("sums", torch.zeros(size, width))
        else:
            self.embedding = nn.Embedding(size, width)
            nn.init.uniform_(self.embedding.weight, -1 / size, 1 / size)

    @property
    def codes(self) -> Tensor:
        if self.learning != "ema":
            return self.embedding.weight
        return self.sums / self.counts.clamp_min(SMALLEST)[:, None]

    def published_state(self) -> dict[str, Tensor]:
        """See [Note: published names]."""
        return {"embedding.weight": self.codes}

    @torch.no_grad()
    def take_published(self, state: dict[str, Tensor]) -> None:
        """Begin with these codes. Where they follow, each counts as much as a hundred features that chose it."""
        codes = state["embedding.weight"]
        if self.learning != "ema":
            self.embedding.weight.copy_(codes)
        else:
            self.counts.fill_(100 * DEAD)
            self.sums.copy_(codes * self.counts[:, None])

    def forward(self, features: Tensor, follow: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """For features [B, D, h, w]: their codes, [B, D, h, w], the loss, and the codes' numbers, [B, h, w].

        The gradient passes the codes by and goes to the features (Bengio et al. 2013). Without `follow` nothing learns.
        """
        # Outside autocast, because sums of many features need all digits.
        with torch.autocast(features.device.type, enabled=False):
            codes = self.codes
            rows = features.movedim(1, -1).to(codes.dtype)
            with torch.no_grad():
                # The square of a distance, without the part that is the same for all codes.
                numbers = (codes.square().sum(1) - 2 * rows @ codes.T).argmin(-1)
                if self.learning == "ema" and self.training and follow:
                    self.follow(rows, numbers)
            chosen = F.embedding(numbers, codes)
            # Esser et al. 2021, equation 4: features to codes, and codes to features.
            to_codes, to_features = F.mse_loss(rows, chosen.detach()), F.mse_loss(chosen, rows.detach())
            weights = {"learned": (1.0, self.weight), "fixed": (self.weight, 1.0), "ema": (self.weight, 0.0)}
            loss = weights[self.learning][0] * to_codes + weights[self.learning][1] * to_features
            given = (rows + (chosen - rows).detach()).movedim(-1, 1)
            return given.to(features.dtype), loss, numbers

    @torch.no_grad()
    def follow(self, rows: Tensor, numbers: Tensor) -> None:
        """Move the codes towards the features [B, h, w, D] that chose them, and replace dead ones."""
        chose = F.one_hot(numbers.flatten(), self.size).to(rows)
        found = ranks.sum(torch.cat([chose.T @ rows.flatten(0, -2), chose.sum(0)[:, None]], 1))
        self.sums.lerp_(found[:, :-1], 1 - self.decay)
        self.counts.lerp_(found[:, -1], 1 - self.decay)

        # Each sample offers one of its features. The dead codes take them in turn, the same on all ranks.
        places = noise.randint(0, numbers[0].numel(), (len(rows),), like=rows)
        offered = ranks.gather(rows.flatten(1, -2)[torch.arange(len(rows), device=rows.device), places])
        turns = torch.arange(self.size, device=rows.device) % len(offered)
        moved = APART * offered.std(0, correction=0) * noise.randn(self.sums.shape, like=rows, common=True)
        dead = self.counts < DEAD
        self.sums.copy_(torch.where(dead[:, None], offered[turns] + moved, self.sums))
        self.counts.masked_fill_(dead, DEAD)


class VqAutoencoder(nn.Module):
    """The autoencoder of Esser et al. 2021 (VQGAN): residual blocks, attention, and a codebook in the middle.

    The level number i has `width * mult[i]` channels, `blocks` residual blocks, and attention if `attention` has i.
    Each level has half the size of the one before. The last has the size of the map of codes, and `features` channels
    before a convolution to the length of a `code`. The published networks have 32 `groups` in a norm.
    """

    def __init__(
        self,
        channels: int = 3,
        width: int = 128,
        mult: Sequence[int] = (1, 1, 2, 2, 4),
        blocks: int = 2,
        attention: Collection[int] = (4,),
        features: int = 256,
        code: int = 256,
        codes: int = 1024,
        *,
        groups: int = 32,
        learning: Learning = "learned",
    ) -> None:
        super().__init__()
        widths = [width * each for each in mult]
        self.channels, self.halvings = channels, len(mult) - 1
        self.encoder = Encoder(channels, widths, blocks, attention, features, groups)
        self.decoder = Decoder(channels, widths, blocks, attention, features, groups)
        self.quantize = Codebook(codes, code, learning)
        self.quant_conv = nn.Conv2d(features, code, 1)
        self.post_quant_conv = nn.Conv2d(code, features, 1)

    def forward(self, image: Tensor, follow: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """The picture painted again, the codebook's loss, and the numbers of the codes [B, h, w].

        A picture of a size that cannot be halved is longer on the right and below, for the codes.
        """
        codes, loss, numbers = self.quantize(self.encode(image), follow)
        return self.decode(codes)[..., : image.shape[2], : image.shape[3]], loss, numbers

    def encode(self, image: Tensor) -> Tensor:
        """The features [B, D, h, w] of a picture, before they are replaced by codes."""
        missing = [-side % 2**self.halvings for side in image.shape[:1:-1]]
        if any(missing):
            image = F.pad(image, (0, missing[0], 0, missing[1]), "replicate")
        return self.quant_conv(self.encoder(image))

    def decode(self, codes: Tensor) -> Tensor:
        """The picture of codes [B, D, h, w]."""
        return self.decoder(self.post_quant_conv(codes))

    def numbers(self, image: Tensor) -> Tensor:
        """The numbers of a picture's codes, [B, h, w]."""
        return self.quantize(self.encode(image), follow=False)[2]

    def draw(self, numbers: Tensor) -> Tensor:
        """The picture of the numbers of codes [B, h, w]."""
        return self.decode(F.embedding(numbers, self.quantize.codes).movedim(-1, 1))


class Encoder(nn.Module):
    def __init__(
        self, inside: int, widths: list[int], blocks: int, attention: Collection[int], outside: int, groups: int
    ) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(inside, widths[0], 3, padding=1)
        self.down = nn.ModuleList()
        for number, (before, after) in enumerate(pairwise((widths[0], *widths))):
            level = Level(before, after, blocks, number in attention, groups)
            if number < len(widths) - 1:
                level.downsample = Resize(after, doubles=False)
            self.down.append(level)
        self.mid = middle(widths[-1], groups)
        self.norm_out = _norm(widths[-1], groups)
        self.conv_out = nn.Conv2d(widths[-1], outside, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """From features to a picture. `up` has the levels of the encoder, the finest first."""

    def __init__(
        self, outside: int, widths: list[int], blocks: int, attention: Collection[int], inside: int, groups: int
    ) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(inside, widths[-1], 3, padding=1)
        self.mid = middle(widths[-1], groups)
        self.up = nn.ModuleList()
        for number, (after, before) in enumerate(pairwise((*widths, widths[-1]))):
            level = Level(before, after, blocks + 1, number in attention, groups)
            if number > 0:
                level.upsample = Resize(after, doubles=True)
            self.up.append(level)
        self.norm_out = _norm(widths[0], groups)
        self.conv_out = nn.Conv2d(widths[0], outside, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.conv_in(x))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Level(nn.Module):
    """The blocks of one size, and what changes the size after them."""

    def __init__(self, inside: int, outside: int, blocks: int, attention: bool, groups: int) -> None:
        super().__init__()
        self.downsample: nn.Module | None = None
        self.upsample: nn.Module | None = None
        self.block = nn.ModuleList(
            ResidualBlock(before, outside, groups) for before in (inside, *[outside] * (blocks - 1))
        )
        self.attn = nn.ModuleList(Attention(outside, groups) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[number](x)
        resize = self.downsample or self.upsample
        return x if resize is None else resize(x)


def middle(channels: int, groups: int) -> nn.Sequential:
    """The blocks of the smallest size."""
    first, attention = ResidualBlock(channels, channels, groups), Attention(channels, groups)
    last = ResidualBlock(channels, channels, groups)
    return nn.Sequential(OrderedDict[str, nn.Module](block_1=first, attn_1=attention, block_2=last))


class ResidualBlock(nn.Module):
    """Norm, SiLU and 3x3, twice (Ho et al. 2020, without time)."""

    def __init__(self, inside: int, outside: int, groups: int) -> None:
        super().__init__()
        self.norm1 = _norm(inside, groups)
        # A group of one channel cancels the bias before it.
        kind = NormedConv2d if groups == outside else nn.Conv2d
        self.conv1 = kind(inside, outside, 3, padding=1)
        self.norm2 = _norm(outside, groups)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        if inside != outside:
            self.nin_shortcut = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        made = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x) + made


class Attention(nn.Module):
    """Each place looks at all places."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = _norm(channels, groups)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = NormedConv2d(channels, channels, 1)  # the softmax cancels its bias
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        q, k, v = (layer(seen).flatten(2).transpose(1, 2)[:, None] for layer in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v)[:, 0]  # one head, which ONNX wants to be a dimension
        return x + self.proj_out(found.transpose(1, 2).unflatten(2, x.shape[2:]))


class Resize(nn.Module):
    """Doubles a picture, or halves it; then the zeros around it are on the right and below only."""

    def __init__(self, channels: int, doubles: bool) -> None:
        super().__init__()
        self.doubles = doubles
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if doubles else nn.Conv2d(channels, channels, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0) if self.doubles else F.pad(x, (0, 1, 0, 1)))


def _norm(channels: int, groups: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups, channels, eps=1e-6)

"""BigGAN's networks (Brock et al. 2019), as in the authors' PyTorch code: with their names of modules and parameters.

So a published state dict fits. Labels are vectors [B, classes], which may also lie between classes.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan.files.errors import UserError
from nets.blocks import laid_out, middle, without_gradient
from nets.norm import batch_norm
from nets.spectral import Normalised, full_precision

# By the pixels of a side: channels from 4x4 up as multiples of `width`, and those of the discriminator's blocks.
GENERATOR = {32: (4, 4, 4, 4), 64: (16, 16, 8, 4, 2), 128: (16, 16, 8, 4, 2, 1), 256: (16, 16, 8, 8, 4, 2, 1)}
DISCRIMINATOR = {32: (4, 4, 4, 4), 64: (1, 2, 4, 8, 16), 128: (1, 2, 4, 8, 16, 16), 256: (1, 2, 4, 8, 8, 16, 16)}
Start = Literal["ortho", "normal"]


class Spectral(nn.Module):
    """A layer whose weight is divided by its largest singular value, in the published way.

    Each forward makes one power iteration, in evaluation too. In training its vector is kept (`u0`), and `sv0` is the
    singular value, for logs. nets.spectral.SpectralNorm is torch's way: in evaluation it does not iterate.
    """

    weight: Tensor
    u0: Tensor
    sv0: Tensor

    def __init__(self, *sizes: int, **settings: int | bool) -> None:
        super().__init__(*sizes, **settings)
        self.register_buffer("u0", torch.randn(1, len(self.weight)))
        self.register_buffer("sv0", torch.ones(1))

    def normalised(self) -> Tensor:
        with full_precision(self.weight.device.type):
            weight = self.weight.to(self.u0.dtype)  # the option bf16 gathers it in half precision
            with torch.no_grad():
                matrix = weight.flatten(1)
                v = F.normalize(torch.mv(matrix.t(), self.u0[0]), dim=0, eps=1e-8)
                product = torch.mv(matrix, v)
                u = F.normalize(product, dim=0, eps=1e-8)
                if self.training:
                    self.u0.copy_(u[None])
                    self.sv0.copy_(torch.dot(u, product)[None])
            return Normalised.apply(weight, u, v)


class SpectralConv(Spectral, nn.Conv2d):
    normed = False  # whether a later batch norm cancels the bias: see [Note: biases that a norm cancels]

    def forward(self, x: Tensor) -> Tensor:
        bias = without_gradient(self.bias) if self.normed and self.training else self.bias
        return self._conv_forward(x, self.normalised(), bias)


class SpectralLinear(Spectral, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.normalised(), self.bias)


class Table(nn.Module):
    """A vector for each class."""

    weight: Tensor

    def __init__(self, classes: int, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, length))

    def forward(self, label: Tensor) -> Tensor:
        return label @ self.weight


class SpectralTable(Spectral, Table):
    def forward(self, label: Tensor) -> Tensor:
        return label @ self.normalised()


class Norm(nn.Module):
    """Batch norm with the statistics of the global batch, before any scale."""

    stored_mean: Tensor
    stored_var: Tensor
    momentum = 0.1

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("stored_mean", torch.zeros(channels))
        self.register_buffer("stored_var", torch.ones(channels))

    def normal(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        return batch_norm(x, self.stored_mean, self.stored_var, scale, shift, self.training, self.momentum)


class PlainNorm(Norm):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.gain = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.normal(x, self.gain, self.bias)


class ConditionalNorm(Norm):
    """Scale and shift come from y: a label [B, classes] (`shared` false), or the shared vector of a class and noise."""

    def __init__(self, channels: int, length: int, shared: bool) -> None:
        super().__init__(channels)
        kinds = [SpectralLinear(length, channels, bias=False) if shared else Table(length, channels) for _ in range(2)]
        self.gain, self.bias = kinds

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gain, bias = (each(y)[:, :, None, None] for each in (self.gain, self.bias))
        return torch.addcmul(bias, self.normal(x), 1 + gain)


class Attention(nn.Module):
    """Each pixel looks at all pixels of half the resolution (Zhang et al. 2019). It starts as the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.theta = SpectralConv(channels, max(1, channels // 8), 1, bias=False)
        self.phi = SpectralConv(channels, max(1, channels // 8), 1, bias=False)
        self.g = SpectralConv(channels, channels // 2, 1, bias=False)
        self.o = SpectralConv(channels // 2, channels, 1, bias=False)
        self.gamma = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        theta = self.theta(x).flatten(2)
        phi, g = (F.max_pool2d(each(x), 2).flatten(2) for each in (self.phi, self.g))
        weights = F.softmax(torch.bmm(theta.transpose(1, 2), phi), -1)
        seen = torch.bmm(g, weights.transpose(1, 2)).unflatten(2, x.shape[2:])
        return self.gamma * self.o(seen) + x


class Up(nn.Module):
    """A residual block that doubles the resolution."""

    def __init__(self, before: int, after: int, length: int, shared: bool) -> None:
        super().__init__()
        self.conv1 = SpectralConv(before, after, 3, padding=1)
        self.conv2 = SpectralConv(after, after, 3, padding=1)
        self.conv_sc = SpectralConv(before, after, 1)
        self.conv1.normed = True
        self.bn1 = ConditionalNorm(before, length, shared)
        self.bn2 = ConditionalNorm(after, length, shared)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.conv1(F.interpolate(F.relu(self.bn1(x, y)), scale_factor=2))
        h = self.conv2(F.relu(self.bn2(h, y)))
        # The published code doubles first; a 1x1 convolution gives the same before, in a quarter of the time.
        return h + F.interpolate(self.conv_sc(x), scale_factor=2)


class Down(nn.Module):
    """A residual block, which halves the resolution if `halve`. The network's first one has no ReLU before it."""

    def __init__(self, before: int, after: int, halve: bool, first: bool) -> None:
        super().__init__()
        self.halve, self.first = halve, first
        self.conv1 = SpectralConv(before, after, 3, padding=1)
        self.conv2 = SpectralConv(after, after, 3, padding=1)
        if halve or before != after:
            self.conv_sc = SpectralConv(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.relu(self.conv1(x if self.first else F.relu(x))))
        if self.halve:
            h, x = F.avg_pool2d(h, 2), F.avg_pool2d(x, 2)  # as in Up: before the shortcut's convolution, not after it
        return h + (self.conv_sc(x) if hasattr(self, "conv_sc") else x)


class BigGenerator(nn.Module):
    """A picture from noise [B, latent] and a label [B, classes].

    `shared`: the length of a vector of each class that all layers share, or 0 where each layer has a table of its own.
    `hierarchical`: each block gets a chunk of the noise, so `latent` is rounded down to a multiple of the chunks.
    `attention`: at these resolutions. Without `classes` all pictures are of one class. Of a `size` that is no power of
    two, the picture is the middle of the square drawn.
    """

    def __init__(
        self,
        size: tuple[int, int] = (32, 32),
        width: int = 64,
        latent: int = 128,
        classes: int = 0,
        shared: int = 0,
        hierarchical: bool = False,
        attention: Sequence[int] = (),
        channels: int = 3,
        start: Start = "ortho",
    ) -> None:
        super().__init__()
        if hierarchical and not shared:
            raise UserError("hierarchical noise needs a shared embedding of the classes; type --shared 128 too")
        self.size, self.side, self.channels, self.classes = size, side_of(size), channels, classes
        widths = [width * each for each in GENERATOR[self.side]]
        chunks = len(widths) if hierarchical else 1
        self.chunk, self.latent = latent // chunks, latent // chunks * chunks
        self.shared = Table(max(1, classes), shared) if shared else nn.Identity()
        self.linear = SpectralLinear(self.chunk, widths[0] * 16)
        length = shared + (self.chunk if hierarchical else 0) if shared else max(1, classes)
        self.blocks = nn.ModuleList()
        for number, (before, after) in enumerate(pairwise(widths)):
            attends = [Attention(after)] if 8 << number in attention else []
            self.blocks.append(nn.ModuleList([Up(before, after, length, bool(shared)), *attends]))
        for block, *attends in reversed(_stages(self.blocks)):
            if attends:  # which see a bias: there is no norm before them
                break
            block.conv2.normed = block.conv_sc.normed = True
        last = SpectralConv(widths[-1], channels, 3, padding=1)
        self.output_layer = nn.Sequential(PlainNorm(widths[-1]), nn.ReLU(), last)
        _begin(self, start)

    def forward(self, z: Tensor, label: Tensor | None = None) -> Tensor:
        first, *others = z.split(self.chunk, 1)
        y = self.shared(_label(z, label))
        ys = [torch.cat([y, each], 1) for each in others] or [y] * len(self.blocks)
        h = self.linear(first).unflatten(1, (-1, 4, 4))
        for (block, *attends), y in zip(_stages(self.blocks), ys, strict=True):
            h = block(laid_out(h, block.conv1), y)
            for attention in attends:
                h = attention(h)
        image = torch.tanh(self.output_layer(h))
        return middle(image, *self.size)


class BigDiscriminator(nn.Module):
    """A score [B] for each picture, with its label [B, classes]. The settings are those of the generator."""

    def __init__(
        self,
        size: tuple[int, int] = (32, 32),
        width: int = 64,
        classes: int = 0,
        attention: Sequence[int] = (),
        channels: int = 3,
        start: Start = "ortho",
    ) -> None:
        super().__init__()
        self.side = side_of(size)
        widths = [channels, *(width * each for each in DISCRIMINATOR[self.side])]
        halvings = 2 if self.side == 32 else len(widths) - 2
        self.blocks = nn.ModuleList()
        for number, (before, after) in enumerate(pairwise(widths)):
            resolution = self.side >> min(number + 1, halvings)
            # In the published table every block of the 32 pixels is listed as 16.
            attends = [Attention(after)] if (16 if self.side == 32 else resolution) in attention else []
            self.blocks.append(nn.ModuleList([Down(before, after, number < halvings, not number), *attends]))
        self.linear = SpectralLinear(widths[-1], 1)
        self.embed = SpectralTable(max(1, classes), widths[-1])
        _begin(self, start)

    def forward(self, image: Tensor, label: Tensor | None = None) -> Tensor:
        h = middle(image, self.side, self.side)
        for block, *attends in _stages(self.blocks):
            h = block(laid_out(h, block.conv1))
            for attention in attends:
                h = attention(h)
        h = F.relu(h).sum((2, 3))
        return self.linear(h)[:, 0] + (self.embed(_label(image, label)) * h).sum(1)


def side_of(size: tuple[int, int]) -> int:
    """The side of the networks' square in which pictures of that size fit."""
    for side in GENERATOR:
        if max(size) <= side:
            return side
    raise UserError(f"BigGAN draws up to 256 pixels, and pictures have {max(size)}; type --size 256")


def _stages(blocks: nn.ModuleList) -> list[list[Any]]:
    """The layers of each block: a residual one, and perhaps attention."""
    return [list(each.children()) for each in blocks]


def _label(like: Tensor, label: Tensor | None) -> Tensor:
    return like.new_ones(like.shape[0], 1) if label is None else label


def _begin(net: nn.Module, start: Start) -> None:
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | Table):
            if start == "ortho":
                nn.init.orthogonal_(module.weight)
            else:
                nn.init.normal_(module.weight, std=0.02)

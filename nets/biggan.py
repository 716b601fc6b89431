"""BigGAN's networks, Brock, Donahue and Simonyan 2019, for 32 to 256 pixels.

The names of modules, parameters and buffers are the published ones, so a published state dict fits. Labels are vectors
[B, classes], with a one at the class.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan.files.errors import UserError
from nets.norm import batch_norm
from nets.spectral import divided, full_precision

# What the channels of the sizes are times `width`: the generator's from 4x4 up, and the discriminator's blocks.
UP = {
    32: (4, 4, 4, 4),
    64: (16, 16, 8, 4, 2),
    128: (16, 16, 8, 4, 2, 1),
    256: (16, 16, 8, 8, 4, 2, 1),
}
DOWN = {
    32: (4, 4, 4, 4),
    64: (1, 2, 4, 8, 16),
    128: (1, 2, 4, 8, 16, 16),
    256: (1, 2, 4, 8, 8, 16, 16),
}
FIRST = 4  # pixels of a side of the generator's first map


class Spectral(nn.Module):
    """A layer whose weight is divided by its largest singular value, by BigGAN's own estimate.

    Every forward makes one power iteration. A forward in evaluation does so too, and forgets it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    u0: Tensor
    sv0: Tensor
    eps = 1e-8

    def estimate(self, outside: int) -> None:
        self.register_buffer("u0", torch.randn(1, outside))
        self.register_buffer("sv0", torch.ones(1))

    def normalised(self) -> Tensor:
        """The weight to use in this forward."""
        with torch.no_grad(), full_precision(self.weight.device.type):
            matrix = self.weight.flatten(1)
            v = F.normalize(self.u0 @ matrix, eps=self.eps)
            u = F.normalize(v @ matrix.T, eps=self.eps)
            if self.training:
                self.u0.copy_(u)
                self.sv0.copy_((v @ matrix.T @ u.T).flatten())
        with full_precision(self.weight.device.type):
            return divided(self.weight, u[0], v[0])


class SpectralConv(Spectral):
    def __init__(self, inside: int, outside: int, kernel: int = 3, bias: bool = True) -> None:
        super().__init__()
        layer = nn.Conv2d(inside, outside, kernel, bias=bias)
        self.weight, self.bias, self.padding = layer.weight, layer.bias, kernel // 2
        self.estimate(outside)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.normalised(), self.bias, padding=self.padding)


class SpectralLinear(Spectral):
    def __init__(self, inside: int, outside: int, bias: bool = True) -> None:
        super().__init__()
        layer = nn.Linear(inside, outside, bias)
        self.weight, self.bias = layer.weight, layer.bias
        self.estimate(outside)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.normalised(), self.bias)


class Embedding(nn.Module):
    """A vector for each class."""

    def __init__(self, classes: int, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, length))

    def forward(self, labels: Tensor) -> Tensor:
        return labels @ self.weight


class SpectralEmbedding(Spectral):
    def __init__(self, classes: int, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, length))
        self.estimate(classes)

    def forward(self, labels: Tensor) -> Tensor:
        return labels @ self.normalised()


class Norm(nn.Module):
    """A batch norm over all ranks, whose running statistics have their published names."""

    stored_mean: Tensor
    stored_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("stored_mean", torch.zeros(channels))
        self.register_buffer("stored_var", torch.ones(channels))

    def normed(self, x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return batch_norm(x, self.stored_mean, self.stored_var, gain, bias, self.training, 0.1, 1e-5)


class ConditionalNorm(Norm):
    """A batch norm whose gain and bias follow from `length` numbers, or are a class's own."""

    def __init__(self, channels: int, length: int, own: bool) -> None:
        super().__init__(channels)
        if own:
            self.gain, self.bias = Embedding(length, channels), Embedding(length, channels)
            nn.init.zeros_(self.bias.weight)
        else:
            self.gain, self.bias = (SpectralLinear(length, channels, bias=False) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.addcmul(self.bias(y)[..., None, None], self.normed(x), 1 + self.gain(y)[..., None, None])


class LastNorm(Norm):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.gain, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x, self.gain, self.bias)


class Attention(nn.Module):
    """Each pixel sees all pixels of a map of half the size (Zhang et al. 2019)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = channels // 8, channels // 8, channels // 2
        self.theta, self.phi, self.g = (SpectralConv(channels, each, 1, bias=False) for each in inner)
        self.o = SpectralConv(channels // 2, channels, 1, bias=False)
        self.gamma = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        asked = self.theta(x).flatten(2)
        known, found = (F.max_pool2d(layer(x), 2).flatten(2) for layer in (self.phi, self.g))
        shares = (asked.transpose(1, 2) @ known).softmax(2)
        return torch.addcmul(x, self.gamma, self.o((found @ shares.transpose(1, 2)).unflatten(2, x.shape[2:])))


class GrowingBlock(nn.Module):
    """A residual block of the generator, which doubles its map."""

    def __init__(self, inside: int, outside: int, length: int, own: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = SpectralConv(inside, outside), SpectralConv(outside, outside)
        self.conv_sc = SpectralConv(inside, outside, 1)
        self.bn1, self.bn2 = ConditionalNorm(inside, length, own), ConditionalNorm(outside, length, own)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        new = self.conv1(F.interpolate(self.bn1(x, y).relu(), scale_factor=2))
        new = self.conv2(self.bn2(new, y).relu())
        # The published code doubles first; a 1x1 convolution gives the same before, for a quarter of the work.
        return new + F.interpolate(self.conv_sc(x), scale_factor=2)


class ShrinkingBlock(nn.Module):
    """A residual block of the discriminator, which halves its map if `halves`. The `first` one reads a picture."""

    def __init__(self, inside: int, outside: int, halves: bool, first: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = SpectralConv(inside, outside), SpectralConv(outside, outside)
        self.conv_sc = SpectralConv(inside, outside, 1) if halves or inside != outside else nn.Identity()
        self.halves, self.first = halves, first

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(self.conv1(x if self.first else x.relu()).relu())
        if not self.halves:
            return new + self.conv_sc(x)
        # A mean and a 1x1 convolution may change places; this way round is less work.
        return F.avg_pool2d(new, 2) + self.conv_sc(F.avg_pool2d(x, 2))


class BigGanGenerator(nn.Module):
    """Pictures from noise and labels.

    Each block gets a part of the noise, if `hierarchical`, and an embedding of the label of length `shared`, or with 0
    the label itself. `attention` is the side of the map that has attention; 0 for none.
    """

    def __init__(
        self,
        size: int,
        width: int = 64,
        *,
        latent: int = 128,
        classes: int = 0,
        shared: int = 128,
        hierarchical: bool = True,
        attention: int = 64,
        channels: int = 3,
    ) -> None:
        super().__init__()
        _check(size)
        if not classes and not hierarchical:
            raise UserError("a BigGAN without classes has nothing that changes its norms; take --hierarchical true")
        widths = [width * times for times in UP[size]]
        self.classes, self.channels, self.size = classes, channels, (size, size)
        parts = len(widths) if hierarchical else 1
        self.part, self.hierarchical = latent // parts, hierarchical
        self.latent = self.part * parts
        self.shared = Embedding(classes, shared) if classes and shared else nn.Identity()
        length = (shared or classes if classes else 0) + (self.part if hierarchical else 0)
        own = not hierarchical and not shared
        self.linear = SpectralLinear(self.part, widths[0] * FIRST**2)
        self.blocks = nn.ModuleList()
        for number, pair in enumerate(pairwise(widths)):
            layers = nn.ModuleList([GrowingBlock(*pair, length, own)])
            if 2 * FIRST * 2**number == attention:
                layers.append(Attention(pair[1]))
            self.blocks.append(layers)
        self.output_layer = nn.Sequential(LastNorm(widths[-1]), nn.ReLU(), SpectralConv(widths[-1], channels))

    def forward(self, z: Tensor, labels: Tensor | None = None) -> Tensor:
        """Pictures from -1 to 1."""
        y = z.new_empty(len(z), 0) if labels is None else self.shared(labels)
        first, *others = z.split(self.part, 1)
        x = self.linear(first).view(len(z), -1, FIRST, FIRST)
        for number, (grow, *attend) in enumerate(self.blocks):
            x = grow(x, torch.cat([y, others[number]], 1) if self.hierarchical else y)
            for layer in attend:
                x = layer(x)
        return self.output_layer(x).tanh()


class BigGanDiscriminator(nn.Module):
    """Scores [B] of pictures, which count more if a picture fits its label."""

    def __init__(self, size: int, width: int = 64, *, classes: int = 0, attention: int = 64, channels: int = 3) -> None:
        super().__init__()
        _check(size)
        widths = [channels, *(width * times for times in DOWN[size])]
        halved = 2 if size == 32 else len(widths) - 2
        self.blocks = nn.ModuleList()
        for number, pair in enumerate(pairwise(widths)):
            layers: list[nn.Module] = [ShrinkingBlock(*pair, number < halved, number == 0)]
            # As published, all blocks of the network for 32 pixels count as maps of 16.
            side = 16 if size == 32 else size >> min(number + 1, halved)
            if side == attention:
                layers.append(Attention(pair[1]))
            self.blocks.append(nn.Sequential(*layers))
        self.linear = SpectralLinear(widths[-1], 1)
        self.embed = SpectralEmbedding(classes, widths[-1]) if classes else None

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = x.relu().sum((2, 3))
        score = self.linear(x)[:, 0]
        return score if self.embed is None or labels is None else score + (self.embed(labels) * x).sum(1)


def start_(network: nn.Module, orthogonal: bool) -> nn.Module:
    """The published first weights: orthogonal ones, or a spread of 0.02, which the settings for CIFAR have."""
    for layer in network.modules():
        if isinstance(layer, SpectralConv | SpectralLinear | SpectralEmbedding | Embedding):
            nn.init.orthogonal_(layer.weight) if orthogonal else nn.init.normal_(layer.weight, 0, 0.02)
    return network


def _check(size: int) -> None:
    if size not in UP:
        raise UserError(f"BigGAN's networks are for {', '.join(map(str, UP))} pixels, not for {size}; type --size 128")

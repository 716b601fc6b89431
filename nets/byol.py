"""BYOL's networks: an encoder with batch norms, and small perceptrons behind it."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import noise


class ResnetEncoder(nn.Module):
    """A representation for each picture: residual blocks with batch norm (He et al. 2016), and the mean over places.

    `widths` are the channels at each size, from half of the picture's down; each is half of the one before.
    """

    def __init__(self, widths: Sequence[int] = (32, 64, 128)) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0])]
        for number, (before, after) in enumerate(pairwise((widths[0], *widths))):
            stages.append(Block(before, after, stride=2 if number else 1))
        self.stages = nn.Sequential(*stages)

    def forward(self, image: Tensor) -> Tensor:
        return self.stages(image).relu().mean((2, 3))


class Block(nn.Module):
    """ReLU before two 3x3, batch norm behind each; beside a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, step in ((inside, stride), (outside, 1)):
            layers += [nn.ReLU(), nn.Conv2d(before, outside, 3, step, 1, bias=False), nn.BatchNorm2d(outside)]
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.layers(x)


class Online(nn.Module):
    """An encoder and a projector: what the target follows."""

    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projector = encoder, projector

    def forward(self, image: Tensor) -> Tensor:
        return self.projector(self.encoder(image))


def perceptron(inside: int, hidden: int, outside: int) -> nn.Sequential:
    """A projector or a predictor, Grill et al. 2020, section 3.3: linear, batch norm, ReLU, linear.

    Without any bias, because the projector's output, too, goes to a batch norm: the predictor's.
    """
    norm = nn.BatchNorm1d(hidden)
    return nn.Sequential(nn.Linear(inside, hidden, bias=False), norm, nn.ReLU(), nn.Linear(hidden, outside, bias=False))


# The random changes of Grill et al. 2020 (BYOL), table 6, after Chen et al. 2020 (SimCLR). Blur and solarisation are
# left out: small pictures have nothing to blur.
SMALLEST = 0.3  # the least share of the picture that a view shows; published: 0.08, for photographs
RATIO = 4 / 3
JITTER = 0.8  # the share of views whose colours change
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.4, 0.4, 0.2, 0.1
GREY = 0.2  # the share of views that are grey


def random_view(pictures: Tensor) -> Tensor:
    """A view of each picture [B, 3, H, W] in -1 to 1, of the same size."""
    return recoloured(cropped(pictures))


def cropped(pictures: Tensor) -> Tensor:
    """A random part of each picture, enlarged to its size; half of the parts are mirrored."""
    area, shape, right, down, mirror = noise.rand((len(pictures), 5), like=pictures).T
    area, ratio = torch.lerp(torch.tensor(SMALLEST).to(area), area.new_ones(()), area), RATIO ** (2 * shape - 1)
    width, height = (area * ratio).sqrt().clamp_max(1), (area / ratio).sqrt().clamp_max(1)
    sign, zero = torch.where(mirror < 0.5, -1.0, 1.0).to(width), torch.zeros_like(width)
    across = torch.stack([sign * width, zero, (1 - width) * (2 * right - 1)], 1)
    along = torch.stack([zero, height, (1 - height) * (2 * down - 1)], 1)
    grid = F.affine_grid(torch.stack([across, along], 1), list(pictures.shape), align_corners=False)
    return F.grid_sample(pictures, grid, padding_mode="border", align_corners=False)


def recoloured(pictures: Tensor) -> Tensor:
    """Each picture in other colours: brightness, contrast, saturation and hue; some are grey."""
    draws = noise.rand((len(pictures), 6), like=pictures)[:, :, None, None, None].unbind(1)
    brightness, contrast, saturation, hue = (2 * draw - 1 for draw in draws[:4])
    jitter = (draws[4] < JITTER).to(pictures)
    x = (pictures + 1) / 2 * (1 + jitter * BRIGHTNESS * brightness)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + (1 + jitter * CONTRAST * contrast) * (x - mean)
    grey = x.mean(1, keepdim=True)
    saturation = torch.where(draws[5] < GREY, 0.0, 1 + jitter * SATURATION * saturation)
    x = grey + saturation * turned(x - grey, 2 * math.pi * HUE * jitter * hue)
    return x.clamp(0, 1) * 2 - 1


def turned(colours: Tensor, angle: Tensor) -> Tensor:
    """Colours without their grey, with their hue turned by an angle: a rotation around the axis of greys."""
    red_green_blue = (colours.roll(1, 1) - colours.roll(-1, 1)) / 3**0.5
    return colours * angle.cos() + red_green_blue * angle.sin()

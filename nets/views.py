"""Random views of a picture: another part of it, in other colours. A sample has the same views on any rank."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from gan import noise

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

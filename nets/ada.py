"""The augmentation of Karras et al. 2020, "Training GANs with limited data", and the control of its probability (ADA).

[Note: augmentation]
A picture is mirrored, turned, moved and scaled; then its colours change; then frequencies are filtered; then noise is
added and a square is cut out. Each change has a coin of its own: it happens with the probability `p`, times the factor
that the pipe has for this change. Real pictures and fakes are changed alike, before a discriminator sees them. No
change is certain, so fakes do not learn it: see section 2.2 of the paper.

Where a picture ends, its mirror image begins, and black beyond that. As published, all pictures of a batch get the same
margin of mirror image, as large as one of them needs. So ranks agree on the margin: `gan.ranks` knows the whole batch.

Doubling, halving and filtering are products with matrices, which are faster than convolutions with so few taps, and
have all derivatives.
"""

import math
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import noise, ranks
from gan.files.errors import UserError

GROUPS = {
    "blit": ("xflip", "rotate90", "xint"),
    "geom": ("scale", "rotate", "aniso", "xfrac"),
    "color": ("brightness", "contrast", "lumaflip", "hue", "saturation"),
    "filter": ("imgfilter",),
    "noise": ("noise",),
    "cutout": ("cutout",),
}
BLIT, GEOM, COLOR, *_ = GROUPS.values()
# A pipe's factor of each change. bg, bgc, ... have the groups of these letters, which are the first ones.
PIPES = {pipe: dict.fromkeys(changes, 1.0) for pipe, changes in GROUPS.items()}
PIPES |= {"bgcfnc"[:count]: dict.fromkeys(chain(*islice(GROUPS.values(), count)), 1.0) for count in range(2, 7)}
PIPES["r3gan"] = PIPES["bg"] | dict.fromkeys(COLOR, 0.5) | PIPES["cutout"]

# What is drawn for each picture. A coin is named by its change and, where there are several, by a part of it.
BANDS = tuple(f"imgfilter.{band}" for band in range(4))
COINS = (*BLIT, "scale", "rotate.pre", "aniso", "rotate.post", "xfrac", *COLOR, *BANDS, "noise", "cutout")
UNIFORM = ("xflip", "rotate90", "xint.x", "xint.y", "rotate.pre", "rotate.post", "lumaflip", "hue", "cut.x", "cut.y")
NORMAL = ("scale", "aniso", "xfrac.x", "xfrac.y", "brightness", "contrast", "saturation", *BANDS, "noise")
# Which coin decides: that of xint.x is xint.
COIN_OF = {name: name if name in COINS else name.split(".")[0] for name in (*UNIFORM, *NORMAL)}
COIN_OF |= {"cut.x": "cutout", "cut.y": "cutout"}

# The wavelet sym6 (Daubechies 1992, section 8.1.1), with a sum of 1.
SYM6 = (
    *(0.010892350163279143, 0.0024683061859136284, -0.083431607705840557, -0.034161560793020275),
    *(0.34722898647835108, 0.55694639196395937, 0.23895218566605369, -0.051362484930906597),
    *(-0.014891875649217129, 0.031625281329948913, 0.0012499610463979753, -0.0055159337549885147),
)


class Augmentation(nn.Module):
    """Changes each picture [B, 1, 3 or 4 channels, H, W] in [-1, 1] at random. See [Note: augmentation].

    A fourth channel moves with the others; its values are no colour. The draws follow the sample.
    """

    p: Tensor

    def __init__(self, pipe: str = "bgc", p: float = 0.0) -> None:
        super().__init__()
        if pipe not in PIPES:
            raise UserError(f"augmentation '{pipe}' is not known; type one of {', '.join(PIPES)}")
        self.factors = PIPES[pipe]
        self.register_buffer("p", torch.tensor(p))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in (1, 3, 4):
            raise UserError(f"augmentation of pictures with {x.shape[1]} channels; it knows 1, 3 and 4")
        with torch.autocast(x.device.type, enabled=False):
            return self._changed(x if x.dtype is torch.float64 else x.float())

    def _changed(self, x: Tensor) -> Tensor:
        uniform, coins = noise.rand((len(x), len(COINS) + len(UNIFORM)), like=x), len(COINS)
        factors = [self.factors.get(coin.split(".")[0], 0.0) for coin in COINS]
        # One of two turns, or both, happens with the probability p.
        shares = [0.5 if coin.startswith("rotate.") else 1.0 for coin in COINS]
        factor, share = _there([factors, shares], x)
        chances = 1 - (1 - self.p * factor).clamp(min=0) ** share
        happens = dict(zip(COINS, (uniform[:, :coins] < chances).unbind(1), strict=True))

        def some(names: Sequence[str], values: Tensor) -> dict[str, Tensor]:
            """The columns of values, by their names: where the coin does not say so, 0. Few operations, for a GPU."""
            own = torch.stack([happens[COIN_OF[name]] for name in names], 1)
            return dict(zip(names, torch.where(own, values, 0).unbind(1), strict=True))

        u, signed = (some(UNIFORM, values) for values in (uniform[:, coins:], 2 * uniform[:, coins:] - 1))
        n = some(NORMAL, noise.randn((len(x), len(NORMAL)), like=x))

        if self.factors.keys() & PIPES["bg"].keys():
            sides = _there([x.shape[3], x.shape[2]], x)
            near = 0.125 * torch.stack([signed["xint.x"], signed["xint.y"]], 1)
            far = 0.125 * torch.stack([n["xfrac.x"], n["xfrac.y"]], 1)
            quarter = (4 * u["rotate90"]).floor() / 2
            angles = math.pi * torch.stack([quarter, signed["rotate.pre"], signed["rotate.post"]], 1)
            cos, sin = angles.cos(), angles.sin()
            turned, before, after = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2)).unbind(1)
            flip = 1 - 2 * (2 * u["xflip"]).floor()
            first = torch.stack([flip, torch.ones_like(flip)], 1)[:, :, None] * turned
            sizes = 2 ** (-0.2 * torch.stack([n["scale"] + n["aniso"], n["scale"] - n["aniso"]], 1))
            whole = (first @ before * sizes[:, None]) @ after
            offset = -first @ (near * sides).round()[..., None] - whole @ (far * sides)[..., None]
            x = moved(x, whole, offset)
        if self.factors.keys() & PIPES["color"].keys():
            gain = 2 ** (0.5 * n["contrast"])
            grey = gain * (1 - 2 * (2 * u["lumaflip"]).floor())
            colour = gain * 2 ** n["saturation"]
            x = recoloured(x, 0.2 * n["brightness"], grey, colour, math.pi * signed["hue"])
        if "imgfilter" in self.factors:
            x = filtered(x, 2 ** torch.stack([n[band] for band in BANDS], 1))
        if "noise" in self.factors:
            x = x + noise.randn(x.shape, like=x) * (0.1 * n["noise"].abs())[:, None, None, None]
        if "cutout" in self.factors:
            far = [
                (((torch.arange(side, device=x.device) + 0.5) / side - u[centre][:, None]).abs() >= 0.25)
                for side, centre in zip(x.shape[2:], ("cut.y", "cut.x"), strict=True)
            ]
            kept = far[0][:, :, None] | far[1][:, None] | ~happens["cutout"][:, None, None]
            x = x * kept[:, None]
        return x


class Ada(Augmentation):
    """An augmentation whose probability is adjusted, so that the discriminator is right about a share of real pictures.

    `target` is for the mean sign of the scores of real pictures. In `images` pictures the probability can rise by 1.
    It is a buffer, so checkpoints have it.
    """

    def __init__(self, target: float = 0.6, images: int = 500_000, pipe: str = "bgc") -> None:
        super().__init__(pipe)
        self.target, self.images = target, images

    @torch.no_grad()
    def adjust(self, positive: Tensor, count: Tensor, pictures: Tensor | int) -> None:
        """Move p up if too many scores of real pictures are positive, else down: `positive` of `count`.

        `pictures` is how many were shown since the last call; a picture may have been scored twice.
        """
        # Section 3.1: the mean sign r_t, and a step that is as large as the number of pictures.
        direction = (2 * positive - count - self.target * count).sign()
        self.p.add_(direction * pictures / self.images).clamp_(min=0)


def switch(state: dict[str, Any], name: str, augmentation: Augmentation | None) -> None:
    """Let a game go on from a checkpoint's `state` where its augmentation of that name was off, or is off now."""
    if augmentation is None:
        state.pop(f"{name}.p", None)
    else:
        state.setdefault(f"{name}.p", augmentation.p)


def _there(values: Any, like: Tensor) -> Tensor:
    """These numbers where `like` is. `like.new_tensor` would make the CPU wait for a GPU."""
    return torch.as_tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


def moved(x: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """Each pixel of the result comes from the place `matrix @ pixel + offset`, in pixels from the middle (x, y)."""
    sides = x.shape[3], x.shape[2]
    before, after = _margins(x, matrix, offset[..., 0])
    taps = _there(SYM6, x)
    doubling = [_doubling(*each, taps) for each in zip(sides, before, after, strict=True)]
    halving = {side: _halving(side, taps) for side in sides}
    # Twice as many pixels as the result has, and some more around it; where each is in the doubled picture.
    at = [torch.arange(2 * side + 12, device=x.device, dtype=x.dtype) / 2 - (side + 5) / 2 for side in sides]
    places = []
    for row, (side, margin, doubled) in enumerate(zip(sides, before, doubling, strict=True)):
        across = matrix[:, row, 0, None, None] * at[0]
        down = matrix[:, row, 1, None, None] * at[1][:, None]
        place = across + down + offset[:, row, :, None] + ((side - 1) / 2 + margin)
        places.append(place * (4 / (len(doubled) - 1)) - 1)
    sampled = _Sampled.apply(_product(x, *doubling), torch.stack(places, 3))
    return _product(sampled, *(halving[side] for side in sides))


def _margins(x: Tensor, matrix: Tensor, offset: Tensor) -> tuple[list[int], list[int]]:
    """How much mirror image the whole batch needs: at the left and the top, and at the right and the bottom."""
    sides = x.shape[3], x.shape[2]
    if x.is_meta:  # nobody knows; no batch needs more
        return ([side - 1 for side in sides],) * 2
    last = _there(sides, matrix) - 1
    reach = (matrix.abs() @ (last / 2)[:, None])[..., 0]
    furthest = ranks.gather(torch.stack([reach - offset, reach + offset]).amax(1)[None]).amax(0)
    margins = (furthest + 6 - last / 2).clamp(min=0).minimum(last).ceil().int().tolist()
    return margins[0], margins[1]


def _product(x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    return rows @ (x @ columns.mT)


def _mirrored(place: Tensor, side: int) -> Tensor:
    place = place.remainder(max(2 * (side - 1), 1))
    return torch.minimum(place, 2 * (side - 1) - place)


def _doubling(side: int, before: int, after: int, taps: Tensor) -> Tensor:
    """A matrix to the doubled picture, with margins of mirror image."""
    whole = before + side + after
    places = torch.arange(5, 2 * whole + 5, device=taps.device)[:, None] // 2 - torch.arange(6, device=taps.device)
    # A row has each second tap, and black where the picture with its margins ends.
    values = 2 * taps.view(6, 2).T.flip(0).repeat(whole, 1) * (places.clamp(0, whole - 1) == places)
    return taps.new_zeros(2 * whole, side).scatter_add(1, _mirrored(places - before, side), values)


def _halving(side: int, taps: Tensor) -> Tensor:
    places = torch.arange(1, 2 * side + 1, 2, device=taps.device)[:, None] + torch.arange(12, device=taps.device)
    return taps.new_zeros(side, 2 * side + 12).scatter(1, places, taps.expand(side, -1))


class _Sampled(torch.autograd.Function):
    """Bilinear sampling at the same places, as often differentiable as you like; torch's own is so only once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return F.grid_sample(x, places, align_corners=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(gradient, *ctx.saved_tensors, ctx.shape), None


class _Spread(torch.autograd.Function):
    """The gradient of `_Sampled`: each value goes back to the four pixels from which it came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(places)
        like = x.new_zeros(()).expand(shape)
        return torch.ops.aten.grid_sampler_2d_backward(x, like, places, 0, 0, True, [True, False])[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Sampled.apply(gradient, *ctx.saved_tensors), None, None


def recoloured(x: Tensor, brightness: Tensor, grey: Tensor, colour: Tensor, angle: Tensor) -> Tensor:
    """Brighter; then the grey part of each pixel times `grey`, its colour times `colour` and turned by `angle`."""
    brighter = x[:, :3] + brightness[:, None, None, None]
    if x.shape[1] == 1:
        return brighter * grey[:, None, None, None]
    to_grey = x.new_full((3, 3), 1 / 3)
    turned = _there([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], x) / math.sqrt(3)
    parts = torch.stack([to_grey, torch.eye(3, device=x.device, dtype=x.dtype) - to_grey, turned])
    matrix = torch.stack([grey, colour * angle.cos(), colour * angle.sin()], 1) @ parts.flatten(1)
    changed = (matrix.view(-1, 3, 3) @ brighter.flatten(2)).view_as(brighter)
    return torch.cat([changed, x[:, 3:]], 1)


def filtered(x: Tensor, gains: Tensor) -> Tensor:
    """Four bands of frequencies, each times a gain of its own [B, 4]; the expected power stays."""
    power = _there([10 / 13, 1 / 13, 1 / 13, 1 / 13], x)
    gains = gains / (1 + power * (gains.square() - 1)).sqrt().prod(1, keepdim=True)
    taps = gains @ _there(_bank(), x)
    matrices = []
    for side in (x.shape[3], x.shape[2]):
        places = torch.arange(side, device=x.device)[:, None] + torch.arange(-21, 22, device=x.device)
        places = _mirrored(places, side).expand(len(x), -1, -1)
        matrix = x.new_zeros(len(x), side, side).scatter_add(2, places, taps[:, None].expand_as(places))
        matrices.append(matrix[:, None])
    return _product(x, *matrices)


def _bank() -> np.ndarray:
    """Taps of four bands of a bank of wavelets (sym2): appendix B of the paper."""
    root = math.sqrt(3)
    low = np.array([1 - root, 3 - root, 3 + root, 1 + root]) / (4 * math.sqrt(2))
    high = low * (1, -1, 1, -1)
    low, high = np.convolve(low, low[::-1]) / 2, np.convolve(high, high[::-1]) / 2
    bands = np.eye(4, 1)
    for band in range(1, 4):
        apart = np.zeros((4, 2 * bands.shape[1] - 1))
        apart[:, ::2] = bands
        bands = np.stack([np.convolve(taps, low) for taps in apart])
        middle = bands.shape[1] // 2
        bands[band, middle - 3 : middle + 4] += high
    return bands

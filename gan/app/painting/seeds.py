"""Pictures by their seeds, from a file of published networks: `python -m gan.sample ffhq.pkl --seeds 0-63`."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import Namespace
from PIL import Image
from torch import Tensor

from gan.app.painting.actions import save_png
from gan.app.painting.grids import picture
from gan.app.painting.reopen import device_of
from gan.files.errors import UserError
from nets.published.from_noise import ours
from nets.published.pickles import read
from nets.stylegan import StyleGenerator

MOST = 10_000


def numbers(text: str) -> list[int]:
    """The seeds of a list as it is typed: 0-63, or 1,5,8-10."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first or last - first + len(found) >= MOST:
            raise UserError(f"--seeds '{text}' is no list of at most {MOST} seeds; type e.g. --seeds 0-63 or 1,5,8-10")
        found += range(first, last + 1)
    return found


def draw(settings: Namespace) -> list[Path]:
    """Draw a picture of each seed, and write them as one grid, or with `singles` also each by itself."""
    seeds, networks = numbers(settings.seeds), read(Path(settings.networks))
    drawer = networks.get("G_ema") or networks.get("G")
    if drawer is None:
        raise UserError(f"'{settings.networks}' holds no generator, but {', '.join(networks)}")
    net = ours(drawer).float().to(device_of(settings.device))
    path = Path(settings.file or f"{Path(settings.networks).stem}-seeds.png")
    pictures = [picture(_drawn(net, seed, settings), transparent=True) for seed in seeds]
    width, height = pictures[0].size
    columns = min(8, len(pictures)) if len(pictures) <= 64 else round(len(pictures) ** 0.5)
    sheet = Image.new(pictures[0].mode, (columns * width, -(-len(pictures) // columns) * height), "white")
    for number, each in enumerate(pictures):
        sheet.paste(each, (number % columns * width, number // columns * height))
    save_png(sheet, path)
    if not settings.singles:
        return [path]
    folder = path.with_suffix("")
    for seed, each in zip(seeds, pictures, strict=True):
        save_png(each, folder / f"seed{seed:04d}.png")
    return [path, folder]


@torch.no_grad()
def _drawn(net: Any, seed: int, settings: Namespace) -> Tensor:
    """The picture that the published code draws of this seed."""
    like = next(net.parameters())
    z = torch.from_numpy(np.random.RandomState(seed).randn(1, net.latent)).to(like)
    label = None
    if net.classes:
        if not 0 <= (settings.label or 0) < net.classes:
            raise UserError(f"--class {settings.label} is not there: the network has classes 0 to {net.classes - 1}")
        label = torch.eye(net.classes)[[settings.label if settings.label is not None else seed % net.classes]].to(like)
    elif settings.label is not None:
        raise UserError("the network has no classes; leave --class out")
    if isinstance(net, StyleGenerator):
        return net(z, label, psi=settings.truncation)[0]
    if settings.truncation != 1:
        raise UserError("R3GAN's networks have no truncation; leave --truncation out")
    return net(z, label)[0]

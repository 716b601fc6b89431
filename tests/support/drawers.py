"""Tiny StyleGAN2s that draw from seeds, and their published files."""

from pathlib import Path
from typing import Any

import torch

from gan.app.sampling.drawer import Drawer
from nets.published.from_noise import published
from nets.published.pickles import write
from nets.stylegan import StyleDiscriminator, StyleGenerator

SMALL = dict(size=16, width=4, faces=8, held_out=4, max_steps=1)  # settings of a run that draws from noise


def generator(size: Any = 16, **sizes: Any) -> StyleGenerator:
    return StyleGenerator(size, **{"latent": 5, "style": 6, "mapping": 2, "base": 64, "most": 8} | sizes).eval()


def critic(size: Any = 16, **sizes: Any) -> StyleDiscriminator:
    return StyleDiscriminator(size, base=64, most=8, **sizes).eval().requires_grad_(False)


def drawer(title: str = "a net", grain: float = 0.0, **sizes: Any) -> Drawer:
    """Of always the same network, in whose pictures so much of the noise is seen."""
    torch.manual_seed(0)
    net = generator(**sizes).requires_grad_(False)
    for name, strength in net.named_parameters():
        if name.endswith("noise_strength"):
            strength.fill_(grain)
    return Drawer(net, title)


def publish(path: Path, **networks: Any) -> Path:
    """A file such as NVIDIA publishes."""
    write(path, {name: published(network.eval()) for name, network in networks.items()})
    return path

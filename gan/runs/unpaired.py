"""CycleGAN, CUT and FastCUT on two folders of pictures of a person's own, without pairs."""

from gan.files.errors import UserError
from nets.blocks import start_
from nets.patch import PatchGan
from nets.patch_vectors import PatchVectors
from nets.resnet import ResnetGenerator

Networks = tuple[ResnetGenerator, PatchVectors, PatchGan]


def cut_networks(
    channels: int, width: int = 64, blocks: int = 9, *, vectors: int = 256, judge: int = 64, layers: int = 3
) -> Networks:
    """CUT's three networks, as published; the losses look into the fifth block."""
    if blocks < 5:
        raise UserError(f"CUT compares features of the fifth block, and there are {blocks}; type --blocks 5 or more")
    generator = ResnetGenerator(channels, channels, width, blocks, smooth=True)
    discriminator = PatchGan(channels, judge, layers, norm="instance", smooth=True)
    start_(generator, xavier=True)
    start_(discriminator, xavier=True)
    return generator, PatchVectors([channels, 2 * width, *[4 * width] * 3], vectors), discriminator

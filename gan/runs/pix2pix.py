"""pix2pix as published, on pairs of pictures of a person's own."""

from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import nn

from gan.files.errors import UserError
from gan.runs.run import Direction, Judge, LossName, NetworkName, NormName, Run, say
from gan.runs.sides import OnSides
from nets.patch import PatchGan, PixelGan
from nets.resnet import Norm, ResnetGenerator
from nets.unet import UNet

DEEPEST = 9  # unet_512


def unet_depth(size: tuple[int, int], name: str = "unet") -> int:
    """How often a U-Net halves pictures of a size: as often as published ones of that size, or as its name says."""
    divides = [depth for depth in range(2, DEEPEST + 1) if not any(side % 2**depth for side in size)]
    wanted = int(name.removeprefix("unet_")).bit_length() - 1 if name != "unet" else max(divides, default=2)
    if wanted not in divides:
        step = 2**wanted
        fits = "x".join(str(max(1, round(side / step)) * step) for side in size[::-1])
        raise UserError(
            f"a U-Net that halves {wanted} times cannot have pictures of {size[1]}x{size[0]}; type --size {fits}, or "
            f"another --network, such as resnet_9blocks"
        )
    return wanted


def pix2pix(
    network: NetworkName = "unet",
    judge: Judge = "basic",
    loss: LossName = "vanilla",
    direction: Direction = "AtoB",
    width: PositiveInt = 64,
    judge_width: PositiveInt = 64,
    layers: PositiveInt = 3,
    norm: NormName = "batch",
    dropout: bool = True,
    pixels: NonNegativeFloat = 100.0,
    rate: PositiveFloat = 2e-4,
    batch_size: PositiveInt = 1,
    epochs: PositiveInt = 100,
    falling: NonNegativeInt = 100,
    max_steps: PositiveInt | None = None,
    from_: str | None = None,
    **settings: Any,
) -> Run:
    """pix2pix on pairs of pictures of yours: translates those of A into those of B.

    Args:
        network: The generator: unet (as deep as the size allows), unet_128, unet_256, unet_512, resnet_9blocks or
            resnet_6blocks.
        judge: The discriminator: basic (a PatchGAN), or pixel, which judges single pixels.
        loss: What the networks learn by beside the pixels: vanilla, lsgan, or wgangp with a gradient penalty.
        direction: AtoB, or BtoA to translate those of B into those of A.
        width: Channels of the generator's first layer.
        judge_width: Channels of the discriminator's first layer.
        layers: Layers of the PatchGAN that halve; 3 see patches of 70 pixels.
        norm: The norm in both networks: batch or instance.
        dropout: Whether the generator drops values, also in use: its only source of variety.
        pixels: Weight of the L1 loss on pixels.
        rate: Learning rate of both networks.
        batch_size: Pairs a step, of all ranks together.
        epochs: Passes over the data at the full rate.
        falling: Passes after those, in which the rate falls to zero.
        max_steps: Steps of the whole training, in place of both; the rate falls over its second half.
        from_: Typed --from: a published file, latest_net_G.pth, or the folder of one, to begin with its weights.
    """
    from gan.games.pix2pix import Pix2pix, epoch_decay, linear_decay

    pictures = OnSides(**settings)
    found = pictures.find(paired=True, backwards=direction == "BtoA")
    batches = len(found) // batch_size
    steps = max_steps or max(1, (epochs + falling) * batches)
    decay = linear_decay(steps) if max_steps else epoch_decay(epochs, falling, batches)

    torch.manual_seed(pictures.seed)
    game = Pix2pix(
        _generator(network, found.size, found.channels, width, norm, dropout),
        _judge(judge, sum(found.channels), judge_width, layers, norm),
        decay,
        loss=loss,
        rate=rate,
        pixels=pixels,
    )
    if from_ is not None:
        from nets.published.files import read_published

        say(f"weights: {', '.join(read_published(from_, game.published()))} of {from_}")
    scores = {"val/paint_error": "error of held-out pictures translated"} if found.val is not None else {}
    return Run(game, found.data(batch_size), steps, scores)


def _generator(
    name: str, size: tuple[int, int], channels: tuple[int, int], width: int, norm: Norm, dropout: bool
) -> UNet | ResnetGenerator:
    if name.startswith("resnet"):
        blocks = int(name[len("resnet_")])
        return ResnetGenerator(*channels, width, blocks, norm=norm, dropout=dropout)
    return UNet(*channels, width, unet_depth(size, name), None if dropout else 0, norm)


def _judge(kind: str, inside: int, width: int, layers: int, norm: Norm) -> nn.Module:
    return PixelGan(inside, width, norm) if kind == "pixel" else PatchGan(inside, width, layers, norm)

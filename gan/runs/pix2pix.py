"""pix2pix as published, on pairs of pictures of a person's own."""

from typing import Any, Literal

from jsonargparse.typing import NonNegativeFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.run import Run, begin_with
from gan.runs.sides import OnSides
from nets.patch import PatchGan, PixelGan
from nets.resnet import Norm, ResnetGenerator
from nets.unet import UNet

DEEPEST = 9  # unet_512
Network = Literal["unet", "unet_128", "unet_256", "unet_512", "resnet_9blocks", "resnet_6blocks"]
SELDOM = 4  # a U-Net that halves less often sees too little


def unet_depth(size: tuple[int, int], name: str = "unet") -> int:
    """How often a U-Net halves pictures of a size: as its name says, or as often as it can; seldom is refused."""
    divides = [depth for depth in range(1, DEEPEST + 1) if not any(side % 2**depth for side in size)]
    seldom = min(SELDOM, min(size).bit_length() - 1)
    wanted = int(name.removeprefix("unet_")).bit_length() - 1 if name != "unet" else max([seldom, *divides])
    if wanted not in divides:
        step = 2**wanted
        fits = "x".join(str(max(1, round(side / step)) * step) for side in size[::-1])
        raise UserError(
            f"a U-Net that halves {wanted} times cannot have pictures of {size[1]}x{size[0]}; type --size {fits}, or "
            f"another --network, such as resnet_9blocks"
        )
    return wanted


def pix2pix(
    network: Network = "unet",
    judge: Literal["basic", "pixel"] = "basic",
    loss: Literal["vanilla", "lsgan", "wgangp"] = "vanilla",
    direction: Literal["AtoB", "BtoA"] = "AtoB",
    judge_width: PositiveInt = 64,
    norm: Literal["batch", "instance"] = "batch",
    dropout: bool = True,
    pixels: NonNegativeFloat = 100.0,
    **settings: Any,
) -> Run:
    """pix2pix on pairs of pictures of yours: translates those of A into those of B.

    Args:
        network: The generator: unet (as deep as the size allows), unet_128, unet_256, unet_512, resnet_9blocks or
            resnet_6blocks.
        judge: The discriminator: basic (a PatchGAN), or pixel, which judges single pixels.
        loss: What the networks learn by beside the pixels: vanilla, lsgan, or wgangp with a gradient penalty.
        direction: AtoB, or BtoA to translate those of B into those of A.
        judge_width: Channels of the discriminator's first layer.
        norm: The norm in both networks: batch or instance.
        dropout: Whether the generator drops values, also in use: its only source of variety.
        pixels: Weight of the L1 loss on pixels.
    """
    from gan.games.pix2pix import Pix2pix

    typed = OnSides(**settings)
    found, steps, decay = typed.begin(paired=True, backwards=direction == "BtoA")
    both = sum(found.channels), judge_width
    game = Pix2pix(
        _generator(network, found.size, found.channels, typed.width, norm, dropout),
        PixelGan(*both, norm) if judge == "pixel" else PatchGan(*both, typed.layers, norm),
        decay,
        loss=loss,
        rate=typed.rate,
        pixels=pixels,
    )
    begin_with(typed.from_, game)
    return found.run(game, typed.batch_size, steps, {"val/paint_error": "error of held-out pictures translated"})


def _generator(
    name: str, size: tuple[int, int], channels: tuple[int, int], width: int, norm: Norm, dropout: bool
) -> UNet | ResnetGenerator:
    if name.startswith("resnet"):
        blocks = int(name[len("resnet_")])
        return ResnetGenerator(*channels, width, blocks, norm=norm, dropout=dropout)
    return UNet(*channels, width, unet_depth(size, name), None if dropout else 0, norm)

"""CycleGAN, CUT and FastCUT on two folders of pictures of a person's own, without pairs."""

from functools import partial
from typing import Any

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from gan.files.errors import UserError
from gan.runs.run import Run, begin_with
from gan.runs.sides import OnSides
from nets.blocks import start_
from nets.patch import PatchGan
from nets.patch_vectors import PatchVectors
from nets.resnet import ResnetGenerator

SCORE = {"val/distance": "distance of translated from held-out pictures"}


def cyclegan(
    blocks: PositiveInt = 9,
    cycle: NonNegativeFloat = 10.0,
    identity: NonNegativeFloat = 0.5,
    pool: NonNegativeInt = 50,
    **settings: Any,
) -> Run:
    """CycleGAN on two kinds of pictures of yours: from A to B and from B to A, learned without pairs.

    Args:
        blocks: Residual blocks of each generator; published: 9, or 6 for less than 256 pixels.
        cycle: Weight of the loss that a picture translated there and back must be the same.
        identity: Weight of the loss that a picture of the wanted kind must stay as it is, as a part of cycle.
        pool: How many past fakes of each kind the discriminators are shown again.
    """
    from gan.games.cyclegan import CycleGan

    typed = OnSides(**settings)
    found, steps, decay = typed.begin()
    channels, _ = found.channels  # the same on both sides
    game = CycleGan(
        partial(ResnetGenerator, channels, channels, typed.width, blocks),
        partial(PatchGan, channels, typed.width, typed.layers, norm="instance"),
        decay,
        rate=typed.rate,
        cycle=cycle,
        identity=identity,
        pool=pool,
    )
    begin_with(typed.from_, game)
    return found.run(game, typed.batch_size, steps, SCORE)


def cut(
    config_: str = "cut",
    blocks: PositiveInt = 9,
    nce: NonNegativeFloat | None = None,
    patches: PositiveInt = 256,
    all_negatives: bool = False,
    **settings: Any,
) -> Run:
    """CUT or FastCUT on two kinds of pictures of yours: from A to B, learned without pairs, in half of CycleGAN's time.

    Args:
        config_: cut, or fastcut, which is lighter: it translates no pictures of B, and mirrors some.
        blocks: Residual blocks of the generator; published: 9, or 6 for less than 256 pixels; at least 5.
        nce: Weight of the loss that a patch must stay like itself; published: 1 (cut), 10 (fastcut).
        patches: How many patches of a picture are compared in each layer.
        all_negatives: Compare a patch with those of all pictures of the batch, not only of its own.
    """
    from gan.games.cut import Cut

    if config_ not in ("cut", "fastcut"):
        raise UserError(f"--config {config_} is not known; type cut or fastcut")
    typed, fast = OnSides(**settings), config_ == "fastcut"
    found, steps, decay = typed.begin(*((150, 50) if fast else (200, 200)), ahead=1)
    game = Cut(
        *cut_networks(found.channels[0], typed.width, blocks, judge=typed.width, layers=typed.layers),
        decay,
        rate=typed.rate,
        nce=(10.0 if fast else 1.0) if nce is None else nce,
        identity=not fast,
        flips=fast,
        patches=patches,
        all_negatives=all_negatives,
    )
    begin_with(typed.from_, game)
    return found.run(game, typed.batch_size, steps, SCORE)


def cut_networks(
    channels: int, width: int = 64, blocks: int = 9, *, vectors: int = 256, judge: int = 64, layers: int = 3
) -> tuple[ResnetGenerator, PatchVectors, PatchGan]:
    """CUT's three networks, as published; the losses look into the fifth block."""
    if blocks < 5:
        raise UserError(f"CUT compares features of the fifth block, and there are {blocks}; type --blocks 5 or more")
    generator = ResnetGenerator(channels, channels, width, blocks, smooth=True)
    discriminator = PatchGan(channels, judge, layers, norm="instance", smooth=True)
    start_(generator, xavier=True)
    start_(discriminator, xavier=True)
    return generator, PatchVectors([channels, 2 * width, *[4 * width] * 3], vectors), discriminator

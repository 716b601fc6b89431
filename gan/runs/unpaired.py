"""CycleGAN, CUT and FastCUT on two folders of pictures of a person's own, without pairs."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from gan.files.errors import UserError
from gan.runs.pictures import Found
from gan.runs.run import Run, begin_with
from gan.runs.sides import OnSides
from nets.blocks import start_
from nets.patch import PatchGan
from nets.patch_vectors import PatchVectors
from nets.resnet import ResnetGenerator

SCORE = {"val/distance": "distance of translated from held-out pictures"}


@dataclass
class Unpaired(OnSides):
    """What the runs share.

    Args:
        epochs: How often the larger folder is shown at the full rate; published: 100 (cyclegan), 200 (cut), 150
            (fastcut).
        falling_epochs: How often after that, while the rate falls; published: 100 (cyclegan), 200 (cut), 50 (fastcut).
        blocks: Residual blocks of a generator; published: 9, or 6 for less than 256 pixels; cut needs 5.
    """

    epochs: PositiveInt | None = None
    falling_epochs: NonNegativeInt | None = None
    blocks: PositiveInt = 9

    def begin(self, epochs: int, falling: int, ahead: int) -> tuple[Found, int, int, Any]:
        """The pictures and their channels, the steps of the training, and how the rate falls."""
        found = self.find(paired=False)
        a, b = found.channels
        if a != b:
            raise UserError(f"{self.data} has pictures of {a} and of {b} channels; type --channels 3")
        torch.manual_seed(self.seed)
        ends = self.epochs or epochs, falling if self.falling_epochs is None else self.falling_epochs
        return found, a, *self.falling(len(found.train), *ends, ahead)


def cyclegan(
    cycle: NonNegativeFloat = 10.0, identity: NonNegativeFloat = 0.5, pool: NonNegativeInt = 50, **settings: Any
) -> Run:
    """CycleGAN on two kinds of pictures of yours: from A to B and from B to A, learned without pairs.

    Args:
        cycle: Weight of the loss that a picture translated there and back must be the same.
        identity: Weight of the loss that a picture of the wanted kind must stay as it is, as a part of cycle.
        pool: How many past fakes of each kind the discriminators are shown again.
    """
    from gan.games.cyclegan import CycleGan

    typed = Unpaired(**settings)
    found, channels, steps, decay = typed.begin(100, 100, ahead=2)
    game = CycleGan(
        partial(ResnetGenerator, channels, channels, typed.width, typed.blocks),
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
    nce: NonNegativeFloat | None = None,
    patches: PositiveInt = 256,
    all_negatives: bool = False,
    **settings: Any,
) -> Run:
    """CUT or FastCUT on two kinds of pictures of yours: from A to B, learned without pairs, in half of CycleGAN's time.

    Args:
        config_: Typed --config: cut, or fastcut, which is lighter: it translates no pictures of B, and mirrors some.
        nce: Weight of the loss that a patch must stay like itself; published: 1 (cut), 10 (fastcut).
        patches: How many patches of a picture are compared in each layer.
        all_negatives: Compare a patch with those of all pictures of the batch, not only of its own.
    """
    from gan.games.cut import Cut

    if config_ not in ("cut", "fastcut"):
        raise UserError(f"--config {config_} is not known; type cut or fastcut")
    typed, fast = Unpaired(**settings), config_ == "fastcut"
    found, channels, steps, decay = typed.begin(*((150, 50) if fast else (200, 200)), ahead=1)
    game = Cut(
        *cut_networks(channels, typed.width, typed.blocks, judge=typed.width, layers=typed.layers),
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

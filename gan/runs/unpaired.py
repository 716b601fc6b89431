"""CycleGAN, CUT and FastCUT on two folders of pictures of a person's own, without pairs."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.run import Run, say
from gan.runs.sides import FoundSides, OnSides
from nets.blocks import start_
from nets.patch import PatchGan
from nets.patch_vectors import PatchVectors
from nets.resnet import ResnetGenerator

if TYPE_CHECKING:
    from gan.games.cut import Cut
    from gan.games.cyclegan import CycleGan


def cyclegan(
    epochs: PositiveInt = 100,
    falling_epochs: NonNegativeInt = 100,
    max_steps: PositiveInt | None = None,
    batch_size: PositiveInt = 1,
    width: PositiveInt = 64,
    blocks: PositiveInt = 9,
    layers: PositiveInt = 3,
    rate: PositiveFloat = 2e-4,
    cycle: NonNegativeFloat = 10.0,
    identity: NonNegativeFloat = 0.5,
    pool: NonNegativeInt = 50,
    from_: str | None = None,
    **settings: Any,
) -> Run:
    """CycleGAN on two kinds of pictures of yours: from A to B and from B to A, learned without pairs.

    Args:
        epochs: How often the larger folder is shown at the full learning rate.
        falling_epochs: How often it is shown after that, while the learning rate falls to zero.
        max_steps: Steps of the whole training, in place of both; the rate falls over its second half.
        batch_size: Pictures of each kind a step, of all ranks together.
        width: Channels of the networks' first layers.
        blocks: Residual blocks of each generator; published: 9 for 256 pixels and more, 6 for less.
        layers: How often a discriminator halves a picture; with 3 it judges patches of 70 pixels.
        rate: Learning rate of all networks.
        cycle: Weight of the loss that a picture translated there and back must be the same.
        identity: Weight of the loss that a picture of the wanted kind must stay as it is, as a part of cycle.
        pool: How many past fakes of each kind the discriminators are shown again.
        from_: Typed --from: a published file, such as latest_net_G_A.pth, or the folder of several, to begin with.
    """
    from gan.games.cyclegan import CycleGan

    pictures = OnSides(**settings)
    found = pictures.find(paired=False)
    channels = _channels(found)
    steps, decay = _length(found, batch_size, epochs, falling_epochs, max_steps, ahead=2)
    torch.manual_seed(pictures.seed)
    game = CycleGan(
        partial(ResnetGenerator, channels, channels, width, blocks),
        partial(PatchGan, channels, width, layers, norm="instance"),
        decay,
        rate=rate,
        cycle=cycle,
        identity=identity,
        pool=pool,
    )
    return _run(game, found, batch_size, steps, from_)


@dataclass(frozen=True)
class Preset:
    """A published configuration."""

    nce: float
    identity: bool
    epochs: int
    falling: int


PRESETS = {"cut": Preset(1.0, True, 200, 200), "fastcut": Preset(10.0, False, 150, 50)}


def cut(
    config_: str = "cut",
    epochs: PositiveInt | None = None,
    falling_epochs: NonNegativeInt | None = None,
    max_steps: PositiveInt | None = None,
    batch_size: PositiveInt = 1,
    width: PositiveInt = 64,
    blocks: PositiveInt = 9,
    layers: PositiveInt = 3,
    rate: PositiveFloat = 2e-4,
    nce: NonNegativeFloat | None = None,
    patches: PositiveInt = 256,
    all_negatives: bool = False,
    from_: str | None = None,
    **settings: Any,
) -> Run:
    """CUT or FastCUT on two kinds of pictures of yours: from A to B, learned without pairs, in half of CycleGAN's time.

    What is not typed is that of the configuration.

    Args:
        config_: Typed --config: cut, or fastcut, which is lighter: it translates no pictures of B, and mirrors some.
        epochs: How often the larger folder is shown at the full learning rate; published: 200 (cut), 150 (fastcut).
        falling_epochs: How often after that, while the learning rate falls; published: 200 (cut), 50 (fastcut).
        max_steps: Steps of the whole training, in place of both; the rate falls over its second half.
        batch_size: Pictures of each kind a step, of all ranks together.
        width: Channels of the networks' first layers.
        blocks: Residual blocks of the generator, 5 or more.
        layers: How often a discriminator halves a picture; with 3 it judges patches of 70 pixels.
        rate: Learning rate of all networks.
        nce: Weight of the loss that a patch must stay like itself; published: 1 (cut), 10 (fastcut).
        patches: How many patches of a picture are compared in each layer.
        all_negatives: Compare a patch with those of all pictures of the batch, not only of its own.
        from_: Typed --from: a published file, such as latest_net_G.pth, or the folder of several, to begin with.
    """
    from gan.games.cut import Cut

    if config_ not in PRESETS:
        raise UserError(f"--config {config_} is not known; type one of {', '.join(PRESETS)}")
    preset = PRESETS[config_]
    pictures = OnSides(**settings)
    found = pictures.find(paired=False)
    channels = _channels(found)
    ends = preset.epochs if epochs is None else epochs, preset.falling if falling_epochs is None else falling_epochs
    steps, decay = _length(found, batch_size, *ends, max_steps, ahead=1)
    torch.manual_seed(pictures.seed)
    game = Cut(
        *cut_networks(channels, width, blocks, judge=width, layers=layers),
        decay,
        rate=rate,
        nce=preset.nce if nce is None else nce,
        identity=preset.identity,
        flips=not preset.identity,
        patches=patches,
        all_negatives=all_negatives,
    )
    return _run(game, found, batch_size, steps, from_)


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


def _channels(found: FoundSides) -> int:
    a, b = found.channels
    if a != b:
        raise UserError(f"{found.options.data} has pictures of {a} and of {b} channels; type --channels 3")
    return a


def _length(
    found: FoundSides, batch_size: int, epochs: int, falling: int, max_steps: int | None, ahead: int
) -> tuple[int, Any]:
    """The steps of a training, and how the learning rate falls."""
    from gan.games.pix2pix import epoch_decay, linear_decay

    if max_steps is not None:
        return max_steps, linear_decay(max_steps)
    batches = max(1, len(found) // batch_size)
    return (epochs + falling) * batches, epoch_decay(epochs, falling, batches, ahead)


def _run(game: "CycleGan | Cut", found: FoundSides, batch_size: int, steps: int, from_: str | None) -> Run:
    from nets.published.files import read_published

    if from_ is not None:
        say(f"weights: {', '.join(read_published(from_, game.published()))} of {from_}")
    scores = {"val/distance": "distance of translated from held-out pictures"} if found.val is not None else {}
    return Run(game, found.data(batch_size), steps, scores)

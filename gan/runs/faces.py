"""Runs on drawn faces that paint or translate pictures, in sizes for a small CPU: minutes and not days."""

from functools import partial
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from datasets.data import GanData
from datasets.drawn.faces import FaceDomains, Faces, FaceTransfers
from gan.games.cyclegan import CycleGan
from gan.games.pix2pix import Pix2pix
from gan.games.sean import Sean
from gan.games.spade import Spade
from gan.runs.run import HELD_OUT, Run, Seed, Upsamplings, check_size
from nets.discriminator import MultiScaleDiscriminator, PatchDiscriminator
from nets.resnet import ResnetGenerator
from nets.sean.encoder import StyleEncoder
from nets.sean.generator import SeanGenerator
from nets.unet import UNet


def sean_faces(style: PositiveInt = 32, **settings: Any) -> Run:
    """SEAN on drawn faces: paint the shapes of one face in the styles of another.

    Args:
        style: Length of a region's style code.
    """
    return sean_or_spade(style=style, **settings)


def spade_faces(**settings: Any) -> Run:
    """SPADE on drawn faces: paint label maps in one palette, without styles."""
    return sean_or_spade(style=None, **settings)


def sean_or_spade(
    style: PositiveInt | None,
    size: PositiveInt = 64,
    batch_size: PositiveInt = 8,
    max_steps: PositiveInt = 400,
    seed: Seed = 0,
    workers: NonNegativeInt = 0,
    faces: PositiveInt = 2000,
    held_out: PositiveInt = 64,
    width: PositiveInt = 8,
    hidden: PositiveInt = 16,
    upsamplings: Upsamplings = 3,
    generator_rate: PositiveFloat = 2e-3,
    discriminator_rate: PositiveFloat = 2e-3,
    pixels: NonNegativeFloat = 20.0,
    matching: NonNegativeFloat = 5.0,
    fake_once: bool = False,
) -> Run:
    """Make a run of SEAN on drawn faces, or without styles of SPADE.

    Args:
        style: Length of a region's style code, if there are styles.
        size: Height and width of the pictures.
        batch_size: Pictures a step, of all ranks together.
        max_steps: Steps of the whole training; the learning rates fall to zero over its second half.
        seed: Decides the faces, the networks' first weights and the order of the samples.
        workers: Processes that prepare batches, for each rank.
        faces: How many faces to train on.
        held_out: How many faces to score on; none of them is trained on.
        width: Channels of the generator's last block; the blocks before it have more.
        hidden: Channels of the mask branch in each normalisation layer.
        upsamplings: How often the generator doubles its picture.
        generator_rate: Learning rate of encoder and generator.
        discriminator_rate: Learning rate of the discriminator.
        pixels: Weight of the pixels' L1 loss, which takes the place of the published perceptual loss.
        matching: Weight of the feature-matching loss.
        fake_once: Make the fake once a step for both turns. This saves a generator pass; quality was not compared.
    """
    check_size((size, size), upsamplings)
    labels = Faces.num_labels
    torch.manual_seed(seed)
    encoders = [] if style is None else [StyleEncoder(style, width=16, normalise=False, gain=1.0)]
    game = (Spade if style is None else Sean)(
        *encoders,
        SeanGenerator(labels, style, width, hidden, upsamplings, gain=1.0),
        MultiScaleDiscriminator(labels + 3, width=16, layers=3, gain=1.0),
        labels=labels,
        steps=max_steps,
        generator_rate=generator_rate,
        discriminator_rate=discriminator_rate,
        pixels=pixels,
        matching=matching,
        fake_once=fake_once,
    )
    look = {"look": "poster"} if style is None else {}
    train, val = Faces(faces, size, seed, **look), Faces(held_out, size, seed, first=HELD_OUT, **look)
    if style is None:
        scores = {"val/paint_error": "paint error on held-out faces"}
    else:
        val = FaceTransfers(val)
        scores = {
            "val/transfer_error": "transfer error on held-out faces",
            "val/region_error": "transfer error of one region's style, in that region",
            "val/region_spill": "change that makes in the other regions, as a share of its own",
        }
    data = GanData(train, val, batch_size=batch_size, workers=workers, seed=seed, flip=False)
    return Run(game, data, max_steps, scores)


def pix2pix_faces(
    size: PositiveInt = 64,
    batch_size: PositiveInt = 16,
    max_steps: PositiveInt = 500,
    seed: Seed = 0,
    workers: NonNegativeInt = 0,
    faces: PositiveInt = 2000,
    held_out: PositiveInt = 64,
    width: PositiveInt = 24,
    rate: PositiveFloat = 1e-3,
    pixels: NonNegativeFloat = 100.0,
) -> Run:
    """pix2pix on drawn faces: paint label maps in one palette, learned from pairs.

    Args:
        size: Height and width of the pictures.
        batch_size: Pictures a step, of all ranks together.
        max_steps: Steps of the whole training; the learning rates fall to zero over its second half.
        seed: Decides the faces, the networks' first weights and the order of the samples.
        workers: Processes that prepare batches, for each rank.
        faces: How many faces to train on.
        held_out: How many faces to score on; none of them is trained on.
        width: Channels of the networks' first layers.
        rate: Learning rate of both networks.
        pixels: Weight of the pixels' L1 loss.
    """
    labels = Faces.num_labels
    torch.manual_seed(seed)
    game = Pix2pix(
        UNet(labels, 3, width, depth=4, dropouts=1),
        PatchDiscriminator(labels + 3, width, layers=2),
        labels=labels,
        steps=max_steps,
        rate=rate,
        pixels=pixels,
    )
    train = Faces(faces, size, seed, look="poster")
    val = Faces(held_out, size, seed, first=HELD_OUT, look="poster")
    data = GanData(train, val, batch_size=batch_size, workers=workers, seed=seed, flip=False)
    return Run(game, data, max_steps, {"val/paint_error": "paint error on held-out faces"})


def cyclegan_faces(
    size: PositiveInt = 32,
    batch_size: PositiveInt = 8,
    max_steps: PositiveInt = 800,
    seed: Seed = 0,
    workers: NonNegativeInt = 0,
    faces: PositiveInt = 1000,
    held_out: PositiveInt = 64,
    width: PositiveInt = 16,
    blocks: PositiveInt = 2,
    rate: PositiveFloat = 1e-3,
    cycle: NonNegativeFloat = 10.0,
    identity: NonNegativeFloat = 0.0,
    pool: NonNegativeInt = 50,
) -> Run:
    """CycleGAN on drawn faces: posters to neon pictures and back, learned without pairs.

    Args:
        size: Height and width of the pictures.
        batch_size: Pictures of each kind a step, of all ranks together.
        max_steps: Steps of the whole training; the learning rates fall to zero over its second half.
        seed: Decides the faces, the networks' first weights and the order of the samples.
        workers: Processes that prepare batches, for each rank.
        faces: How many faces of each kind to train on.
        held_out: How many faces to score on; none of them is trained on.
        width: Channels of the networks' first layers.
        blocks: Residual blocks of each generator.
        rate: Learning rate of all networks.
        cycle: Weight of the loss that a picture translated there and back must be the same.
        identity: Weight of the loss that a picture of the wanted kind must stay as it is.
        pool: How many past fakes of each kind the discriminators are shown again.
    """
    torch.manual_seed(seed)
    game = CycleGan(
        partial(ResnetGenerator, width=width, blocks=blocks),
        partial(PatchDiscriminator, 3, 2 * width, layers=2),
        steps=max_steps,
        rate=rate,
        cycle=cycle,
        identity=identity,
        pool=pool,
    )
    train = FaceDomains(faces, size, seed)
    val = FaceDomains(held_out, size, seed, first=HELD_OUT, truth=True)
    data = GanData(train, val, batch_size=batch_size, workers=workers, seed=seed)
    return Run(game, data, max_steps, {"val/translation_error": "translation error on held-out faces"})

"""Runs on drawn faces that learn to represent them, by codes or by vectors, in sizes for a small CPU."""

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from datasets.augment import to_tensors
from datasets.data import GanData
from datasets.drawn.faces import Faces
from gan.games.byol import NEAREST, Byol
from gan.games.vqgan import VqGan
from gan.runs.run import HELD_OUT, Run, Seed, Upsamplings, check_size
from nets.byol import Online, ResnetEncoder, perceptron
from nets.discriminator import PatchDiscriminator
from nets.vqgan import VqAutoencoder

LOOK = "poster"  # all faces have the same palette


def vqgan_faces(
    size: PositiveInt = 32,
    batch_size: PositiveInt = 16,
    max_steps: PositiveInt = 700,
    seed: Seed = 0,
    workers: NonNegativeInt = 0,
    faces: PositiveInt = 2000,
    held_out: PositiveInt = 64,
    width: PositiveInt = 24,
    upsamplings: Upsamplings = 2,
    code: PositiveInt = 8,
    codes: PositiveInt = 128,
    rate: PositiveFloat = 1e-3,
    start: PositiveInt = 350,
    adversarial: NonNegativeFloat = 0.2,
    commitment: NonNegativeFloat = 0.25,
) -> Run:
    """VQGAN on drawn faces: faces as small maps of codes, and painted again.

    The published perceptual loss is left out, because it needs weights to download. Pixels are compared by L1.

    Args:
        size: Height and width of the pictures.
        batch_size: Pictures a step, of all ranks together.
        max_steps: Steps of the whole training.
        seed: Decides the faces, the networks' first weights and the order of the samples.
        workers: Processes that prepare batches, for each rank.
        faces: How many faces to train on.
        held_out: How many faces to score on; none of them is trained on.
        width: Channels of the networks at full size; smaller sizes have twice as many.
        upsamplings: How often the decoder doubles its map of codes.
        code: Length of a code.
        codes: How many codes there are.
        rate: Learning rate of both networks.
        start: The step in which the discriminator joins the game.
        adversarial: How much its judgement pulls at the decoder's last layer, beside the pixels; published: 0.8.
        commitment: Weight of the loss that keeps features near their codes.
    """
    check_size((size, size), upsamplings)
    torch.manual_seed(seed)
    game = VqGan(
        VqAutoencoder([width, *[2 * width] * upsamplings], code, codes),
        PatchDiscriminator(3, width, layers=2, gain=1.0),
        rate=rate,
        start=start,
        adversarial=adversarial,
        commitment=commitment,
    )
    train, val = Faces(faces, size, seed, look=LOOK), Faces(held_out, size, seed, first=HELD_OUT, look=LOOK)
    data = GanData(train, val, batch_size=batch_size, workers=workers, seed=seed)
    scores = {
        "val/paint_error": "paint error on held-out faces",
        "val/idle_codes": "share of the codes that held-out faces leave idle",
    }
    return Run(game, data, max_steps, scores)


def byol_faces(
    size: PositiveInt = 32,
    batch_size: PositiveInt = 64,
    max_steps: PositiveInt = 300,
    seed: Seed = 0,
    workers: NonNegativeInt = 0,
    faces: PositiveInt = 4000,
    held_out: PositiveInt = 512,
    width: PositiveInt = 32,
    hidden: PositiveInt = 192,
    projection: PositiveInt = 64,
    rate: PositiveFloat = 1e-3,
    decay: float = 0.99,
) -> Run:
    """BYOL on drawn faces: what they are like, learned without labels from pairs of random views.

    Args:
        size: Height and width of the pictures.
        batch_size: Pictures a step, of all ranks together.
        max_steps: Steps of the whole training, in which the target's decay rises to 1.
        seed: Decides the faces, the networks' first weights and the order of the samples.
        workers: Processes that prepare batches, for each rank.
        faces: How many faces to train on.
        held_out: How many faces to score on, and as many others to show; none of them is trained on.
        width: Channels of the encoder's first layers.
        hidden: Width of projector and predictor; published: 4096.
        projection: Length of the vectors that are predicted; published: 256.
        rate: Learning rate.
        decay: The target's decay at the start; published: 0.996, for trainings of 100,000 steps and more.
    """
    torch.manual_seed(seed)
    others = Faces(max(held_out, NEAREST), size, seed, first=HELD_OUT + held_out, look=LOOK)
    gallery = torch.stack([to_tensors(others[number])["image"] for number in range(len(others))])
    widths = [width, 2 * width, 4 * width]
    game = Byol(
        Online(ResnetEncoder(widths), perceptron(widths[-1], hidden, projection)),
        perceptron(projection, hidden, projection),
        gallery,
        labels=Faces.num_labels,
        steps=max_steps,
        rate=rate,
        decay=decay,
    )
    train, val = Faces(faces, size, seed, look=LOOK), Faces(held_out, size, seed, first=HELD_OUT, look=LOOK)
    data = GanData(train, val, batch_size=batch_size, workers=workers, seed=seed, flip=False)
    return Run(
        game,
        data,
        max_steps,
        {"val/neighbour_error": "error in guessing what a held-out face has from its nearest ones; 1 is chance"},
    )

"""The built-in runs, on faces that are drawn: in sizes for a small CPU, minutes and not days."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from datasets.augment import to_tensors
from datasets.data import GanData
from datasets.drawn.faces import FaceDomains, Faces, FaceTransfers
from gan.errors import UserError
from gan.games.cyclegan import CycleGan
from gan.games.dmd2 import Dmd2
from gan.games.from_noise import FromNoise
from gan.games.pix2pix import Pix2pix
from gan.games.r3gan import R3Gan
from gan.games.sean import Sean
from gan.games.spade import Spade
from gan.games.stylegan import StyleGan
from gan.games.wgan_gp import WganGp
from gan.runs.run import HELD_OUT, Run, Seed, Upsamplings, check_size
from nets.denoiser import Denoiser, ExactDenoiser, Head
from nets.discriminator import MultiScaleDiscriminator, PatchDiscriminator
from nets.r3 import R3Discriminator, R3Generator
from nets.resnet import ResnetGenerator
from nets.sean.encoder import StyleEncoder
from nets.sean.generator import SeanGenerator
from nets.stylegan import StyleDiscriminator, StyleGenerator
from nets.unet import UNet
from nets.wgan import WganCritic, WganGenerator


def sean_faces(style: PositiveInt = 32, **settings: Any) -> Run:
    """SEAN on drawn faces: paint the shapes of one face in the styles of another.

    Args:
        style: Length of a region's style code.
    """
    return painter(style=style, **settings)


def spade_faces(**settings: Any) -> Run:
    """SPADE on drawn faces: paint label maps in one palette, without styles."""
    return painter(style=None, **settings)


def painter(
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
    """SEAN, or without styles SPADE, on drawn faces.

    Args:
        style: Length of a region's style code, if there are styles.
        size: Height and width of the pictures.
        batch_size: Pictures a step, of all ranks together.
        max_steps: Steps of the whole training; the learning rates fall to zero over its second half.
        seed: Decides on the faces, on the networks' start and on the order of the samples.
        workers: Processes a rank that prepare batches.
        faces: How many faces to train on.
        held_out: How many faces to score on; none of them is trained on.
        width: Channels of the generator's last block; the blocks before it have more.
        hidden: Channels of the mask branch in each normalisation.
        upsamplings: How often the generator doubles its picture.
        generator_rate: Learning rate of encoder and generator.
        discriminator_rate: Learning rate of the discriminator.
        pixels: Weight of the pixels' L1 loss, which stands for the published perceptual one.
        matching: Weight of the feature-matching loss.
        fake_once: Make the fake once a step for both turns: spares a generator pass; cost in quality not measured.
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
        seed: Decides on the faces, on the networks' start and on the order of the samples.
        workers: Processes a rank that prepare batches.
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
        seed: Decides on the faces, on the networks' start and on the order of the samples.
        workers: Processes a rank that prepare batches.
        faces: How many faces of each kind to train on.
        held_out: How many faces to score on; none of them is trained on.
        width: Channels of the networks' first layers.
        blocks: Residual blocks of each generator.
        rate: Learning rate of all networks.
        cycle: Weight of coming back to where it started.
        identity: Weight of leaving alone a picture that is of the wanted kind already.
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


def r3gan_faces(
    size: PositiveInt = 32,
    max_steps: PositiveInt = 1000,
    latent: PositiveInt = 32,
    blocks: PositiveInt = 1,
    rate: PositiveFloat = 1e-3,
    gamma: NonNegativeFloat = 2.0,
    ema: float = 0.99,
    **settings: Any,
) -> Run:
    """R3GAN on drawn faces: new faces from noise.

    Args:
        size: Height and width of the pictures: 4, doubled once or more.
        max_steps: Steps of the whole training.
        latent: Length of the noise vector.
        blocks: Residual blocks at each size.
        rate: Learning rate of both networks.
        gamma: Weight of both gradient penalties.
        ema: Decay of the generator's averaged weights.
    """

    def game(widths: list[int], train: Faces) -> R3Gan:
        generator, discriminator = R3Generator(latent, widths, blocks), R3Discriminator(widths, blocks)
        return R3Gan(generator, discriminator, rate=rate, gamma=gamma, ema=ema)

    return from_noise(game, size=size, max_steps=max_steps, flip=True, **settings)


def wgan_gp_faces(
    size: PositiveInt = 16,
    max_steps: PositiveInt = 2500,
    latent: PositiveInt = 32,
    rate: PositiveFloat = 5e-4,
    critic_steps: PositiveInt = 5,
    penalty: NonNegativeFloat = 10.0,
    ema: float | None = 0.95,
    **settings: Any,
) -> Run:
    """WGAN-GP on drawn faces: new faces from noise.

    Args:
        size: Height and width of the pictures: 4, doubled once or more.
        max_steps: Steps of the whole training, in each of which the critic learns.
        latent: Length of the noise vector.
        rate: Learning rate of both networks; published: 1e-4.
        critic_steps: The generator learns in one of so many steps.
        penalty: Weight of the gradient penalty.
        ema: Decay of the generator's averaged weights; published: null, which is none.
    """

    def game(widths: list[int], train: Faces) -> WganGp:
        rules = dict(rate=rate, critic_steps=critic_steps, penalty=penalty, ema=ema)
        return WganGp(WganGenerator(latent, widths), WganCritic(widths), **rules)

    return from_noise(game, size=size, max_steps=max_steps, flip=True, **settings)


def stylegan_faces(
    size: PositiveInt = 16,
    max_steps: PositiveInt = 1500,
    latent: PositiveInt = 32,
    style: PositiveInt = 32,
    mapping: PositiveInt = 4,
    rate: PositiveFloat = 2e-3,
    gamma: NonNegativeFloat = 1.0,
    r1_every: PositiveInt = 16,
    path: NonNegativeFloat = 2.0,
    path_every: PositiveInt = 4,
    ema: float = 0.99,
    **settings: Any,
) -> Run:
    """A small StyleGAN2 on drawn faces: new faces from noise, by way of styles.

    Args:
        size: Height and width of the pictures: 4, doubled once or more.
        max_steps: Steps of the whole training.
        latent: Length of the noise vector.
        style: Length of the style vector that it is mapped to.
        mapping: Layers of that mapping; published: 8.
        rate: Learning rate of both networks; Adam gets it corrected for the updates of the lazy penalties.
        gamma: Weight of the discriminator's R1 penalty per step.
        r1_every: R1 comes once in so many steps, as many times as heavy.
        path: Weight of the path length penalty per step.
        path_every: Path lengths are penalised once in so many steps, as many times as heavily.
        ema: Decay of the generator's averaged weights.
    """

    def game(widths: list[int], train: Faces) -> StyleGan:
        rules = dict(rate=rate, gamma=gamma, r1_every=r1_every, path=path, path_every=path_every, ema=ema)
        return StyleGan(StyleGenerator(latent, style, widths, mapping), StyleDiscriminator(widths), **rules)

    return from_noise(game, size=size, max_steps=max_steps, flip=True, **settings)


def dmd2_faces(
    size: PositiveInt = 16,
    max_steps: PositiveInt = 2000,
    faces: PositiveInt = 1000,
    latent: PositiveInt = 32,
    student_rate: PositiveFloat = 2e-3,
    rate: PositiveFloat = 1e-3,
    student_every: PositiveInt = 5,
    adversarial: NonNegativeFloat = 0.01,
    head_weight: NonNegativeFloat = 0.01,
    sigma_min: PositiveFloat = 0.1,
    sigma_max: PositiveFloat = 10.0,
    ema: float | None = 0.95,
    **settings: Any,
) -> Run:
    """DMD2 on drawn faces: a generator of one step, distilled from the exact denoiser of those faces.

    No trained teacher is to be had without a download, so the teacher is the denoiser that has an exact formula:
    the one of the training faces themselves. What it knows are those faces; new ones it cannot teach.

    Args:
        size: Height and width of the pictures: 4, doubled once or more.
        max_steps: Steps of the whole training, in each of which fake score and head learn.
        faces: How many faces the teacher knows, which are also the true ones that the head is shown.
        latent: Length of the student's noise vector.
        student_rate: Learning rate of the student.
        rate: Learning rate of the fake score and of the head.
        student_every: The student learns in one of so many steps.
        adversarial: Weight of the student's adversarial loss; 0 is distillation alone.
        head_weight: Weight of the head's adversarial loss beside the fake score's own.
        sigma_min: The least noise that pictures are compared under; their own standard deviation is about 0.5.
        sigma_max: The most noise.
        ema: Decay of the student's averaged weights; published: null, which is none.
    """
    if not sigma_min < sigma_max:
        raise UserError(f"dmd2-faces: sigma_min={sigma_min} is not below sigma_max={sigma_max}; try sigma_min=0.1")

    def game(widths: list[int], train: Faces) -> Dmd2:
        pictures = torch.stack([to_tensors({"image": train.image(face)})["image"] for face in range(faces)])
        fine_to_coarse = widths[::-1]
        return Dmd2(
            R3Generator(latent, widths, 1),
            Denoiser(fine_to_coarse, embedding=4 * fine_to_coarse[0]),
            Head(fine_to_coarse[-1]),
            ExactDenoiser(pictures),
            student_rate=student_rate,
            rate=rate,
            student_every=student_every,
            adversarial=adversarial,
            head_weight=head_weight,
            sigmas=(sigma_min, sigma_max),
            ema=ema,
        )

    # The teacher knows the faces as they are, not mirrored.
    return from_noise(game, size=size, max_steps=max_steps, flip=False, faces=faces, **settings)


def from_noise(
    make: Callable[[list[int], Faces], FromNoise],
    size: PositiveInt,
    max_steps: PositiveInt,
    flip: bool,
    batch_size: PositiveInt = 16,
    seed: Seed = 0,
    workers: NonNegativeInt = 0,
    faces: PositiveInt = 2000,
    held_out: PositiveInt = 256,
    width: PositiveInt = 16,
) -> Run:
    """A game that draws faces from noise, all of one palette.

    Args:
        make: Makes the game of the channels of each size, from 4x4 up, and of the faces to learn from.
        size: Height and width of the pictures: 4, doubled once or more.
        max_steps: Steps of the whole training.
        flip: Mirror half of the faces.
        batch_size: Pictures a step, of all ranks together.
        seed: Decides on the faces, on the networks' start and on the order of the samples.
        workers: Processes a rank that prepare batches.
        faces: How many faces to learn from.
        held_out: How many faces to score on; none of them is trained on.
        width: Channels at full size; half the size has twice as many, up to four times.
    """
    doublings = (size // 4).bit_length() - 1
    if size != 4 * 2**doublings or doublings < 1:
        raise UserError(f"size={size} is not 4 doubled; try size={4 * 2 ** max(2, doublings)}")
    torch.manual_seed(seed)
    train = Faces(faces, size, seed, look="poster")
    game = make([width * min(2**k, 4) for k in reversed(range(doublings + 1))], train)
    val = Faces(held_out, size, seed, first=HELD_OUT, look="poster")
    data = GanData(train, val, batch_size=batch_size, workers=workers, seed=seed, flip=flip)
    return Run(game, data, max_steps, {"val/distance": "distance of drawn from held-out faces"})

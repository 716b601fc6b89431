"""Runs on drawn faces that make new faces from noise, in sizes for a small CPU: minutes and not days."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt

from gan.ema import half_life
from gan.files.errors import UserError
from gan.runs.faces import DrawnFaces
from gan.runs.run import Run
from nets.ada import Ada, Augmentation
from nets.biggan import BigDiscriminator, BigGenerator
from nets.denoiser import Denoiser, ExactDenoiser, Head
from nets.r3 import R3Discriminator, R3Generator
from nets.stylegan import StyleDiscriminator, StyleGenerator
from nets.wgan import WganCritic, WganGenerator

if TYPE_CHECKING:
    from datasets import GanData

SCORES = {"val/distance": "distance of drawn from held-out faces"}


@dataclass
class NewFaces(DrawnFaces):
    """Faces that are to be drawn from noise, all of one palette.

    Args:
        size: Height and width of the pictures: 16, 32, 64 and so on.
        faces: How many faces to learn from.
        width: Channels at full size; half the size has twice as many, up to four times.
    """

    size: PositiveInt = 16
    held_out: PositiveInt = 256
    width: PositiveInt = 16

    def made(self, flip: bool = True) -> tuple["GanData", list[int]]:
        """The faces, and the channels of each size, from 4x4 up."""
        size, doublings = self.size, (self.size // 4).bit_length() - 1
        if size != 4 * 2**doublings or doublings < 1:
            raise UserError(f"size={size} is not 4 doubled; try size={4 * 2 ** max(2, doublings)}")
        return self.data(flip, look="poster"), [self.width * min(2**k, 4) for k in reversed(range(doublings + 1))]


def r3gan_faces(
    size: PositiveInt = 32,
    max_steps: PositiveInt = 2000,
    latent: PositiveInt = 32,
    blocks: PositiveInt = 1,
    rate: PositiveFloat = 1e-3,
    gamma: NonNegativeFloat = 2.0,
    ema: PositiveFloat = 1000.0,
    augment: NonNegativeFloat = 0.0,
    **settings: Any,
) -> Run:
    """R3GAN on drawn faces: new faces from noise. In each step one network learns, in turns.

    Args:
        size: Height and width of the pictures: 16, 32, 64 and so on.
        max_steps: Steps of the whole training.
        latent: Length of the noise vector.
        blocks: Residual blocks at each size.
        rate: Learning rate of both networks at the beginning; a quarter of it at the end.
        gamma: Weight of both gradient penalties at the beginning; a tenth of it at the end.
        ema: Half-life of the generator's averaged weights, in images.
        augment: Probability of each augmentation at the end; it grows from 0.
    """
    from gan.games.r3gan import R3Gan

    data, widths = NewFaces(size, **settings).made()
    game = R3Gan(
        R3Generator(latent, widths, blocks),
        R3Discriminator(widths, blocks),
        batch_size=data.batch_size,
        rate=(rate, rate / 4),
        gamma=(gamma, gamma / 10),
        ema=(ema, ema),
        p=(0.0, augment),
        images=max_steps * data.batch_size / 2,
        augment=Augmentation("r3gan") if augment else None,
    )
    return Run(game, data, max_steps, SCORES)


def wgan_gp_faces(
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
        max_steps: Steps of the whole training, in each of which the critic learns.
        latent: Length of the noise vector.
        rate: Learning rate of both networks; published: 1e-4.
        critic_steps: The generator learns in one of this many steps.
        penalty: Weight of the gradient penalty.
        ema: Decay of the generator's averaged weights; published: null, for no average.
    """
    from gan.games.wgan_gp import WganGp

    data, widths = NewFaces(**settings).made()
    networks = WganGenerator(latent, widths), WganCritic(widths)
    game = WganGp(*networks, rate=rate, critic_steps=critic_steps, penalty=penalty, ema=ema)
    return Run(game, data, max_steps, SCORES)


def stylegan_faces(
    max_steps: PositiveInt = 1500,
    latent: PositiveInt = 32,
    style: PositiveInt = 32,
    mapping: PositiveInt = 4,
    rate: PositiveFloat = 2e-3,
    gamma: NonNegativeFloat = 1.0,
    mixing: ClosedUnitInterval = 0.9,
    ema_images: PositiveFloat = 1000.0,
    ada: bool = True,
    ada_images: PositiveInt = 20_000,
    **settings: Any,
) -> Run:
    """StyleGAN2-ADA on drawn faces, in a small size: new faces from noise, by way of styles.

    Args:
        max_steps: Steps of the whole training.
        latent: Length of the noise vector.
        style: Length of the style vector that it is mapped to.
        mapping: Layers of that mapping; published: 8.
        rate: Learning rate of both networks; it is corrected for the extra updates of the lazy penalties.
        gamma: Weight of the discriminator's R1 penalty per step.
        mixing: Probability that a batch mixes two styles.
        ema_images: Half-life of the generator's averaged weights, in images; published: 10,000.
        ada: Augment what the discriminator sees, with a probability that adapts.
        ada_images: In so many images the probability can rise from 0 to 1; published: 500,000.
    """
    from gan.games.stylegan import StyleGan

    data, widths = NewFaces(**settings).made()
    size, wide = 4 << (len(widths) - 1), dict(base=widths[-1] * (4 << (len(widths) - 1)), most=max(widths))
    generator = StyleGenerator(size, latent=latent, style=style, mapping=mapping, **wide)
    discriminator = StyleDiscriminator(size, **wide)
    ema, augment = half_life(ema_images, data.batch_size, ramp_up=0.05), Ada(images=ada_images) if ada else None
    game = StyleGan(generator, discriminator, rate=rate, gamma=gamma, mixing=mixing, ema=ema, ada=augment)
    return Run(game, data, max_steps, SCORES)


def biggan_faces(
    size: PositiveInt = 32,
    max_steps: PositiveInt = 1500,
    width: PositiveInt = 8,
    latent: PositiveInt = 32,
    rate: PositiveFloat = 2e-4,
    micro_batches: PositiveInt = 1,
    ortho: NonNegativeFloat = 1e-4,
    **settings: Any,
) -> Run:
    """BigGAN on drawn faces of two classes, posters and neon pictures: new faces of each, from noise.

    Args:
        size: Height and width of the pictures.
        max_steps: Steps of the whole training, in each of which the discriminator learns.
        width: Channels are four times as many; published: 64.
        latent: Length of the noise vector.
        rate: Learning rate of the generator; that of the discriminator is twice as high.
        micro_batches: Parts of a rank's batch that are computed one after the other.
        ortho: Weight of the generator's orthogonal regularisation.
    """
    from datasets import FaceLooks
    from gan.games.biggan import BigGan

    drawn = DrawnFaces(size=size, **settings)
    data = drawn.data(flip=True, kind=FaceLooks)
    rule: dict[str, Any] = dict(size=(size, size), width=width, classes=len(FaceLooks.looks), attention=[16])
    game = BigGan(
        BigGenerator(latent=latent, shared=16, hierarchical=True, **rule),
        BigDiscriminator(**rule),
        rates=(rate, 2 * rate),
        judge_steps=2,
        micro_batches=micro_batches,
        ortho=(ortho, 0.0),
        ema=0.99,
        ema_start=100,
    )
    return Run(game, data, max_steps, SCORES)


@dataclass
class Distilled(NewFaces):
    """How a generator of one step is distilled.

    Args:
        max_steps: Steps of the whole training, in each of which fake score and head learn.
        faces: How many faces the teacher knows; the head sees the same ones as true faces.
        student_rate: Learning rate of the student.
        rate: Learning rate of the others, such as the fake score and the head.
        student_every: The student learns in one of this many steps; published: 5.
        adversarial: Weight of the student's adversarial loss; 0 is distillation only.
        head_weight: Weight of the head's adversarial loss, beside the loss of the fake score.
        sigma_min: The least noise that is added to pictures to compare them; their own standard deviation is about 0.5.
        sigma_max: The most noise; by adapters the student draws from it.
        ema: Decay of the student's averaged weights; published: null, for no average.
    """

    faces: PositiveInt = 1000
    max_steps: PositiveInt = 2000
    student_rate: PositiveFloat = 2e-3
    rate: PositiveFloat = 1e-3
    student_every: PositiveInt = 5
    adversarial: NonNegativeFloat = 0.01
    head_weight: NonNegativeFloat = 0.01
    sigma_min: PositiveFloat = 0.1
    sigma_max: PositiveFloat = 10.0
    ema: float | None = 0.95

    def rules(self, run: str) -> dict[str, Any]:
        least, most = self.sigma_min, self.sigma_max
        if not least < most:
            raise UserError(f"{run}: sigma_min={least} is not below sigma_max={most}; try sigma_min={most / 100:g}")
        names = "student_rate", "rate", "student_every", "adversarial", "head_weight", "ema"
        return {name: getattr(self, name) for name in names} | {"sigmas": (least, most)}


@dataclass
class DistilledByAdapters(Distilled):
    max_steps: PositiveInt = 2200
    student_every: PositiveInt = 3
    sigma_min: PositiveFloat = 0.05


def dmd2_faces(latent: PositiveInt = 32, **settings: Any) -> Run:
    """DMD2 on drawn faces: a generator of one step, distilled from the exact denoiser of those faces.

    A trained teacher would have to be downloaded. This teacher needs no training: for a known set of pictures there
    is an exact formula of the best denoiser. It knows only the training faces, so it cannot teach new ones.

    Args:
        latent: Length of the student's noise vector.
    """
    from datasets import Faces
    from datasets.augment import to_tensors
    from gan.games.dmd2 import Dmd2

    typed = Distilled(**settings)
    rules = typed.rules("dmd2-faces")
    data, widths = typed.made(flip=False)  # the teacher does not know mirrored faces
    assert isinstance(data.train, Faces)
    pictures = torch.stack([to_tensors({"image": data.train.image(face)})["image"] for face in range(len(data.train))])
    fine_to_coarse = widths[::-1]
    student, fake_score = R3Generator(latent, widths, 1), Denoiser(fine_to_coarse, embedding=4 * fine_to_coarse[0])
    game = Dmd2(student, fake_score, Head(fine_to_coarse[-1]), ExactDenoiser(pictures), **rules)
    return Run(game, data, typed.max_steps, SCORES)


def dmd2_lora_faces(base_steps: PositiveInt = 800, rank: PositiveInt = 16, **settings: Any) -> Run:
    """DMD2 by adapters on drawn faces: a diffusion model learns them, is frozen, and is distilled into one step.

    Student and fake score are adapters on the frozen model, which is also the teacher.

    Args:
        base_steps: Steps in which the diffusion model learns, before the distillation begins.
        rank: Rank of the adapters.
    """
    from datasets import Faces
    from gan.games.dmd2 import Dmd2Lora

    typed = DistilledByAdapters(**settings)
    rules = typed.rules("dmd2-lora-faces")
    data, widths = typed.made()
    assert isinstance(data.train, Faces)
    fine_to_coarse = widths[::-1]
    base, head = Denoiser(fine_to_coarse, embedding=4 * fine_to_coarse[0]), Head(fine_to_coarse[-1])
    game = Dmd2Lora(base, head, data.train.size, rank=rank, base_steps=base_steps, **rules)
    return Run(game, data, typed.max_steps, SCORES)

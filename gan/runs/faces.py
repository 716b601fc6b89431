"""Runs on drawn faces, in sizes for a small CPU: minutes and not days. They paint, translate or represent pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.pairs import Painting
from gan.runs.run import HELD_OUT, Run, Seed, Upsamplings, check_size
from gan.runs.sides import cut_networks
from gan.runs.vqgan import SCORES as VQGAN_SCORES
from nets.byol import Online, ResnetEncoder, perceptron
from nets.discriminator import MultiScaleDiscriminator, PatchGan
from nets.resnet import ResnetGenerator, UNet
from nets.sean.generator import SeanGenerator, StyleEncoder
from nets.vqgan import VqAutoencoder

if TYPE_CHECKING:
    from datasets import GanData
    from datasets.augment import Samples
    from gan import GanModule


@dataclass
class DrawnFaces:
    """The drawn faces of a run: the settings that such runs share. It sets torch's seed: the networks are made next.

    Args:
        size: Height and width of the pictures.
        batch_size: Pictures a step, of all ranks together.
        seed: Decides the faces, the networks' first weights and the order of the samples.
        workers: Processes that prepare batches, for each rank.
        faces: How many faces to train on.
        held_out: How many faces to score on; none of them is trained on.
    """

    size: PositiveInt = 64
    batch_size: PositiveInt = 16
    seed: Seed = 0
    workers: NonNegativeInt = 0
    faces: PositiveInt = 2000
    held_out: PositiveInt = 64

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)

    def data(
        self,
        flip: bool,
        kind: "Callable[..., Samples] | None" = None,
        scored: "Callable[..., Samples] | None" = None,
        **how: Any,
    ) -> "GanData":
        """Faces to train on and others to score on, of a `kind`, those that are `scored` perhaps of another.

        `how` are the other keywords of their data sets.
        """
        from datasets import Faces, GanData

        kind = kind or Faces
        train = kind(self.faces, self.size, self.seed, **how)
        val = (scored or kind)(self.held_out, self.size, self.seed, first=HELD_OUT, **how)
        return GanData(train, val, batch_size=self.batch_size, workers=self.workers, seed=self.seed, flip=flip)


@dataclass
class SmallFaces(DrawnFaces):
    size: PositiveInt = 32


def sean_faces(style: PositiveInt = 32, **settings: Any) -> Run:
    """SEAN on drawn faces: paint the shapes of one face in the styles of another.

    Args:
        style: Length of a region's style code.
    """
    return PaintedFaces(**settings).run(style)


def spade_faces(**settings: Any) -> Run:
    """SPADE on drawn faces: paint label maps in one palette, without styles."""
    return PaintedFaces(**settings).run(None)


SPADE_SCORES = {"val/paint_error": "paint error on held-out faces"}
SEAN_SCORES = {"val/transfer_error": "transfer error on held-out faces"}


@dataclass
class PaintedFaces(DrawnFaces, Painting):
    """Faces that SEAN paints, or without styles SPADE.

    Args:
        max_steps: Steps of the whole training; the learning rates fall to zero over its second half.
        upsamplings: How often the generator doubles its picture.
        pixels: Weight of the pixels' L1 loss, which takes the place of the published perceptual loss.
    """

    batch_size: PositiveInt = 8
    max_steps: PositiveInt = 400
    width: PositiveInt = 8
    hidden: PositiveInt = 16
    upsamplings: Upsamplings = 3
    generator_rate: PositiveFloat = 2e-3
    discriminator_rate: PositiveFloat = 2e-3
    pixels: NonNegativeFloat = 20.0
    matching: NonNegativeFloat = 5.0

    def run(self, style: int | None) -> Run:
        from datasets import Faces, FaceTransfers
        from gan.games.sean import Sean
        from gan.games.spade import Spade

        check_size((self.size, self.size), self.upsamplings)
        labels, steps = Faces.num_labels, self.max_steps
        encoder = None if style is None else StyleEncoder(style, width=16, normalise=False, gain=1.0)
        generator = SeanGenerator(labels, style, self.width, self.hidden, self.upsamplings, gain=1.0)
        networks = generator, MultiScaleDiscriminator(labels + 3, width=16, layers=3, gain=1.0)
        rules = self.rules(labels, steps)
        if encoder is None:
            return Run(Spade(*networks, **rules), self.data(flip=False, look="poster"), steps, SPADE_SCORES)
        data = self.data(flip=False, scored=lambda *size, **how: FaceTransfers(Faces(*size, **how)))
        return Run(Sean(encoder, *networks, **rules), data, steps, SEAN_SCORES)


def pix2pix_faces(
    max_steps: PositiveInt = 500, width: PositiveInt = 24, rate: PositiveFloat = 1e-3, **settings: Any
) -> Run:
    """pix2pix on drawn faces: paint label maps in one palette, learned from pairs.

    Args:
        max_steps: Steps of the whole training; the learning rates fall to zero over its second half.
        width: Channels of the networks' first layers.
        rate: Learning rate of both networks.
    """
    from datasets import Faces
    from gan.games.pix2pix import Pix2pix, linear_decay

    drawn, labels = DrawnFaces(**settings), Faces.num_labels
    networks = UNet(labels, 3, width, depth=4, dropouts=1), PatchGan(labels + 3, width, layers=2)
    game = Pix2pix(*networks, linear_decay(max_steps), labels=labels, rate=rate)
    data = drawn.data(flip=False, look="poster")
    return Run(game, data, max_steps, SPADE_SCORES)


@dataclass
class TwoKinds(SmallFaces):
    """Faces of two kinds, and a translation between them.

    Args:
        batch_size: Pictures of each kind a step, of all ranks together.
        faces: How many faces of each kind to train on.
        max_steps: Steps of the whole training; the learning rates fall to zero over its second half.
        width: Channels of the networks' first layers.
    """

    batch_size: PositiveInt = 8
    faces: PositiveInt = 1000
    max_steps: PositiveInt = 800
    width: PositiveInt = 16

    def run(self, game: "GanModule") -> Run:
        from datasets import FaceDomains

        data = self.data(flip=True, kind=FaceDomains, scored=partial(FaceDomains, truth=True))
        return Run(game, data, self.max_steps, {"val/translation_error": "translation error on held-out faces"})


def cyclegan_faces(blocks: PositiveInt = 2, pool: NonNegativeInt = 50, **settings: Any) -> Run:
    """CycleGAN on drawn faces: posters to neon pictures and back, learned without pairs.

    Args:
        blocks: Residual blocks of each generator.
        pool: How many past fakes of each kind the discriminators are shown again.
    """
    from gan.games.cyclegan import CycleGan
    from gan.games.pix2pix import linear_decay

    drawn = TwoKinds(**settings)
    generator = partial(ResnetGenerator, width=drawn.width, blocks=blocks)
    discriminator = partial(PatchGan, 3, 2 * drawn.width, layers=2, norm="instance")
    decay = linear_decay(drawn.max_steps)
    return drawn.run(CycleGan(generator, discriminator, decay, rate=1e-3, identity=0.0, pool=pool))


def cut_faces(patches: PositiveInt = 64, **settings: Any) -> Run:
    """CUT on drawn faces: posters to neon pictures, learned without pairs.

    Args:
        patches: How many patches of a picture are compared in each layer.
    """
    from gan.games.cut import Cut
    from gan.games.pix2pix import linear_decay

    drawn = TwoKinds(**settings)
    width = drawn.width
    networks = cut_networks(3, width, blocks=5, vectors=4 * width, judge=2 * width, layers=2)
    return drawn.run(Cut(*networks, linear_decay(drawn.max_steps), rate=1e-3, patches=patches))


def vqgan_faces(
    max_steps: PositiveInt = 700,
    width: PositiveInt = 24,
    upsamplings: Upsamplings = 2,
    codes: PositiveInt = 128,
    rate: PositiveFloat = 1e-3,
    start: PositiveInt = 350,
    **settings: Any,
) -> Run:
    """VQGAN on drawn faces: faces as small maps of codes, and painted again.

    The codes follow the features. There is no perceptual loss, because it needs weights to download.

    Args:
        max_steps: Steps of the whole training.
        width: Channels of the networks at full size, a multiple of 4; smaller sizes have twice as many.
        upsamplings: How often the decoder doubles its map of codes.
        codes: How many codes there are.
        rate: Learning rate of both networks.
        start: The step in which the discriminator joins the game.
    """
    from gan.games.vqgan import VqGan

    drawn = SmallFaces(**settings)
    check_size((drawn.size, drawn.size), upsamplings)
    if width % 4:
        raise UserError(f"--width {width} is no multiple of 4; type --width {4 * round(width / 4) or 4}")
    mult = [1, *[2] * upsamplings]
    autoencoder = VqAutoencoder(3, width, mult, 1, (), width, 8, codes, groups=width // 4, learning="ema")
    game = VqGan(autoencoder, PatchGan(3, width, layers=2), rate=rate, start=start, adversarial=0.2)
    return Run(game, drawn.data(flip=True, look="poster"), max_steps, VQGAN_SCORES)


def byol_faces(
    batch_size: PositiveInt = 64,
    max_steps: PositiveInt = 300,
    faces: PositiveInt = 4000,
    held_out: PositiveInt = 512,
    width: PositiveInt = 32,
    hidden: PositiveInt = 192,
    projection: PositiveInt = 64,
    rate: PositiveFloat = 1e-3,
    decay: float = 0.99,
    **settings: Any,
) -> Run:
    """BYOL on drawn faces: what they are like, learned without labels from pairs of random views.

    Args:
        batch_size: Pictures a step, of all ranks together.
        max_steps: Steps of the whole training, in which the target's decay rises to 1.
        faces: How many faces to train on.
        held_out: How many faces to score on; none of them is trained on.
        width: Channels of the encoder's first layers.
        hidden: Width of projector and predictor; published: 4096.
        projection: Length of the vectors that are predicted; published: 256.
        rate: Learning rate.
        decay: The target's decay at the start; published: 0.996, for trainings of 100,000 steps and more.
    """
    from datasets import Faces
    from gan.games.byol import Byol

    drawn = SmallFaces(batch_size=batch_size, faces=faces, held_out=held_out, **settings)
    widths = [width, 2 * width, 4 * width]
    online = Online(ResnetEncoder(widths), perceptron(widths[-1], hidden, projection))
    predictor = perceptron(projection, hidden, projection)
    game = Byol(online, predictor, labels=Faces.num_labels, steps=max_steps, rate=rate, decay=decay)
    scores = {"val/neighbour_error": "error in guessing what a held-out face has from its nearest ones; 1 is chance"}
    return Run(game, drawn.data(flip=False, look="poster"), max_steps, scores)

"""SEAN on data sets of pictures with label maps, as published: networks, losses, rates and 50 + 50 epochs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.run import Run, Seed, Upsamplings, check_size, is_planned
from nets.discriminator import MultiScaleDiscriminator
from nets.sean.encoder import StyleEncoder
from nets.sean.generator import SeanGenerator

if TYPE_CHECKING:
    from datasets import Pairs
    from datasets.files.made_up import Labelled
    from gan.games.spade import Spade


def sean_celebamask(data: str = "data/CelebAMask-HQ", **settings: Any) -> Run:
    """SEAN on CelebAMask-HQ: photographs of faces, 19 regions.

    Args:
        data: The folder that holds CelebA-HQ-img/ and CelebAMask-HQ-mask-anno/.
    """
    from datasets import CelebAMask

    return Published(**settings).run(CelebAMask, data)


def sean_ade20k(data: str = "data/ADEChallengeData2016", **settings: Any) -> Run:
    """SEAN on ADE20K: scenes of all kinds, 151 labels.

    Args:
        data: The folder that holds images/ and annotations/.
    """
    from datasets import ADE20K

    return Published(**settings).run(ADE20K, data)


def sean_cityscapes(data: str = "data/cityscapes", size: PositiveInt = 256, edges: bool = True, **settings: Any) -> Run:
    """SEAN on Cityscapes: street scenes twice as wide as high, 35 labels, edges of instances.

    Args:
        data: The folder that holds leftImg8bit/ and gtFine/.
        size: Height that pictures and label maps are resized to; the width is twice that.
        edges: Show the networks where one car or person ends and the next one begins.
    """
    from datasets import Cityscapes

    published = Published(size=size, crop=False, **settings)  # the published training does not crop here
    return published.run(Cityscapes, data, size=(size, 2 * size), edges=edges)


def sean_coco(data: str = "data/cocostuff", size: PositiveInt = 256, edges: bool = False, **settings: Any) -> Run:
    """SEAN on COCO-Stuff: photographs of all kinds, 183 labels, edges of instances where there are maps of them.

    Args:
        data: The folder that holds images/ and stuffthingmaps/, and for edges instances/.
        size: Height and width that pictures and label maps are resized to.
        edges: Show the networks where one thing ends and the next one begins.
    """
    from datasets import CocoStuff

    return Published(size=size, **settings).run(CocoStuff, data, edges=edges)


def sean_facades(data: str = "data/facades", **settings: Any) -> Run:
    """SEAN on CMP facades: 606 fronts of houses, 13 labels.

    Args:
        data: The folder that holds base/ and extended/.
    """
    from datasets import Facades

    return Published(**settings).run(Facades, data)


def sean_folder(
    data: str = "data",
    labels: PositiveInt = 19,
    size: PositiveInt = 256,
    held_out: PositiveInt = 16,
    flip: bool = False,
    **settings: Any,
) -> Run:
    """SEAN on a folder of yours, with images/ and labels/ of the same names.

    Args:
        data: The folder: pictures in images/, one-channel or palette PNGs of the same names in labels/.
        labels: How many labels there are; the label maps hold 0 to labels - 1.
        size: Height and width that pictures and label maps are resized to.
        held_out: How many pictures, the last by name, to score on and to draw.
        flip: Mirror half of the pictures; not for labels that differ between left and right.
    """
    from datasets import FolderPairs

    published = Published(size=size, flip=flip, held_out=held_out, **settings)
    return published.run(FolderPairs, data, num_labels=labels, held_out=held_out)


def spade_folder(**settings: Any) -> Run:
    """SPADE on a folder of yours, with images/ and labels/ of the same names: from masks alone, without styles."""
    return sean_folder(style=None, **settings)


def open_splits(kind: "type[Pairs]", data: str, **how: Any) -> "tuple[Labelled, Labelled]":
    """A data set's training and held-out split."""
    from datasets.files.made_up import MadeUp

    made: Callable[..., Pairs] = kind  # with a split, which each data set takes
    try:
        return made(data, split="train", **how), made(data, split="val", **how)
    except UserError:
        if not is_planned():
            raise
        made_up = MadeUp(how.get("num_labels") or kind.num_labels, how["size"], how.get("edges", False))
        return made_up, made_up


@dataclass
class Published:
    """The published training of SEAN on pictures with label maps, or without styles that of SPADE.

    Args:
        size: Height and width that pictures and label maps are resized to.
        crop: Enlarge pictures by 286/256 and crop a random part, as published.
        flip: Mirror half of the pictures; labels of left and right are exchanged.
        held_out: How many pictures of the held-out split to score on while training.
        batch_size: Pictures a step, of all ranks together.
        epochs: Passes over the data; the learning rates fall to zero over the second half.
        max_steps: Steps of the whole training, in place of epochs.
        seed: Decides the networks' first weights and the order of the samples.
        workers: Processes that prepare batches, for each rank.
        width: Channels of the generator's last block; the blocks before it have more.
        hidden: Channels of the mask branch in each normalisation layer.
        style: Length of a region's style code; null for no styles, which makes it SPADE.
        upsamplings: How often the generator doubles its picture; default 5 ("normal"), from 512 pixels 6 ("more").
        generator_rate: Learning rate of encoder and generator.
        discriminator_rate: Learning rate of the discriminator.
        matching: Weight of the feature-matching loss.
        perceptual: VGG-19's weights: the path of a file, torchvision (its cache, else a download), or off.
        perceptual_weight: Weight of the perceptual loss.
        perceptual_normalise: Normalise what VGG-19 sees by ImageNet's mean and deviation; published: -1 to 1 as it is.
        pixels: Weight of an L1 loss on the pixels, not published; with the perceptual loss off, try 10.
        fake_once: Make the fake once a step for both turns. This saves a generator pass; quality was not compared.
        recompute: Let the generator keep less for its backward pass and compute it again: less memory, more time.
    """

    size: PositiveInt = 256
    crop: bool = True
    flip: bool = True
    held_out: PositiveInt = 64
    batch_size: PositiveInt = 32
    epochs: PositiveInt = 100
    max_steps: PositiveInt | None = None
    seed: Seed = 0
    workers: NonNegativeInt = 4
    width: PositiveInt = 64
    hidden: PositiveInt = 128
    style: PositiveInt | None = 512
    upsamplings: Upsamplings | None = None
    generator_rate: PositiveFloat = 1e-4
    discriminator_rate: PositiveFloat = 4e-4
    matching: NonNegativeFloat = 10.0
    perceptual: str = "torchvision"
    perceptual_weight: NonNegativeFloat = 10.0
    perceptual_normalise: bool = False
    pixels: NonNegativeFloat = 0.0
    fake_once: bool = False
    recompute: bool = True

    def run(self, kind: "type[Pairs]", data: str, **how: Any) -> Run:
        """Make a run on a data set in the folder `data`. `how` are its other keywords, also a size that is not square.

        Mistakes are looked for in the order of their cost: the size, then the data, and last the networks. The
        published generator takes seconds to make.
        """
        from datasets import GanData

        how = {"size": (self.size, self.size), **how}
        upsamplings = self.upsamplings or (6 if min(how["size"]) >= 512 else 5)
        check_size(how["size"], upsamplings)
        train, val = open_splits(kind, data, **how)
        pairs = GanData(
            train,
            val,
            batch_size=self.batch_size,
            val_count=self.held_out,
            workers=self.workers,
            seed=self.seed,
            flip=self.flip,
            crop=self.crop,
        )
        pairs.setup()
        steps = self.max_steps or self.epochs * (len(train) // self.batch_size)
        game = self._game(train.num_labels, how.get("edges", False), upsamplings, steps)
        if self.style is None:
            return Run(game, pairs, steps, {"val/paint_error": "error of held-out pictures painted"})
        return Run(game, pairs, steps, {"val/transfer_error": "error of held-out pictures made anew"})

    def _game(self, labels: int, edges: bool, upsamplings: int, steps: int) -> "Spade":
        from torchvision.models import vgg19

        from gan.games.sean import Sean
        from gan.games.spade import Spade
        from nets.published import load_vgg19
        from nets.vgg import Vgg19

        vgg = None
        if self.perceptual != "off" and is_planned():
            vgg = Vgg19(vgg19().state_dict(), self.perceptual_normalise)
        elif self.perceptual != "off":
            vgg = load_vgg19(self.perceptual, self.perceptual_normalise)

        torch.manual_seed(self.seed)
        shape = labels, self.style, self.width, self.hidden, upsamplings
        networks = (
            SeanGenerator(*shape, edges=edges, recompute=self.recompute),
            MultiScaleDiscriminator(labels + edges + 3),
        )
        rules = dict(
            labels=labels,
            steps=steps,
            generator_rate=self.generator_rate,
            discriminator_rate=self.discriminator_rate,
            matching=self.matching,
            perceptual=self.perceptual_weight,
            pixels=self.pixels,
            fake_once=self.fake_once,
        )
        if self.style is None:
            return Spade(*networks, vgg, **rules)
        return Sean(StyleEncoder(self.style), *networks, vgg, **rules)

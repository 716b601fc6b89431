"""SEAN on data sets of pictures with label maps, as published: networks, losses, rates and 50 + 50 epochs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.pictures import FITTED, sizes_said
from gan.runs.run import Run, Seed, Share, Upsamplings, begin_with, check_size, made_up, perceptual_loss, say
from nets.discriminator import MultiScaleDiscriminator
from nets.sean.generator import SeanGenerator, StyleEncoder

if TYPE_CHECKING:
    from datasets.files.pairs import Pairs
    from datasets.files.pictures import MadeUp
    from gan.games.spade import Spade


def sean(data: str = "data", from_: str | None = None, **settings: Any) -> Run:
    """SEAN on pictures with label maps: CelebAMask-HQ, ADE20K, Cityscapes, COCO-Stuff, facades, or a folder of yours.

    Args:
        data: The folder of the set, or one with images/ and labels/ of the same names; which one it is is found out.
        from_: A published file, latest_net_G.pth or latest_net_D.pth, the folder of both, or a run, to begin with.
    """
    run = Published(**settings).run(data)
    begin_with(from_, run.game)
    return run


def spade(data: str = "data", **settings: Any) -> Run:
    """SPADE on the same sets: from masks alone, without styles.

    Args:
        data: The folder of the set, or one with images/ and labels/ of the same names; which one it is is found out.
    """
    return Published(style=None, **settings).run(data)


@dataclass(frozen=True)
class Layout:
    """How a set of pictures with label maps is known, and what its published training has of its own."""

    kind: str  # the name of its class in `datasets`
    title: str
    marks: tuple[str, ...]  # folders that only this set has
    wide: int = 1  # how many times as wide as high
    crop: bool = True
    flip: bool = True
    edges: bool = False
    held_out: float = 64


LAYOUTS = (
    Layout("CelebAMask", "CelebAMask-HQ", ("CelebAMask-HQ-mask-anno", "CelebAMask-HQ/CelebAMask-HQ-mask-anno")),
    Layout("ADE20K", "ADE20K", ("annotations/training", "ADEChallengeData2016/annotations/training")),
    Layout("Cityscapes", "Cityscapes", ("gtFine", "leftImg8bit"), wide=2, crop=False, edges=True),
    Layout("CocoStuff", "COCO-Stuff", ("stuffthingmaps",)),
    Layout("Facades", "CMP facades", ("base", "extended")),
    Layout("FolderPairs", "images with label maps", ("labels", "images", "train/labels"), flip=False, held_out=16),
)
FOLDER = LAYOUTS[-1]


def layout_of(data: str) -> Layout:
    """Which set with label maps lies in a folder. A plan without pictures is one of a folder's."""
    from datasets.files.find import absent_data

    root = Path(data).expanduser()
    found = next((each for each in LAYOUTS if any((root / mark).is_dir() for mark in each.marks)), None)
    if found is not None:
        return found
    known = ", ".join(f"{layout.marks[0]}/ ({layout.title})" for layout in LAYOUTS)
    none = UserError(f"there are no label maps in {data}; a set is known by its folder: {known}")
    known_as: Any = made_up(none if root.is_dir() else absent_data(data), kind=FOLDER.kind)[0]
    return next(layout for layout in LAYOUTS if layout.kind == known_as.kind)


def open_splits(layout: Layout, data: str, **how: Any) -> "tuple[Pairs | MadeUp, Pairs | MadeUp]":
    import datasets

    kind: Any = getattr(datasets, layout.kind)
    try:
        if how.get("num_labels", 1) is None:
            how["num_labels"], how["void"] = datasets.FolderPairs.find_labels(data)
            for value, label in how["void"].items():
                say(f"data {data}: {value} in a map is void, label {label}")
        return kind(data, split="train", **how), kind(data, split="val", **how)
    except UserError as error:
        labels = how["num_labels"] or 19 if layout is FOLDER else kind.num_labels
        return made_up(error, size=how["size"], num_labels=labels, edges=how.get("edges", False))


def _said(layout: Layout, train: "Pairs | MadeUp", held_out: int, how: Mapping[str, Any]) -> str:
    """What lies there: sizes, where they are known, and how they become the one that is wanted."""
    (height, width), fit = how["size"], how.get("fit")
    sizes = Counter((across, down) for across, down in getattr(train, "sizes", ()))
    what = f"{layout.title} ({sizes_said(sizes)})" if sizes else layout.title
    fitted = f"resized to {width}x{height}; other shapes are stretched"
    if sizes and all(across * height == down * width for across, down in sizes):
        fitted = f"resized to {width}x{height}"
    elif fit is not None:
        advice = " (--fit crop takes the middle, pad adds what is missing)" if fit == "stretch" else ""
        fitted = f"{FITTED[fit]} to {width}x{height}{advice}"
    count = f"{len(train):,} to train on and {held_out:,} held out"
    known = getattr(train, "label_names", ()) if layout is FOLDER else ()
    named = not all(map(str.isdecimal, known))
    names = f" ({', '.join(known[:5])}{', ...' * (len(known) > 5)})" if named else ""
    return f"{what}, {count}, {train.num_labels} labels{names}; {fitted}"


@dataclass
class Painting:
    """How SEAN paints, or without styles SPADE.

    Args:
        width: Channels of the generator's last block; the blocks before it have more.
        hidden: Channels of the mask branch in each normalisation layer.
        generator_rate: Learning rate of encoder and generator.
        discriminator_rate: Learning rate of the discriminator.
        matching: Weight of the feature-matching loss.
        pixels: Weight of an L1 loss on the pixels, not published; with the perceptual loss off, try 10.
        fake_once: Make the fake once a step for both turns. This saves a generator pass; quality was not compared.
    """

    width: PositiveInt = 64
    hidden: PositiveInt = 128
    generator_rate: PositiveFloat = 1e-4
    discriminator_rate: PositiveFloat = 4e-4
    matching: NonNegativeFloat = 10.0
    pixels: NonNegativeFloat = 0.0
    fake_once: bool = False

    def rules(self, labels: int, steps: int) -> dict[str, Any]:
        """The keywords of the game."""
        names = "generator_rate", "discriminator_rate", "matching", "pixels", "fake_once"
        return {name: getattr(self, name) for name in names} | {"labels": labels, "steps": steps}


@dataclass
class Published(Painting):
    """The published training of SEAN on pictures with label maps, or without styles that of SPADE.

    Args:
        size: Height that pictures and label maps are resized to, and their width; on Cityscapes it is twice that.
        labels: How many labels a folder's maps have, 0 to labels - 1; default: what is found in the maps.
        edges: Show the networks where one thing ends and the next begins; default: on Cityscapes, as published.
        crop: Enlarge pictures by 286/256 and crop a random part; default: as published, on all but Cityscapes.
        fit: How pictures of a folder of yours and their maps get another shape: crop (the middle), pad, or stretch (as
            published).
        background: What padding becomes; in label maps void, or one more label.
        flip: Mirror half of the pictures and exchange labels of left and right; default: on published sets.
        held_out: The share of a folder's pictures that is not trained on, whose names decide which; or how many, the
            last by name. Of a set with a split of its own: how many to score on, and by default 64.
        batch_size: Pictures a step, of all ranks together.
        epochs: Passes over the data; the learning rates fall to zero over the second half.
        max_steps: Steps of the whole training, in place of epochs.
        seed: Decides the networks' first weights and the order of the samples.
        workers: Processes that prepare batches, for each rank; default: as many as it has CPUs, 4 at most.
        style: Length of a region's style code; null for no styles, which makes it SPADE.
        upsamplings: How often the generator doubles its picture; default 5 ("normal"), from 512 pixels 6 ("more").
        perceptual: VGG-19's weights: the path of a file, torchvision (its cache, else a download), or off.
        perceptual_weight: Weight of the perceptual loss.
        perceptual_normalise: Normalise what VGG-19 sees by ImageNet's mean and deviation; published: -1 to 1 as it is.
        recompute: Let the generator keep less for its backward pass and compute it again: less memory, more time.
    """

    size: PositiveInt = 256
    labels: PositiveInt | None = None
    edges: bool | None = None
    crop: bool | None = None
    flip: bool | None = None
    fit: Literal["crop", "pad", "stretch"] = "stretch"
    background: str = "white"
    held_out: PositiveInt | Share | None = 0.02  # runs of before have null: the number of the layout
    batch_size: PositiveInt = 32
    epochs: PositiveInt = 100
    max_steps: PositiveInt | None = None
    seed: Seed = 0
    workers: NonNegativeInt | None = None
    style: PositiveInt | None = 512
    upsamplings: Upsamplings | None = None
    perceptual: str = "torchvision"
    perceptual_weight: NonNegativeFloat = 10.0
    perceptual_normalise: bool = False
    recompute: bool = True

    def run(self, data: str) -> Run:
        """Mistakes are looked for in the order of their cost: the size, then the data, and last the networks."""
        from datasets import GanData

        layout = layout_of(data)
        own = "held_out", "edges", "flip", "crop"
        p = replace(layout, **{name: typed for name in own if (typed := getattr(self, name)) is not None})
        scored, edges = p.held_out if isinstance(p.held_out, int) else 64, p.edges
        how: dict[str, Any] = {"size": (self.size, layout.wide * self.size)}
        if layout is FOLDER:
            how |= {"num_labels": self.labels, "held_out": p.held_out, "fit": self.fit, "background": self.background}
        elif layout.kind in ("Cityscapes", "CocoStuff"):
            how |= {"edges": edges}
        if layout is not FOLDER and self.fit != "stretch":
            raise UserError(f"the pictures of {layout.title} are stretched, as published; leave --fit out")
        if (edges and "edges" not in how) or (self.labels and layout is not FOLDER):
            option = "labels" if self.labels else "edges"
            raise UserError(f"{layout.title} has its own labels, and no choice of {option}; leave --{option} out")
        upsamplings = self.upsamplings or (6 if min(how["size"]) >= 512 else 5)
        check_size(how["size"], upsamplings)
        train, val = open_splits(layout, data, **how)
        say(f"data {data}: {_said(layout, train, len(val), how)}")
        rules: dict[str, Any] = dict(workers=self.workers, seed=self.seed, flip=p.flip, crop=p.crop)
        pairs = GanData(train, val, batch_size=self.batch_size, val_count=scored, **rules)
        pairs.setup()
        steps = self.max_steps or self.epochs * (len(train) // self.batch_size)
        game = self._game(train.num_labels, edges, upsamplings, steps)
        if self.style is None:
            return Run(game, pairs, steps, {"val/paint_error": "error of held-out pictures painted"})
        return Run(game, pairs, steps, {"val/transfer_error": "error of held-out pictures made anew"})

    def _game(self, labels: int, edges: bool, upsamplings: int, steps: int) -> "Spade":
        from gan.games.sean import Sean
        from gan.games.spade import Spade
        from nets.vgg import load_vgg19, vgg

        load = partial(load_vgg19, normalise=self.perceptual_normalise)
        perceptual = perceptual_loss(self.perceptual, vgg.vgg19, load)
        torch.manual_seed(self.seed)
        shape = labels, self.style, self.width, self.hidden, upsamplings
        generator = SeanGenerator(*shape, edges=edges, recompute=self.recompute)
        networks = generator, MultiScaleDiscriminator(labels + edges + 3)
        rules = self.rules(labels, steps) | {"perceptual": self.perceptual_weight}
        if self.style is None:
            return Spade(*networks, perceptual, **rules)
        return Sean(StyleEncoder(self.style), *networks, perceptual, **rules)

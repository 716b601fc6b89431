"""Pictures of a person's own as the data of a run: what `--data PATH` finds there, and how that is fitted."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt

from gan.files.errors import UserError
from gan.runs.run import Pixels, Run, Seed, Share, decodes, made_for, made_up, of_file, say

if TYPE_CHECKING:
    from datasets import GanData
    from datasets.files.pictures import Headers, Pictures
    from gan import GanModule

FITTED = {"crop": "scaled and cropped", "pad": "scaled and padded", "stretch": "stretched"}
COLOURS = {1: "gray", 3: "RGB", 4: "RGBA"}  # by the number of channels
DISTANCE = {"val/distance": "distance of drawn from held-out pictures"}
PLANNED = 64  # pixels of a side, for a plan without pictures and without a size


@dataclass
class PictureOptions:
    """What is typed of all pictures of a person's own.

    Args:
        size: Pixels that pictures become: 256, or width x height: 256x192; default: what fits most of them.
        fit: How a picture of another shape becomes that size: crop (the middle), pad or stretch (as published for
            translations).
        background: What transparent and padded parts become.
        seed: Decides the networks' first weights and the order of the samples.
        workers: Processes that prepare batches, for each rank; default: as many as it has CPUs, 4 at most.
    """

    data: str = "data"
    size: PositiveInt | Pixels | None = None
    channels: PositiveInt | None = None
    fit: Literal["crop", "pad", "stretch"] = "crop"
    background: str = "white"
    flip: bool = False
    held_out: Share = 0.02
    seed: Seed = 0
    workers: NonNegativeInt | None = None
    skip_broken: bool = False
    crop: ClassVar[bool] = False

    def typed_size(self) -> tuple[int, int] | None:
        """Height and width of what is typed as 128 or 256x192."""
        if self.channels not in (None, *COLOURS):
            raise UserError(f"{self.channels} channels are not known; type --channels 1 (gray), 3 (colours) or 4")
        if self.size is None:
            return None
        width, _, height = str(self.size).partition("x")
        return int(height or width), int(width)


def decoded(*sets: "Pictures") -> str:
    """Where these pictures are when they are decoded, and how much room they take."""
    if decodes() and not all(each.decoded for each in sets):
        return "decoded again each time: the disk has no room for the pixels"
    return f"decoded into {sets[0].file.parent}, {-(-sum(each.room for each in sets) // 10**6):,} MB"


def say_left_out(*sets: "Pictures") -> None:
    """Name each picture that --skip-broken has left out."""
    problems = [problem for each in sets for problem in each.problems]
    if problems:
        say("\n  ".join([f"{len(problems):,} broken or tiny left out:", *problems]))


def sizes_said(sizes: Counter[tuple[int, int]]) -> str:
    """The sizes of pictures, by widths and heights."""
    (common, count), *_ = sizes.most_common(1)
    least, most, common = (f"{across}x{down}" for across, down in (min(sizes), max(sizes), common))
    return least if least == most else f"{len(sizes)} sizes from {least} to {most}, {count:,} of {common}"


class Found:
    """The samples of a run, split into those to train on and those held out, which may be none.

    It sets torch's seed: the networks are made next.
    """

    def __init__(self, options: PictureOptions, train: Any, val: Any, begun: "FromFile | None" = None) -> None:
        self.options, self.train, self.val, self.begun = options, train, val, begun
        self.size, self.channels = train.size, train.channels
        self.classes, self.class_names = train.classes, train.class_names
        torch.manual_seed(options.seed)
        self.chosen: dict[str, Any] = {}  # what `Run` says, beside what a game says itself

    def data(self, batch_size: int) -> "GanData":
        """The batches of pictures [B, channels, height, width] in [-1, 1]."""
        from datasets import GanData

        typed, scored = self.options, self.val if self.val is not None and len(self.val) else None
        how: dict[str, Any] = dict(workers=typed.workers, seed=typed.seed, flip=typed.flip, crop=typed.crop)
        return GanData(self.train, scored, batch_size=batch_size, **how)

    def run(
        self, game: "GanModule", batch_size: int, steps: int, scores: dict[str, str], turns: int = 1, **chosen: Any
    ) -> Run:
        """A run of a game on these pictures, with scores where some are held out. `chosen` is what `Run` says."""
        data = self.data(batch_size)
        if hasattr(game, "class_names"):
            game.class_names = self.class_names
        if chosen:
            chosen |= {**self.chosen, "size": f"{self.size[1]}x{self.size[0]}", "batch_size": batch_size}
        texts = {bool: lambda value: str(value).lower(), float: lambda value: f"{value:g}"}
        said = {name: texts.get(type(value), str)(value) for name, value in chosen.items()}
        return Run(game, data, steps, scores if data.val is not None else {}, turns, said)

    def computed_at(self, side: int) -> None:
        """Say where networks that are to be made compute much larger squares than the pictures."""
        if self.begun is None and side > max(self.size):
            self.chosen["networks"] = f"{side}x{side}"
            if max(self.size) < 0.75 * side:
                what = f"the networks compute {side}x{side} for pictures of {self.size[1]}x{self.size[0]}"
                say(f"{what}; with --size {side // 2} they compute a quarter of these pixels")

    def networks(self) -> tuple[Any, Any] | None:
        """The generator and the discriminator of a published file, for these pictures; None if they are to be made.

        The average begins anew.
        """
        if (begun := self.begun) is None:
            return None
        (drawer, judge), path, size = begun.networks, begun.path, f"{self.size[1]}x{self.size[0]}"
        if not begun.fits(self.size):
            side = begun.side
            raise UserError(f"{path} draws {side}x{side}, and pictures have {size}; type --size {side}")
        if drawer.channels != self.channels:
            raise UserError(
                f"{path} draws {drawer.channels} channels, and pictures have {self.channels}; type --channels "
                f"{drawer.channels}"
            )
        if drawer.classes != self.classes:
            advice = "type --classes false" if not drawer.classes else "take other pictures, or another file"
            raise UserError(f"{path} knows {drawer.classes} classes, and pictures have {self.classes}; {advice}")
        drawer.size = self.size
        if begun.saved:
            say(f"weights: G and D of {path}")
        return drawer, judge


class FromFile:
    """The networks of a published file to begin with, by the file, or later by what it has said: see `of_file`."""

    def __init__(self, path: str, *kinds: type) -> None:
        from nets.published.from_noise import made, ours, rule_of
        from nets.published.pickles import Network, read

        self.path, self.saved = path, dict[str, Network]()

        def rules() -> dict[str, Any]:
            with torch.device("cpu"):  # also in a plan, whose networks have no values
                self.saved.update(read(Path(path)))
            if missing := {"G", "D"} - self.saved.keys():
                raise UserError(
                    f"{path} has no '{min(missing)}'; take a file with both networks, such as a training's snapshot"
                )
            return {name: rule_of(self.saved[name]) for name in "GD"}

        said = of_file(rules)
        weights = {} if made_for("plan") else self.saved
        found: list[Any] = [(ours(weights[name]) if weights else made(said.get(name))).train() for name in "GD"]
        if not all(map(isinstance, found, kinds)):
            kind = type(found[0]).__name__
            other = "stylegan2" if kind.startswith("Style") else "r3gan"
            raise UserError(f"{path} has other networks, such as {kind}; type python -m gan.fit {other}")
        self.networks: tuple[Any, Any] = (found[0], found[1])
        self.side: int = found[1].side

    def fits(self, size: tuple[int, int]) -> bool:
        """Whether the middle of what the generator draws can be of a height and width."""
        return self.side // 2 < max(size) <= self.side


@dataclass
class OnPictures(PictureOptions):
    """Pictures to train on, with or without classes.

    Args:
        data: A folder of pictures, a zip, tar or Parquet file, a folder of those, or a name such as cifar10.
        channels: 1 for gray, 3 for colours, 4 for colours and opacity; default: 1 if all are gray, else 3.
        flip: Mirror half of the pictures; not for letters, or other things that have a left and a right.
        classes: Whether sub-folders and labels are classes; default: found out, and said.
        held_out: The share of the pictures that is scored on and not trained on; their names decide which.
        skip_broken: Leave pictures out that cannot be read, or are tiny.
    """

    classes: bool | None = None

    def find(self, weights: str | None = None, *kinds: type) -> Found:
        """Look, decode what is new, and say in one line what there is.

        Of published `weights` to begin with, if any are typed, the networks are of these kinds, and the size fits them.
        """
        from datasets.files.decoding import Frame
        from datasets.files.find import find_source
        from datasets.files.pictures import Headers, Pictures

        size, begun = self.typed_size(), FromFile(weights, *kinds) if weights else None
        try:
            source = find_source(self.data, self.classes)
        except UserError as error:
            size = size or (PLANNED if begun is None else begun.side)
            return Found(self, *made_up(error, size=size, channels=self.channels or 3), begun)
        headers = Headers(source)
        fitting, why = headers.size()
        if begun is not None and not begun.fits(fitting):
            fitting, why = (begun.side, begun.side), f"as {Path(begun.path).name} draws"
        frame = Frame(*(size or fitting), self.channels or headers.channels, self.fit, self.background)
        pictures = Pictures(source, frame, self.skip_broken, decodes())
        found = Found(self, *pictures.split(self.held_out), begun)
        say(self._said(found, pictures, headers, "as typed" if size else why))
        say_left_out(pictures)
        return found

    def _said(self, found: Found, pictures: "Pictures", headers: "Headers", why: str) -> str:
        source, (height, width), sizes = headers.source, found.size, sizes_said(headers.sizes)
        modes = ", ".join(f"{mode} {count:,}" for mode, count in headers.modes.most_common())
        classes = "no classes"
        if source.labels is not None:
            shown = ", ".join(found.class_names[:5]) + (", ..." if found.classes > 5 else "")
            classes = f"{found.classes} classes ({shown}; --classes false for none)"
        fit = f"{FITTED[self.fit]} to {width}x{height} ({why}), {COLOURS[found.channels]}"
        if found.channels != 4 and any(mode.endswith(("+", "A")) for mode in headers.modes):
            fit += f" on {self.background} (--channels 4 keeps transparency)"
        notes = [
            f"data {self.data}: {len(source):,} picture{'s' * (len(source) != 1)} in {source.kind} ({sizes}; {modes})",
            classes,
            fit,
            f"{len(found.train):,} to train on and {len(found.val):,} held out",
        ]
        notes += [f"not read: {source.note}"] if source.note else []
        return "; ".join([*notes, decoded(pictures)])

"""Pictures of a person's own as the data of a run: what `--data PATH` finds there, and how that is fitted."""

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jsonargparse.typing import NonNegativeInt, PositiveInt

from gan.files.errors import UserError, printable, this_rank
from gan.runs.run import Fit, Pixels, Seed, Share, is_planned

if TYPE_CHECKING:
    from datasets import GanData
    from datasets.files.pictures import Headers, Pictures

PLANNED = 64  # pixels of a side, for a plan without pictures and without a size


@dataclass
class OnPictures:
    """Pictures to train on, with or without classes.

    Args:
        data: A folder of pictures, a zip, tar or Parquet file, a folder of those, or a name such as cifar10.
        size: Pixels that pictures become: 128, or width x height: 256x192; default: what fits most of them.
        channels: 1 for gray, 3 for colours, 4 for colours and opacity; default: 1 if all are gray, else 3.
        fit: How a picture of another shape becomes that size: crop (the middle), pad or stretch.
        background: What transparent and padded parts become.
        flip: Mirror half of the pictures; not for letters, or other things that have a left and a right.
        classes: Whether sub-folders and labels are classes; default: found out, and said.
        held_out: The share of the pictures that is scored on and not trained on; their names decide which.
        seed: Decides the networks' first weights and the order of the samples.
        workers: Processes that prepare batches, for each rank.
        skip_broken: Leave pictures out that cannot be read, or are tiny.
    """

    data: str = "data"
    size: PositiveInt | Pixels | None = None
    channels: PositiveInt | None = None
    fit: Fit = "crop"
    background: str = "white"
    flip: bool = False
    classes: bool | None = None
    held_out: Share = 0.02
    seed: Seed = 0
    workers: NonNegativeInt = 4
    skip_broken: bool = False

    def find(self) -> "FoundPictures":
        """Look, decode what is new, and say in one line what there is."""
        from datasets.files.decoding import Frame
        from datasets.files.find import find_source
        from datasets.files.pictures import Headers, Pictures

        size = _typed_size(self.size)
        if self.channels not in (None, 1, 3, 4):
            raise UserError(f"{self.channels} channels are not known; type --channels 1 (gray), 3 (colours) or 4")
        if self.fit not in ("crop", "pad", "stretch"):
            raise UserError(f"fit {self.fit!r} is not known; type --fit crop, pad or stretch")
        try:
            source = find_source(self.data, self.classes)
        except UserError:
            if not is_planned():
                raise
            return FoundPictures(self, _StandIn(size or (PLANNED, PLANNED), self.channels or 3))
        headers = Headers(source)
        fitting, why = headers.size()
        frame = Frame(*(size or fitting), self.channels or headers.channels, self.fit, self.background)
        found = FoundPictures(self, Pictures(source, frame, self.skip_broken))
        if this_rank() == 0:
            print(printable(found.said(headers, "as typed" if size else why)), file=sys.stderr, flush=True)
        return found


class FoundPictures:
    """The pictures of a run, split into those to train on and those held out."""

    def __init__(self, options: OnPictures, pictures: "Pictures | _StandIn") -> None:
        self.options, self.pictures = options, pictures
        self.size, self.channels = pictures.size, pictures.channels
        self.classes, self.class_names = pictures.classes, pictures.class_names
        self.train, self.val = pictures.split(options.held_out)

    def __len__(self) -> int:
        return len(self.train)

    def data(self, batch_size: int) -> "GanData":
        """The batches: {"image": [B, channels, height, width] in [-1, 1]}, and with classes {"class": [B]} too."""
        from datasets import GanData

        return GanData(
            self.train,
            self.val if len(self.val) else None,
            batch_size=batch_size,
            workers=self.options.workers,
            seed=self.options.seed,
            flip=self.options.flip,
        )

    def said(self, headers: "Headers", why: str) -> str:
        """What was found and decided, in one line."""
        pictures, source = self.pictures, headers.source
        (least, _), (most, _) = (min(headers.sizes.items()), max(headers.sizes.items()))
        (common, count), *_ = headers.sizes.most_common(1)
        sizes = f"{least[0]}x{least[1]}" if len(headers.sizes) == 1 else f"{len(headers.sizes)} sizes"
        if len(headers.sizes) > 1:
            sizes += f" from {least[0]}x{least[1]} to {most[0]}x{most[1]}, {count:,} of {common[0]}x{common[1]}"
        modes = ", ".join(f"{mode} {count:,}" for mode, count in headers.modes.most_common())
        height, width = self.size
        done = {"crop": "cropped", "pad": "padded", "stretch": "stretched"}[self.options.fit]
        kinds = {1: "gray", 3: "RGB", 4: "RGBA"}[self.channels]
        classes = "no classes"
        if source.labels is not None and source.labels.ndim == 1:
            shown = ", ".join(self.class_names[:5]) + (", ..." if self.classes > 5 else "")
            classes = f"{self.classes} classes ({shown}; --classes false for none)"
        elif source.labels is not None:
            classes = f"label vectors of {self.classes} numbers (--classes false for none)"
        seen = any(mode.endswith(("+", "A")) for mode in headers.modes) and self.channels != 4
        notes = [
            f"data {self.options.data}: {len(source):,} pictures in {source.kind} ({sizes}; {modes})",
            classes,
            f"{done} to {width}x{height} {kinds} ({why})" + (f", on {self.options.background}" if seen else ""),
            f"{len(self.train):,} to train on and {len(self.val):,} held out",
        ]
        notes += [f"{len(self.pictures.problems):,} broken or tiny left out"] if self.pictures.problems else []
        notes += [f"not pictures: {source.note}"] if source.note else []
        notes += [] if pictures.decoded else ["decoded again each time: the disk has no room for the pixels"]
        return "; ".join(notes)


class _StandIn:
    """Pictures for a plan: the right shape, all black."""

    classes, class_names, problems, decoded = 0, (), (), True

    def __init__(self, size: tuple[int, int], channels: int) -> None:
        self.size, self.channels = size, channels

    def split(self, held_out: float) -> "tuple[_StandIn, _StandIn]":
        return self, self

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict:
        import torch
        from torchvision import tv_tensors

        return {"image": tv_tensors.Image(torch.zeros(self.channels, *self.size, dtype=torch.uint8))}


def _typed_size(size: int | str | None) -> tuple[int, int] | None:
    """Height and width of what is typed as 128 or 256x192."""
    if size is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})?", str(size)):
        raise UserError(f"size {size} is not known; type --size 128, or width x height: --size 256x192")
    width, _, height = str(size).partition("x")
    return int(height or width), int(width)

"""Two sides of pictures as the data of a translation: what `--data PATH` finds there, in pairs or without."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jsonargparse.typing import NonNegativeInt, PositiveInt

from gan.files.errors import UserError
from gan.runs.pictures import PLANNED, check_frame, typed_size
from gan.runs.run import Fit, Pixels, Seed, Share, is_planned, say

if TYPE_CHECKING:
    from datasets import GanData
    from datasets.files.sides import Both, PairedSides, Side


@dataclass
class OnSides:
    """Pictures of two kinds, A and B, to translate from one to the other.

    Args:
        data: A folder or zip with A/ and B/, or trainA/, trainB/, testA/ and testB/, or any two folders; or pictures
            that are A on the left and B on the right.
        size: Pixels that pictures become: 256, or width x height: 256x192; default: what fits most of them.
        channels: 1 for gray, 3 for colours, 4 for colours and opacity; default: 1 for a side that is all gray, else 3.
        fit: How a picture of another shape becomes that size: crop (the middle), pad or stretch (as published).
        background: What transparent and padded parts become.
        crop: Enlarge pictures by 286/256 and crop a random part, as published.
        flip: Mirror half of the pictures, both of a pair; not for letters, or what has a left and a right.
        held_out: The share that is scored on and not trained on, where no folder is called test or val.
        seed: Decides the networks' first weights and the order of the samples.
        workers: Processes that prepare batches, for each rank.
        skip_broken: Leave pictures out that cannot be read, are tiny or have no partner.
    """

    data: str = "data"
    size: PositiveInt | Pixels | None = None
    channels: PositiveInt | None = None
    fit: Fit = "crop"
    background: str = "white"
    crop: bool = True
    flip: bool = True
    held_out: Share = 0.02
    seed: Seed = 0
    workers: NonNegativeInt = 4
    skip_broken: bool = False

    def find(self, *, paired: bool, backwards: bool = False) -> "FoundSides":
        """Look, decode what is new, and say in one line what there is. `backwards` exchanges A and B."""
        from datasets.files.made_up import MadeUp
        from datasets.files.pictures import Headers
        from datasets.files.sides import PairedSides, Side, UnpairedSides, find_sides

        size = typed_size(self.size)
        check_frame(self.channels, self.fit)
        kind = PairedSides if paired else UnpairedSides
        try:
            train, val, said = find_sides(self.data, paired=paired, held_out=self.held_out, leave_out=self.skip_broken)
        except UserError:
            if not is_planned():
                raise
            size = size or (PLANNED, PLANNED)
            side = Side(MadeUp(self._enlarged(size), self.channels or 3), size)
            return FoundSides(self, kind(side, side), kind(side, side), (self.channels or 3,) * 2)
        if backwards:
            train, val, said = train[::-1], val[::-1], f"{said}, from B to A"
        headers = Headers(train[0]), Headers(train[1])
        size = size or headers[0].size()[0]
        channels = self.channels or headers[0].channels, self.channels or headers[1].channels
        shown = " and ".join(dict.fromkeys({1: "gray", 3: "RGB", 4: "RGBA"}[count] for count in channels))
        fit = {"crop": "cropped", "pad": "padded", "stretch": "stretched"}[self.fit]
        say(f"{said}; {fit} to {size[1]}x{size[0]}, {shown}")
        some = all(map(len, val))
        return FoundSides(
            self,
            kind(*self._opened(train, self._enlarged(size), channels, size, paired)),
            kind(*self._opened(val, size, channels, size, paired)) if some else None,
            channels,
        )

    def _enlarged(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size of which a random part is cropped in training."""
        return (round(size[0] * 286 / 256), round(size[1] * 286 / 256)) if self.crop else size

    def _opened(
        self, parts: "Both", stored: tuple[int, int], channels: tuple[int, int], size: tuple[int, int], paired: bool
    ) -> "list[Side]":
        """Both sides of a split, decoded."""
        from datasets.files.decoding import Frame
        from datasets.files.pictures import Pictures
        from datasets.files.sides import Side, aligned

        opened = [
            Pictures(part, Frame(*stored, count, self.fit, self.background), self.skip_broken)
            for part, count in zip(parts, channels, strict=True)
        ]
        return [Side(each, size) for each in (aligned(*opened) if paired else opened)]


class FoundSides:
    """The pictures of a translation, split into those to train on and those held out."""

    def __init__(
        self, options: OnSides, train: "PairedSides", val: "PairedSides | None", channels: tuple[int, int]
    ) -> None:
        self.options, self.train, self.val, self.channels = options, train, val, channels
        self.size = train.size

    def __len__(self) -> int:
        return len(self.train)

    def data(self, batch_size: int) -> "GanData":
        """The batches: {"a", "b"}, each [B, channels, height, width] in [-1, 1]."""
        from datasets import GanData

        return GanData(
            self.train,
            self.val,
            batch_size=batch_size,
            workers=self.options.workers,
            seed=self.options.seed,
            flip=self.options.flip,
            crop=self.options.crop,
        )

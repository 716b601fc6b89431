"""Two sides of pictures as the data of a translation: what `--data PATH` finds there, in pairs or without."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jsonargparse.typing import NonNegativeInt, PositiveInt

from gan.files.errors import UserError
from gan.runs.pictures import PLANNED, check_frame, typed_size
from gan.runs.run import Fit, Pixels, Seed, Share, is_planned, say

if TYPE_CHECKING:
    from datasets import GanData
    from datasets.files.sides import PairedSides, Part, Side, Sides


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
        from datasets.files.sides import PairedSides, Side, UnpairedSides, find_sides

        size = typed_size(self.size)
        check_frame(self.channels, self.fit)
        kind = PairedSides if paired else UnpairedSides
        try:
            sides = find_sides(self.data, paired=paired, held_out=self.held_out, leave_out=self.skip_broken)
        except UserError:
            if not is_planned():
                raise
            size = size or (PLANNED, PLANNED)
            made_up = Side(MadeUp(self._enlarged(size), self.channels or 3), size)
            both = kind(made_up, made_up)
            return FoundSides(self, both, both, (self.channels or 3,) * 2)
        return self._open(sides, size, kind, backwards)

    def _open(
        self, sides: "Sides", size: tuple[int, int] | None, kind: "type[PairedSides]", backwards: bool
    ) -> "FoundSides":
        from datasets.files.pictures import Headers
        from datasets.files.sides import PairedSides

        a, b = Headers(sides.a), Headers(sides.b)
        size = size or a.size()[0]
        channels = self.channels or a.channels, self.channels or b.channels
        train = self._side(sides.a, sides.b, self._enlarged(size), channels, size, kind is PairedSides)
        val = self._side(sides.held_a, sides.held_b, size, channels, size, kind is PairedSides)
        names = {1: "gray", 3: "RGB", 4: "RGBA"}
        fit = {"crop": "cropped", "pad": "padded", "stretch": "stretched"}[self.fit]
        shown = names[channels[0]] if channels[0] == channels[1] else f"{names[channels[0]]} and {names[channels[1]]}"
        way = ", from B to A" if backwards else ""
        say(f"{sides.said}; {fit} to {size[1]}x{size[0]}, {shown}{way}")
        assert train is not None, "find_sides has refused a side without pictures"
        if backwards:
            train, val, channels = train[::-1], val and val[::-1], channels[::-1]
        return FoundSides(self, kind(*train), val and kind(*val), channels)

    def _enlarged(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size of which a random part is cropped in training."""
        return (round(size[0] * 286 / 256), round(size[1] * 286 / 256)) if self.crop else size

    def _side(
        self,
        a: "Part",
        b: "Part",
        stored: tuple[int, int],
        channels: tuple[int, int],
        size: tuple[int, int],
        both: bool,
    ) -> "tuple[Side, Side] | None":
        """Both sides of a split; None where it has no pictures."""
        from datasets.files.decoding import Frame
        from datasets.files.pictures import Pictures
        from datasets.files.sides import Side, aligned

        if not (len(a) and len(b)):
            return None
        opened = [
            Pictures(part, Frame(*stored, count, self.fit, self.background), self.skip_broken)
            for part, count in zip((a, b), channels, strict=True)
        ]
        one, other = aligned(*opened) if both else opened
        return Side(one, size), Side(other, size)


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

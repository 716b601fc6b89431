"""Two sides of pictures as the data of a translation: what `--data PATH` finds there, in pairs or without."""

from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.pictures import COLOURS, FITTED, PLANNED, Found, PictureOptions
from gan.runs.run import is_planned, say


@dataclass
class OnSides(PictureOptions):
    """Pictures of two kinds, A and B, to translate from one to the other, and how that is trained.

    Args:
        data: A folder or zip with A/ and B/, or trainA/, trainB/, testA/ and testB/, or any two folders; for
            pix2pix also pictures that are A on the left and B on the right.
        channels: 1 for gray, 3 for colours, 4 for colours and opacity; default: 1 for a side that is all gray, else 3.
        crop: Enlarge pictures by 286/256 and crop a random part, as published.
        flip: Mirror half of the pictures, both of a pair; not for letters, or what has a left and a right.
        held_out: The share that is scored on and not trained on, where no folder is called test or val.
        skip_broken: Leave pictures out that cannot be read, are tiny or have no partner.
        epochs: How often all pairs, or the pictures of the larger folder, are shown at the full rate; published: 100,
            200 (cut), 150 (fastcut).
        falling_epochs: How often after that, while the rate falls to zero; published: 100, 200 (cut), 50 (fastcut).
        max_steps: Steps of the whole training, in place of epochs; the rate falls over its second half.
        batch_size: Pairs, or pictures of each kind, a step, of all ranks together.
        width: Channels of the first layers: of all networks, or where judge_width can be typed of the generator.
        layers: How often a PatchGAN halves a picture; with 3 it judges patches of 70 pixels.
        rate: Learning rate of all networks.
        from_: A published file, such as latest_net_G.pth, or the folder of several, to begin with.
    """

    flip: bool = True
    crop: bool = True
    epochs: PositiveInt | None = None
    falling_epochs: NonNegativeInt | None = None
    max_steps: PositiveInt | None = None
    batch_size: PositiveInt = 1
    width: PositiveInt = 64
    layers: PositiveInt = 3
    rate: PositiveFloat = 2e-4
    from_: str | None = None

    def begin(
        self, full: int = 100, after: int = 100, ahead: int = 2, *, paired: bool = False, backwards: bool = False
    ) -> tuple[Found, int, Any]:
        """The pictures, the steps of the training, and how the rate falls: after the `full` epochs in those `after`."""
        from gan.games.pix2pix import epoch_decay, linear_decay

        found = self.find(paired=paired, backwards=backwards)
        a, b = found.channels
        if a != b and not paired:
            raise UserError(f"{self.data} has pictures of {a} and of {b} channels; type --channels 3")
        torch.manual_seed(self.seed)
        if self.max_steps is not None:
            return found, self.max_steps, linear_decay(self.max_steps)
        full, after = self.epochs or full, after if self.falling_epochs is None else self.falling_epochs
        batches = max(1, len(found.train) // self.batch_size)
        return found, (full + after) * batches, epoch_decay(full, after, batches, ahead)

    def find(self, *, paired: bool, backwards: bool = False) -> Found:
        """Look, decode what is new, and say in one line what there is. `backwards` exchanges A and B."""
        from datasets.files.decoding import Frame
        from datasets.files.made_up import MadeUp
        from datasets.files.pictures import Headers, Pictures
        from datasets.files.sides import Both, PairedSides, Side, UnpairedSides, aligned, find_sides

        typed = self.typed_size()
        kind = PairedSides if paired else UnpairedSides
        try:
            train, val, said = find_sides(self.data, paired=paired, held_out=self.held_out, leave_out=self.skip_broken)
        except UserError:
            if not is_planned():
                raise
            size = typed or (PLANNED, PLANNED)
            side = Side(MadeUp(self._enlarged(size), self.channels or 3), size)
            return Found(self, kind(side, side), kind(side, side))
        if backwards:
            train, val, said = train[::-1], val[::-1], f"{said}, from B to A"
        headers = Headers(train[0]), Headers(train[1])
        size = typed or headers[0].size()[0]
        channels = self.channels or headers[0].channels, self.channels or headers[1].channels
        shown = " and ".join(dict.fromkeys(COLOURS[count] for count in channels))
        say(f"{said}; {FITTED[self.fit]} to {size[1]}x{size[0]}, {shown}")

        def opened(parts: Both, stored: tuple[int, int]) -> PairedSides:
            """Both sides of a split, decoded."""
            frames = [Frame(*stored, count, self.fit, self.background) for count in channels]
            both = [Pictures(part, frame, self.skip_broken) for part, frame in zip(parts, frames, strict=True)]
            return kind(*(Side(each, size) for each in (aligned(*both) if paired else both)))

        return Found(self, opened(train, self._enlarged(size)), opened(val, size) if all(map(len, val)) else None)

    def _enlarged(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size of which a random part is cropped in training."""
        return (round(size[0] * 286 / 256), round(size[1] * 286 / 256)) if self.crop else size

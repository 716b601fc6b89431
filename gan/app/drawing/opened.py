"""`gan.open`: a run or a published file, with what `python -m gan.sample` does with it as methods."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Unpack

import torch
from PIL import Image
from tqdm import tqdm

from gan.app.drawing.drawer import FILES, Drawer, How
from gan.app.drawing.edits import Edits
from gan.app.drawing.numbers import Numbers, numbers, once
from gan.app.painting.actions import Paintings, Shown, file_name
from gan.app.painting.grids import picture, png
from gan.app.painting.painter import has_styles
from gan.app.painting.reopen import SavedRun, in_turns, open_run, ranks_here
from gan.app.painting.sheet import Columns, Sheet, into, writing
from gan.files.errors import UserError
from gan.games.from_noise import FromNoise

TOGETHER = 64  # pictures that a rank draws, and its threads compress, at a time


class Drawings(Edits):
    """A run whose game draws from noise, or a published file, opened: pictures by their seeds."""

    kind, about = "seeds", "it draws from seeds"
    default = "draw"

    def __init__(self, drawer: Drawer, run: SavedRun | None = None) -> None:
        self.drawer, self.run = drawer, run

    @property
    def title(self) -> str:
        return self.drawer.title if self.run is None else super().title

    def path(self, name: str, suffix: str) -> Path:
        if self.run is None:
            return Path(f"{Path(self.drawer.title).stem}-{name}{suffix}")
        return super().path(name, suffix)

    def stand(self, batches: int) -> None:
        self.drawer.stand(batches)

    def draw(self, seeds: Numbers = "0-63", **how: Unpack[How]) -> Sheet:
        listed = once(seeds)
        images = self.drawer.images(listed, **how)
        return Sheet("seeds", singles=dict(zip((f"seed{seed:04d}" for seed in listed), images, strict=True)))

    @torch.no_grad()
    def mix(
        self,
        rows: Numbers = "0-3",
        columns: Numbers = "4-9",
        layers: Numbers | None = None,
        **how: Unpack[How],
    ) -> Sheet:
        drawer, down, across = self.drawer, once(rows, "--rows"), once(columns, "--columns")
        own, other = (drawer.w_of(seeds, **how) for seeds in (down, across))
        taken = range(drawer.layers // 2, drawer.layers) if layers is None else numbers(layers, "--layers")
        if wrong := [layer for layer in taken if layer >= drawer.layers]:
            raise UserError(f"there is no layer {wrong[0]}; type --layers and some of 0 to {drawer.layers - 1}")
        is_taken = torch.isin(torch.arange(drawer.layers), torch.tensor([*taken], dtype=torch.int64))[:, None]
        mixed = torch.where(is_taken.to(own.device), other[None], own[:, None])
        drawn = map(drawer.from_w, (own, other, mixed.flatten(0, 1)))
        left, top, cells = ((picture(each, transparent=True) for each in part) for part in drawn)
        singles = dict(zip((f"{row}-with-{column}" for row in down for column in across), cells, strict=True))
        sheet: Columns = {"": [None, *left]}
        for seed, head in zip(across, top, strict=True):
            sheet[f"seed {seed}"] = [head, *(singles[f"{row}-with-{seed}"] for row in down)]
        return Sheet("mix", sheet, ["", *(f"seed {row}" for row in down)], singles)

    def classes(self, seeds: Numbers = "0-7", truncation: float = 1.0, cutoff: int | None = None) -> Sheet:
        drawer, listed = self.drawer, once(seeds)
        names = drawer.class_names or [f"class {number}" for number in range(drawer.classes)]
        if not names:
            raise UserError(f"the network has no classes; type python -m gan.sample {drawer.title} draw")
        singles = {}
        for number, name in enumerate(names):
            images = drawer.images(listed, label=number, truncation=truncation, cutoff=cutoff)
            singles |= zip((f"{name}-{seed}" for seed in listed), images, strict=True)
        sheet: Columns = {f"seed {seed}": [singles[f"{name}-{seed}"] for name in names] for seed in listed}
        return Sheet("classes", sheet, names, singles)

    def interpolate(self, between: Numbers = (0, 1, 2, 3, 0), frames: int = 60, **how: Unpack[How]) -> Sheet:
        seeds = numbers(between, "--between")
        if len(seeds) < 2:
            raise UserError(f"--between takes two seeds or more and got {len(seeds)}; type --between 3 5 9")
        shares = torch.linspace(0, 1, frames).tolist()

        def moving() -> Iterator[Image.Image]:
            for leg, ends in enumerate(pairwise(seeds)):
                here = shares[min(leg, 1) :]  # a leg begins where the one before has ended
                for first in range(0, len(here), self.drawer.at_once):
                    part = here[first : first + self.drawer.at_once]
                    yield from map(picture, self.drawer.between(ends, part, **how))

        return Sheet(file_name("interpolate", [str(seed) for seed in seeds]), frames=moving)

    def files(self, file: str | Path | None = None, count: int = 50_000, **how: Unpack[How]) -> list[Path]:
        """Write the pictures of the first seeds into a folder, or a zip, for a program that scores them.

        Where torch.distributed is initialised, the ranks share the work, and the first one writes.
        """
        path, world = Path(file or self.path(f"{count}-pictures", ".zip")), ranks_here()
        parts = (range(first, min(first + TOGETHER, count)) for first in range(0, count, TOGETHER))
        numbered, first = iter(range(count)), world.rank == 0
        with (
            writing(path),
            into(path) if first else nullcontext(lambda name, content: None) as write,
            ThreadPoolExecutor() as pool,
            tqdm(total=count, disable=not first) as bar,
        ):
            for seeds, spare in in_turns(parts, world):
                made = [] if spare else list(pool.map(_compressed, self.drawer.images(seeds, **how)))
                for content in chain.from_iterable(world.gather(made)):
                    write(f"seed{next(numbered):06d}.png", content)
                    bar.update()
        return [path]


def _compressed(image: Image.Image) -> bytes:
    return png(image, compress_level=1)


def open(path: str | Path = "auto", device: str = "auto", **options: Any) -> Shown:
    """Open a run's folder, a checkpoint inside one, the newest run (`auto`), or a published file (.pkl, .pth).

    `options` are those of `gan.app.painting.reopen.open_run`, such as `data=` where the run's pictures have moved.
    """
    if str(path).lower().endswith(FILES):
        return Drawings(Drawer.of_file(Path(path), device))
    run = open_run(str(path), device=device, **options)
    if isinstance(run.run.game, FromNoise):
        return Drawings(Drawer.of_run(run), run)
    return Paintings(run) if has_styles(run) else Shown(run)

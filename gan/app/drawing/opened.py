"""`gan.open`: a run or a published file from Python, with what `python -m gan.sample` does as methods."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from gan.app.drawing.drawer import Drawer
from gan.app.painting import grids
from gan.app.painting.painter import Painter, has_styles
from gan.app.painting.reopen import SavedRun, open_run
from gan.games.from_noise import FromNoise


class Shown:
    """A run of any game, opened."""

    def __init__(self, run: SavedRun | None) -> None:
        self.run = run


class Drawings(Shown):
    """A run whose game draws from noise, or a published file: its pictures, by their seeds."""

    def __init__(self, drawer: Drawer, run: SavedRun | None = None) -> None:
        super().__init__(run)
        self.drawer = drawer

    def sample(
        self, seeds: Iterable[int] = range(8), label: int | None = None, psi: float = 1.0, cutoff: int | None = None
    ) -> list[Image.Image]:
        """The picture of each seed."""
        return [grids.picture(each) for each in self.drawer.pictures(list(seeds), label, psi, cutoff)]


class Paintings(Shown):
    """A run of SEAN: label maps, painted in the styles of pictures."""

    run: SavedRun

    def __init__(self, run: SavedRun, seed: int = 0) -> None:
        super().__init__(run)
        self.painter = Painter(run, seed)


def open(path: str | Path = "auto", device: str = "auto", **options: Any) -> Shown:
    """Open a run's folder, a checkpoint inside one, the newest run (`auto`), or a published file of networks (.pkl).

    `options` are those of `gan.app.painting.reopen.open_run`, such as `data=` where the run's pictures have moved.
    """
    if str(path).lower().endswith(".pkl"):
        return Drawings(Drawer.of_file(Path(path), device))
    run = open_run(str(path), device=device, **options)
    if isinstance(run.run.game, FromNoise):
        return Drawings(Drawer.of_run(run), run)
    return Paintings(run) if has_styles(run) else Shown(run)

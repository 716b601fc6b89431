"""What `python -m gan.sample` does with a run of SEAN."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TypedDict, Unpack

import torch
from PIL import Image
from torch import Tensor

from gan.app.outputs import say
from gan.app.sampling import grids
from gan.app.sampling.painter import Painter, Picture, Styles, regions
from gan.app.sampling.sheet import Columns, Sheet, save_png, unused_title
from gan.app.sampling.shown import Shown, Words, file_name, words
from gan.files.errors import UserError
from gan.files.system import quoted


def after(word: str, given: Words) -> list[str]:
    """A part of a file's name that another list cannot be taken for: `--to 1 --region 2` is not `--to 1 2`."""
    return [] if given is None else [word, *words(given)]


class How(TypedDict, total=False):
    """What is done where styles are missing, see `StyleSource`; and the seed of SEAN's noise."""

    missing: str
    mean_of: int
    seed: int


class StyleSource:
    """Where styles are taken from, as the command line names it: a picture, a file of styles, or `mean`.

    `missing` says how a region is painted that has no style here: `mean` takes the mean styles of `among` training
    pictures, `own` the painted picture's own style, and `zero` no style.
    """

    def __init__(self, painter: Painter, which: str, missing: str = "mean", among: int = 1000) -> None:
        self.painter, self.missing, self.among = painter, missing, among
        self._noted: dict[tuple[str, str], set[int]] = {}
        self.picture: Picture | None = None
        self.image: Tensor | None = None
        if which == "mean":
            self.title, self.styles = "mean", painter.mean(self.among)
        elif which.endswith(".pt"):
            self.title, self.styles = Path(which).stem, painter.load(Path(which))
        else:
            self.picture = painter.picture(which)
            self.title, self.image, self.styles = self.picture.title, self.picture.image, painter.styles(self.picture)

    def on(
        self, picture: Picture, chosen: list[int] | None = None, edited: bool = False, rest: Styles | None = None
    ) -> Styles:
        """The styles to paint a picture's label map in.

        All of them are from here, or with `chosen` only those regions' styles; the `rest` are the picture's own.
        Missing styles are replaced as `missing` says. But on the picture that the styles are from, or on an `edited`
        map of it, no region of that picture counts as missing: a region too small for a style is painted without one.
        """
        own = self.picture
        known = own.regions if own is not None and (edited or _same(own, picture)) else ()
        lacking = [region for region in self.styles.lacking(picture.regions) if region not in known]
        if chosen is None:
            return self._with_replaced(lacking, picture)
        absent = [region for region in chosen if region not in picture.regions]
        self._note(f"picture {picture.title} lacks", absent, "nothing to change there")
        filled = self._with_replaced([region for region in lacking if region in chosen], picture)
        return (self.painter.styles(picture) if rest is None else rest).taking(filled, chosen)

    def _with_replaced(self, lacking: list[int], picture: Picture) -> Styles:
        if not lacking or self.missing == "zero":
            return self.styles
        whose = f"styles of {self.title} lack"
        if self.missing == "own":
            self._note(whose, lacking, "painted in the picture's own")
            return self.styles.taking(self.painter.styles(picture), lacking)
        mean = self.painter.mean(self.among)
        self._note(whose, [region for region in lacking if mean.present[region]], "painted in the mean styles")
        self._note(whose, mean.lacking(lacking), "as do all pictures that the mean is of; painted without style")
        return self.styles.taking(mean, lacking)

    def notes(self) -> list[str]:
        """Which styles were missing since this was asked last, and what was done, for the user to read."""
        names, noted, self._noted = self.painter.label_names, self._noted, {}
        return [f"{who} {', '.join(names[k] for k in sorted(found))}: {what}" for (who, what), found in noted.items()]

    def _note(self, who: str, which: Sequence[int], what: str) -> None:
        if which:
            self._noted.setdefault((who, what), set()).update(which)


def _same(one: Picture, other: Picture) -> bool:
    if one.image is None or other.image is None:
        return False
    return torch.equal(one.image, other.image) and torch.equal(one.label, other.label)


class Paintings(Shown):
    """A run of SEAN, opened: label maps, painted in the styles of pictures.

    Pictures and styles are named as on the command line: by the number of a held-out picture, `train:5`, or by files.
    """

    kind, about = "styles", "its game paints in styles"
    default = "reconstruct"

    @cached_property
    def painter(self) -> Painter:
        return Painter(self.saved)

    def _sources(
        self, which: Sequence[str] = (), missing: str = "mean", mean_of: int = 1000, seed: int = 0
    ) -> tuple[Painter, list[StyleSource]]:
        self.painter.seed = seed
        return self.painter, [StyleSource(self.painter, name, missing, mean_of) for name in which]

    def _regions(self, region: Words) -> list[int] | None:
        return None if region is None else regions(words(region), self.painter.label_names)

    def reconstruct(self, picture: Words = None, count: int = 8, seed: int = 0) -> Sheet:
        painter, _ = self._sources(seed=seed)
        which = words(picture) or [str(number) for number in range(min(count, len(painter.val)))]
        chosen = [painter.picture(each) for each in which]
        made = [painter.paint(each, painter.styles(each)) for each in chosen]
        columns = {"labels": [p.label for p in chosen], "picture": [p.image for p in chosen], "output": made}
        titles = list(map(_row, chosen))
        return Sheet(file_name("reconstruct", words(picture)), columns, titles, dict(zip(titles, made, strict=True)))

    def transfer(self, from_: Words = None, to: Words = None, region: Words = None, **how: Unpack[How]) -> Sheet:
        few = [str(number) for number in range(min(5, len(self.painter.val)))]
        styled, shapes = words(from_) or few, words(to) or few
        pictures, chosen = list(map(self.painter.picture, shapes)), self._regions(region)
        painter, sources = self._sources(styled, **how)
        name = file_name("transfer", ["from", *styled, "to", *shapes, *after("region", region)])

        # The first row shows the styles' pictures, the first columns the pictures to paint; the rest is painted.
        columns: Columns = {
            "labels": [None, *(p.label for p in pictures)],
            "picture": [None, *(p.image for p in pictures)],
        }
        singles = {}
        for source in sources:
            made = [painter.paint(picture, source.on(picture, chosen)) for picture in pictures]
            columns[unused_title(_head(painter, chosen, source), columns)] = [source.image, *made]
            for picture, painted in zip(pictures, made, strict=True):
                singles[unused_title(f"{picture.title}-in-{source.title}", singles)] = painted
        _tell(sources)
        return Sheet(name, columns, ["", *map(_row, pictures)], singles)

    def interpolate(
        self, between: Words = None, on: Words = None, frames: int = 8, region: Words = None, **how: Unpack[How]
    ) -> Sheet:
        ends = words(between) or ["0", str(min(1, len(self.painter.val) - 1))]
        if len(ends) != 2:
            raise UserError(f"--between takes two styles and got {len(ends)}; type --between 3 5")
        painter, (start, end) = self._sources(ends, **how)
        if on is not None:
            shapes = [painter.picture(name) for name in words(on)]
        elif start.picture is not None:
            shapes = [start.picture]
        else:
            raise UserError(f"'{start.title}' has styles and no shapes; say with --on which pictures to paint")
        chosen = self._regions(region)
        shares = [number / (frames - 1) for number in range(frames)]
        made = []
        for picture in shapes:
            first, last = start.on(picture, chosen), end.on(picture, chosen)
            made.append([painter.paint(picture, first.towards(last, share)) for share in shares])
        _tell([start, end])

        columns: Columns = {}
        if start.image is not None:
            columns[_head(painter, chosen, start)] = [start.image]
        for share, column in zip(shares, zip(*made, strict=True), strict=True):
            columns[unused_title(f"{100 * share:.0f} %", columns)] = list(column)
        if end.image is not None:
            columns[unused_title(_head(painter, chosen, end), columns)] = [end.image]
        name = file_name("interpolate", [*ends, *after("on", on), *after("region", region)])
        named = [(f"{picture.title}-{number:03d}" for number in range(frames)) for picture in shapes]
        singles = dict(zip(chain(*named), chain(*made), strict=True))

        def moving() -> Iterator[Image.Image]:
            return (grids.tiles(list(map(grids.picture, row)), len(row)) for row in zip(*made, strict=True))

        return Sheet(name, columns, list(map(_row, shapes)), singles, moving)

    def repaint(
        self, picture: str | int = 0, label: str | Path | Image.Image | None = None, **how: Unpack[How]
    ) -> Sheet:
        which = str(picture)
        if label is None:
            raise UserError(
                "repaint needs the edited label map: type --label mine.png; a label map to edit is written by "
                f"python -m gan.sample {quoted(self.saved.folder.path)} save-labels --picture {quoted(which)}"
            )
        painter, (source,) = self._sources([which], **how)
        edited, named = painter.picture(label), "label" if isinstance(label, Image.Image) else str(label)
        columns: Columns = {}
        if source.picture is not None:
            own = painter.paint(source.picture, source.styles)
            columns = {"picture": [source.image], "labels": [source.picture.label], "output": [own]}
        made = painter.paint(edited, source.on(edited, edited=True))
        columns |= {"edited labels": [edited.label], "repainted": [made]}
        _tell([source])
        return Sheet(file_name("repaint", [which, "with", named]), columns, singles={"repainted": made})

    def translate(  # pyrefly: ignore[bad-override] - with other options, as the command line has them
        self,
        inputs: str | Path | Image.Image | None = None,
        file: str | Path | None = None,
        from_: str | int = "mean",
        largest: int | None = None,
        **how: Unpack[How],
    ) -> list[Path] | Sheet:
        """Paint a folder of label maps, or one, each in its own size, in these styles."""
        painter, (source,) = self._sources([str(from_)], **how)

        def paint(maps: Tensor) -> Tensor:
            picture = Picture("", maps[0, 0].cpu())
            return painter.paint(picture, source.on(picture))[None]

        try:
            return self._painted(paint, inputs, file, largest)
        finally:
            _tell([source])

    def save_styles(self, picture: str | int = 0, mean_of: int = 1000, file: str | Path | None = None) -> list[Path]:
        styles = StyleSource(self.painter, str(picture), among=mean_of).styles
        path = self.path(file_name("styles", words(picture)), ".pt", file)
        styles.save(path)
        names = [name for name, has in zip(styles.label_names, styles.present, strict=True) if has]
        say(f"{styles.source}: styles of {len(names)} regions: {', '.join(names)}")
        return [path]

    def save_labels(self, picture: str | int = 0, file: str | Path | None = None) -> list[Path]:
        names = self.painter.label_names
        if len(names) > 256:
            raise UserError(f"a palette PNG has 256 colours and this run knows {len(names)} labels")
        label = self.painter.picture(str(picture)).label
        path = self.path(file_name("labels", words(picture)), ".png", file)
        save_png(made := grids.label_png(label, len(names)), path)
        if made.size != (label.shape[1], label.shape[0]):
            say(f"larger, to be painted on; repaint takes it so, and --inputs with --largest {max(label.shape)}")
        say(*(f"{number:3} #{bytes(grids.colour(number)).hex()} {name}" for number, name in enumerate(names)))
        return [path]


def _tell(sources: Sequence[StyleSource]) -> None:
    say(*dict.fromkeys(line for source in sources for line in source.notes()))


def _head(painter: Painter, chosen: list[int] | None, source: StyleSource) -> str:
    names = ["styles"] if chosen is None else [painter.label_names[region] for region in chosen]
    return f"{'region ' if names[0].isdecimal() else ''}{', '.join(names)} of {_row(source)}"


def _row(picture: Picture | StyleSource) -> str:
    return f"picture {picture.title}" if picture.title.isdecimal() else picture.title

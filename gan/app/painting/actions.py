"""The actions of `python -m gan.sample`: a function each, which draws a grid or writes a file and gives its path.

gan/sample.py says what each does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.apply_func import move_data_to_device
from PIL import Image
from torch import Tensor

from gan.app.outputs import say
from gan.app.painting import grids
from gan.app.painting.painter import Painter, Picture
from gan.app.painting.reopen import NOTHING_HELD_OUT, SavedRun, first_samples, samples, shown
from gan.app.painting.styles import Styles, regions
from gan.files.disk import name_for
from gan.files.errors import UserError
from gan.sound import Sound

Columns = dict[str, grids.Batch]


@dataclass
class Sheet:
    """What an action has made: the columns of a grid, titles of its rows, and single samples by name."""

    name: str
    columns: Mapping[str, grids.Batch]
    titles: Sequence[str] = ()
    singles: Mapping[str, Tensor | Sound] = field(default_factory=dict)


def save_sheet(opened: SavedRun, settings: Namespace, sheet: Sheet) -> list[Path]:
    """Write the grid and its sounds, and with --singles each sample by itself in its own size."""
    path = output_path(opened, settings, sheet.name, ".png")
    rows = max(map(len, sheet.columns.values()))
    save_png(grids.grid(sheet.columns, rows, sheet.titles), path)
    paths = [path, *grids.save_sounds(sheet.columns, path)]
    if not settings.singles:
        return paths
    for name, sample in sheet.singles.items():
        single = path.with_suffix("") / f"{name_for(name)}.png"
        save_png(grids.picture(sample), single)
        if isinstance(sample, Sound):
            grids.save_sound(sample, single.with_suffix(".wav"))
    return [*paths, path.with_suffix("")]


def output_path(opened: SavedRun, settings: Namespace, name: str, suffix: str) -> Path:
    """Where to write: the file that was asked for, or one in the run's folder."""
    return Path(settings.file) if settings.file else opened.folder.samples / f"{name}{suffix}"


def save_png(image: Image.Image, path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise UserError(f"pictures are written as PNG; type a name such as {path.with_suffix('.png')}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        grids.save(image, path)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}; choose another file with -o") from error


def file_name(action: str, words: Sequence[str] | None) -> str:
    """A file's name from the action and what it was asked to draw."""
    return "-".join([action, *(name_for(Path(word).stem) for word in words or ())])[:120]


def unused(title: str, columns: Columns) -> str:
    """A title that no column has yet: the same styles may be asked for twice."""
    while title in columns:
        title += " "
    return title


class StyleSource:
    """Where styles are taken from, as the command line names it: a picture, a file of styles, or `mean`.

    `missing` says how a region is painted that has no style here: `mean` takes the mean styles of `among` training
    pictures, `own` the painted picture's own style, and `zero` no style.
    """

    def __init__(self, painter: Painter, which: str, missing: str = "mean", among: int = 1000) -> None:
        self.painter, self.missing, self.among = painter, missing, among
        self._noted: dict[tuple[str, str], list[int]] = {}
        self.picture: Picture | None = None
        if which == "mean":
            self.title, self.styles = "mean", painter.mean(self.among)
        elif which.endswith(".pt"):
            self.title, self.styles = Path(which).stem, painter.load(Path(which))
        else:
            self.picture = painter.picture(which)
            self.title, self.styles = self.picture.title, painter.styles(self.picture)

    @property
    def image(self) -> Tensor | None:
        return None if self.picture is None else self.picture.image

    def spotlight(self, region: int) -> Tensor | None:
        return None if self.picture is None else self.picture.spotlight(region)

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
        """These styles, with the missing ones replaced."""
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
            noted = self._noted.setdefault((who, what), [])
            noted += [region for region in which if region not in noted]


def _same(one: Picture, other: Picture) -> bool:
    if one.image is None or other.image is None:
        return False
    return torch.equal(one.image, other.image) and torch.equal(one.label, other.label)


def show(opened: SavedRun, settings: Namespace) -> list[Path]:
    if not hasattr(opened.run.game, "show"):
        raise UserError(f"run {opened.name} shows nothing: its game needs show(batch)")
    found, held = samples(opened.run, settings.count)
    batch = first_samples(found, settings.count)
    if not held:
        say(NOTHING_HELD_OUT)
    batch = move_data_to_device(batch, next(opened.run.game.parameters()).device)
    columns = shown(opened.run.game, batch, settings.seed)
    made = grids.made(columns, batch)
    singles = {f"{row}-{title}": each for title, column in made.items() for row, each in enumerate(column)}
    return save_sheet(opened, settings, Sheet("show", columns, singles=singles))


def reconstruct(opened: SavedRun, settings: Namespace) -> list[Path]:
    painter = Painter(opened, settings.seed)
    which = settings.picture or [str(number) for number in range(min(settings.count, len(painter.val)))]
    chosen = [painter.picture(each) for each in which]
    made = [painter.paint(picture, painter.styles(picture)) for picture in chosen]
    columns = {"labels": [p.label for p in chosen], "picture": [p.image for p in chosen], "output": made}
    titles = list(map(_row, chosen))
    singles = dict(zip(titles, made, strict=True))
    return save_sheet(opened, settings, Sheet(file_name("reconstruct", settings.picture), columns, titles, singles))


def transfer(opened: SavedRun, settings: Namespace) -> list[Path]:
    painter = Painter(opened, settings.seed)
    few = [str(number) for number in range(min(5, len(painter.val)))]
    to = [painter.picture(each) for each in settings.to or few]
    sources = [StyleSource(painter, each, settings.missing, settings.mean_of) for each in settings["from"] or few]
    chosen = regions(settings.region, painter.label_names) if settings.region else None
    name = file_name(
        "transfer", ["from", *(settings["from"] or few), "to", *(settings.to or few), *(settings.region or [])]
    )
    if settings.each:
        return save_sheet(opened, settings, _region_by_region(painter, sources, to, chosen, name))

    what = _what(painter, chosen)
    # The first row shows the styles' pictures, the first columns the pictures to paint; the rest is what was painted.
    made = [[painter.paint(picture, source.on(picture, chosen)) for source in sources] for picture in to]
    columns: Columns = {"labels": [None, *(p.label for p in to)], "picture": [None, *(p.image for p in to)]}
    for source, column in zip(sources, zip(*made, strict=True), strict=True):
        columns[unused(f"{what} of {source.title}", columns)] = [source.image, *column]
    titles = ["", *map(_row, to)]
    singles = {
        f"{picture.title}-in-{source.title}": image
        for picture, row in zip(to, made, strict=True)
        for source, image in zip(sources, row, strict=True)
    }
    _tell(sources)
    return save_sheet(opened, settings, Sheet(name, columns, titles, singles))


def _region_by_region(
    painter: Painter, sources: list[StyleSource], to: list[Picture], chosen: list[int] | None, name: str
) -> Sheet:
    if len(sources) != 1:
        raise UserError(
            f"--each shows the regions of one picture and --from names {len(sources)}; type --from 3 --each"
        )
    (source,) = sources
    if chosen is None:
        theirs = {region for picture in to for region in picture.regions}
        chosen = [region for region, has in enumerate(source.styles.present) if has and region in theirs]
    names = [painter.label_names[region] for region in chosen]
    columns: Columns = {f"styles of {source.title}": [source.image, *map(source.spotlight, chosen)]}
    singles = {}
    for picture in to:
        made = [painter.paint(picture, source.on(picture, [region])) for region in chosen]
        columns[unused(_row(picture), columns)] = [picture.image, *made]
        singles |= {f"{picture.title}-{name}": image for name, image in zip(names, made, strict=True)}
    _tell(sources)
    return Sheet(f"{name}-each", columns, ["", *names], singles)


def interpolate(opened: SavedRun, settings: Namespace) -> list[Path]:
    painter = Painter(opened, settings.seed)
    between = settings.between or ["0", str(min(1, len(painter.val) - 1))]
    if len(between) != 2:
        raise UserError(f"--between takes two styles and got {len(between)}; type --between 3 5")
    start, end = (StyleSource(painter, each, settings.missing, settings.mean_of) for each in between)
    if settings.on:
        shapes = [painter.picture(each) for each in settings.on]
    elif start.picture is not None:
        shapes = [start.picture]
    else:
        raise UserError(f"'{start.title}' has styles and no shapes; say with --on which pictures to paint")
    chosen = regions(settings.region, painter.label_names) if settings.region else None
    shares = [number / (settings.frames - 1) for number in range(settings.frames)]
    made = []
    for picture in shapes:
        first, last = start.on(picture, chosen), end.on(picture, chosen)
        made.append([painter.paint(picture, first.towards(last, share)) for share in shares])
    _tell([start, end])

    what = _what(painter, chosen)
    columns: Columns = {}
    if start.image is not None:
        columns[f"{what} of {start.title}"] = [start.image]
    for share, frames in zip(shares, zip(*made, strict=True), strict=True):
        columns[unused(f"{100 * share:.0f} %", columns)] = list(frames)
    if end.image is not None:
        columns[unused(f"{what} of {end.title}", columns)] = [end.image]
    on = ["on", *settings.on] if settings.on else []
    name = file_name("interpolate", [*between, *on, *(settings.region or [])])
    singles = {
        f"{picture.title}-{number:03d}": frame
        for picture, frames in zip(shapes, made, strict=True)
        for number, frame in enumerate(frames)
    }
    return save_sheet(opened, settings, Sheet(name, columns, list(map(_row, shapes)), singles))


def repaint(opened: SavedRun, settings: Namespace) -> list[Path]:
    painter = Painter(opened, settings.seed)
    if settings.label is None:
        raise UserError(
            "repaint needs the edited label map: type --label mine.png; a label map to edit is written by "
            f"python -m gan.sample {opened.folder.path} save-labels --picture {settings.picture}"
        )
    source = StyleSource(painter, settings.picture, settings.missing, settings.mean_of)
    edited = painter.picture(settings.label)
    columns: Columns = {}
    if source.picture is not None:
        own = painter.paint(source.picture, source.styles)
        columns = {"picture": [source.image], "labels": [source.picture.label], "output": [own]}
    made = painter.paint(edited, source.on(edited, edited=True))
    columns |= {"edited labels": [edited.label], "repainted": [made]}
    _tell([source])
    name = file_name("repaint", [settings.picture, "with", settings.label])
    return save_sheet(opened, settings, Sheet(name, columns, singles={"repainted": made}))


def mean_styles(opened: SavedRun, settings: Namespace) -> list[Path]:
    painter = Painter(opened, settings.seed)
    mean = painter.mean(settings.mean_of)
    without = [name for name, has in zip(painter.label_names, mean.present, strict=True) if not has]
    say(mean.source + (f"; none has {', '.join(without)}" if without else ""))
    chosen = [painter.picture(str(number)) for number in range(min(settings.count, len(painter.val)))]
    made = [painter.paint(picture, mean) for picture in chosen]
    columns = {"labels": [p.label for p in chosen], "mean styles": made, "picture": [p.image for p in chosen]}
    titles = list(map(_row, chosen))
    sheet = Sheet("mean-styles", columns, titles, dict(zip(titles, made, strict=True)))
    return [painter.mean_path(settings.mean_of), *save_sheet(opened, settings, sheet)]


def save_styles(opened: SavedRun, settings: Namespace) -> list[Path]:
    painter = Painter(opened)
    styles = painter.styles(painter.picture(settings.picture))
    path = output_path(opened, settings, file_name("styles", [settings.picture]), ".pt")
    styles.save(path)
    names = [name for name, has in zip(styles.label_names, styles.present, strict=True) if has]
    say(f"styles of {len(names)} regions: {', '.join(names)}")
    return [path]


def save_labels(opened: SavedRun, settings: Namespace) -> list[Path]:
    painter = Painter(opened)
    if len(painter.label_names) > 256:
        raise UserError(f"a palette PNG has 256 colours and this run knows {len(painter.label_names)} labels")
    label = painter.picture(settings.picture).label
    path = output_path(opened, settings, file_name("labels", [settings.picture]), ".png")
    legend = path.with_name(f"{path.stem}-legend.png")
    save_png(grids.label_png(label, len(painter.label_names)), path)
    save_png(grids.legend(dict(enumerate(painter.label_names))), legend)
    return [path, legend]


ACTIONS: dict[str, Callable[[SavedRun, Namespace], list[Path]]] = {
    "show": show,
    "reconstruct": reconstruct,
    "transfer": transfer,
    "interpolate": interpolate,
    "repaint": repaint,
    "mean-styles": mean_styles,
    "save-styles": save_styles,
    "save-labels": save_labels,
}


def _tell(sources: Sequence[StyleSource]) -> None:
    say(*dict.fromkeys(line for source in sources for line in source.notes()))


def _what(painter: Painter, chosen: list[int] | None) -> str:
    return "styles" if chosen is None else ", ".join(painter.label_names[region] for region in chosen)


def _row(picture: Picture) -> str:
    return f"picture {picture.title}" if picture.title.isdecimal() else picture.title

"""What an action writes: a grid, single pictures, and their files' names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse import Namespace
from PIL import Image
from torch import Tensor

from gan.errors import UserError
from gan.painting import grids, sounds
from gan.painting.reopen import SavedRun
from gan.sound import Sound

Columns = dict[str, grids.Batch]


@dataclass
class Sheet:
    """What an action has made: the columns of a grid, titles of its rows, and single samples by name."""

    name: str
    columns: Columns
    titles: Sequence[str] = ()
    singles: dict[str, Tensor | Sound] = field(default_factory=dict)


def save_sheet(opened: SavedRun, settings: Namespace, sheet: Sheet) -> list[Path]:
    """Write the grid and its sounds, and with --singles each sample by itself in its own size."""
    path = output_path(opened, settings, sheet.name, ".png")
    rows = max(map(len, sheet.columns.values()))
    save_png(grids.grid(sheet.columns, rows, sheet.titles), path)
    paths = [path, *sounds.save_columns(sheet.columns, path)]
    if not settings.singles:
        return paths
    for name, sample in sheet.singles.items():
        single = path.with_suffix("") / f"{_slug(name)}.png"
        save_png(grids.picture(sample), single)
        if isinstance(sample, Sound):
            sounds.save(sample, single.with_suffix(".wav"))
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
    return "-".join([action, *(_slug(Path(word).stem) for word in words or ())])[:120]


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text).strip("_") or "picture"


def unused(title: str, columns: Columns) -> str:
    """A title that no column has yet: the same styles may be asked for twice."""
    while title in columns:
        title += " "
    return title

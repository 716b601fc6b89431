"""What a person can edit of a run, and how an edit is drawn: a label map, the styles of its regions, or sliders.

[Note: an edit]
An edit is an object of JSON: the number of a held-out picture, the label map, the styles of regions, a seed; or the
values of sliders. The page sends it, the saved file holds it and `gan.edit RUN --repeat FILE` reads it, so that all
three draw the same picture. It names no paths: a file of styles is one of those that `files` finds in the run's folder.
"""

import base64
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from datasets.augment import to_tensors
from gan.app.run.reopen import Numbered, SavedRun, has_numbers, open_run, shown_columns
from gan.app.sampling import grids
from gan.app.sampling.drawer import Drawer
from gan.app.sampling.drawings import Drawings
from gan.app.sampling.latents import directions
from gan.app.sampling.painter import Maps, Painter, Picture, has_styles, regions
from gan.app.sampling.paintings import Paintings, StyleSource
from gan.app.sampling.published import is_published, open_published
from gan.app.sampling.shown import Shown
from gan.files.disk import read_text
from gan.files.errors import UserError, explained
from gan.files.system import quoted
from gan.games.from_noise import FromNoise
from gan.games.pix2pix import Pix2pix
from gan.games.spade import Spade

LARGEST = 1 << 24  # bytes of an edit, or of a label map that is uploaded, and pixels of that map
MOST_LABELS = 256  # a byte each, as in a palette PNG
DIRECTIONS = 5  # of w, the most important ones
RECENT = 32  # pictures and files whose styles are remembered

Edit = Mapping[str, Any]


def part(edit: Edit, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """A part of an edit, which a person may have written: of this kind, or a `UserError`."""
    found = edit.get(name, default) if isinstance(edit, Mapping) else None
    if not isinstance(found, kind) or isinstance(found, bool):
        raise UserError(f"'{name}' of the edit is {str(found)[:40]!r}, which is of a wrong kind; save the edit again")
    return found


def number(edit: Edit, name: str, default: float, least: float, most: float) -> Any:
    """A number of an edit, in its bounds; a whole one if its default is."""
    found = part(edit, name, int if isinstance(default, int) else (int, float), default)
    if not least <= found <= most:
        raise UserError(f"'{name}' of the edit is {str(found)[:40]}; choose from {least:,} to {most:,}")
    return found


def parsed(text: str | bytes) -> Any:
    with explained("this is no edit ({why}); save one in the editor", ValueError, RecursionError):
        return json.loads(text)


class Editor(ABC):
    """`answers` has what the page may ask for, and who answers it. An edit has some of these `parts`."""

    kind: str
    parts: Sequence[str] = ()

    def __init__(self, title: str, step: int) -> None:
        self.title, self.step = title, step
        self.answers: dict[str, Callable[[bytes], bytes]] = {
            "about": lambda _: json.dumps(self.about()).encode(),
            "draw": self._answer_draw,
        }

    def about(self) -> dict[str, Any]:
        """What the page must know before it can show anything."""
        return {"run": self.title, "step": self.step, "kind": self.kind}

    @abstractmethod
    def draw(self, edit: Edit) -> tuple[Image.Image, list[str]]:
        """The picture of an edit, and notes for the person who edits."""

    def repeat(self, path: Path) -> tuple[Image.Image, list[str]]:
        with explained(f"'{path}' cannot be read as an edit: {{why}}", OSError, ValueError, UserError):
            edit = parsed(read_text(path, LARGEST))
        return self.picture_of(edit)

    def picture_of(self, edit: Edit) -> tuple[Image.Image, list[str]]:
        """The picture of an edit, which may be of another kind of run, and notes."""
        if isinstance(edit, Mapping) and (other := [*edit.keys() - {"run", "step", *self.parts}]):
            raise UserError(f"the edit has '{min(other)[:40]}', which is of another kind of run")
        image, notes = self.draw(edit)
        run, step = part(edit, "run", str, self.title), part(edit, "step", int, self.step)
        other = f"the edit was made with {run}, step {step}, where it may have looked different"
        return image, notes if (run, step) == (self.title, self.step) else [*notes, other]

    def _answer_draw(self, given: bytes) -> bytes:
        image, notes = self.picture_of(parsed(given))
        picture = f"data:image/png;base64,{base64.b64encode(grids.png(image)).decode()}"
        return json.dumps({"picture": picture, "notes": notes}).encode()


class LabelEditor(Editor):
    """An editor of the label maps of held-out pictures, for games that show what they paint of a map as "output"."""

    kind, parts = "labels", ("picture", "label", "styles", "seed")

    def __init__(self, opened: SavedRun, data: Numbered) -> None:
        super().__init__(opened.folder.path.name, opened.step)
        self.game, self.val = opened.run.game, data.val
        self.names: tuple[str, ...] = tuple(getattr(self.val, "label_names", ()))
        self.size: tuple[int, int] = tuple(self.val[0]["image"].shape[-2:])
        if len(self.names) > MOST_LABELS:
            raise UserError(f"the editor paints {MOST_LABELS} labels at most, and this run knows {len(self.names)}")
        self.answers |= {
            "picture": lambda given: grids.png(grids.picture(self.item(parsed(given))["image"])),
            "label": lambda given: in_bytes(self.item(parsed(given))["label"]),
            "mask": lambda given: grids.png(self.mask(parsed(given))),
            "upload": lambda given: in_bytes(self.uploaded(given)),
        }

    def about(self) -> dict[str, Any]:
        colours = grids.palette(len(self.names)).tolist()
        regions = [{"name": name, "colour": colour} for name, colour in zip(self.names, colours, strict=True)]
        return {**super().about(), "size": self.size, "regions": regions, "pictures": len(self.val)}

    def item(self, which: int) -> dict[str, Tensor]:
        return to_tensors(self.val[number({"picture": which}, "picture", 0, 0, len(self.val) - 1)])

    def picture(self, edit: Edit) -> Picture:
        which = part(edit, "picture", int, 0)
        item = self.item(which)
        return Picture(str(which), item["label"], item["image"], item.get("edges"))

    def draw(self, edit: Edit) -> tuple[Image.Image, list[str]]:
        before = self.picture(edit)
        label = self.label(edit, before)
        # An edited map has no edges of instances any more. So a game that wants edges takes those of the map.
        picture = before if torch.equal(label, before.label) else Picture(before.title, label)
        made, notes = self.paint(picture, before, number(edit, "seed", 0, 0, 2**31 - 1), edit)
        return grids.picture(made), notes

    def paint(self, picture: Picture, before: Picture, seed: int, edit: Edit) -> tuple[Tensor, list[str]]:
        """Paint a label map that was edited, or not, and was that of the picture `before`."""
        parts = {"image": before.image, "label": picture.label, "edges": picture.edges}
        device = next(self.game.parameters()).device
        batch = {name: value.unsqueeze(0).to(device) for name, value in parts.items() if value is not None}
        made = shown_columns(self.game, batch, seed)["output"]
        assert isinstance(made, Tensor)
        return made[0], []

    def label(self, edit: Edit, before: Picture) -> Tensor:
        """The label map of an edit: a byte a pixel, row by row, in base64. Without one it is the picture's own."""
        text, (height, width) = part(edit, "label", str, ""), self.size
        if not text:
            return before.label
        with explained("the label map of the edit is damaged ({why}); save the edit again", ValueError):
            numbers = base64.b64decode(text, validate=True)
        if len(numbers) != height * width:
            raise UserError(f"the edit's label map has {len(numbers)} pixels, and this run's have {width}x{height}")
        if max(numbers) >= len(self.names):
            raise UserError(f"the edit has a region {max(numbers)}; this run knows 0 to {len(self.names) - 1}")
        return torch.frombuffer(bytearray(numbers), dtype=torch.uint8).view(height, width).long()

    def mask(self, edit: Edit) -> Image.Image:
        """The label map as a palette PNG, which gan.sample RUN repaint reads."""
        return grids.label_png(self.label(edit, self.picture(edit)), len(self.names))

    def uploaded(self, content: bytes) -> Tensor:
        none = "this file is no label map: give a PNG, such as Save the mask writes"  # Pillow raises many kinds
        with explained(none, Exception):
            image = Image.open(io.BytesIO(content), formats=["PNG"])
        pixels = image.width * image.height
        if pixels > LARGEST:
            raise UserError(f"this label map has {pixels:,} pixels, and the editor takes {LARGEST:,} at most")
        with explained("the label map cannot be read as a picture ({why}); replace or remove it", Exception):
            image.load()
        return Maps.of_data(self.val).read(image, "the label map")


def in_bytes(label: Tensor) -> bytes:
    return label.byte().numpy().tobytes()


class StyleEditor(LabelEditor):
    """An editor of label maps and of the styles of their regions, by a painter of SEAN.

    "styles" of an edit has for each changed region {"from", "to", "share"}: the styles of a held-out picture by its
    number, a file by its name, `own` or `mean`; and how far to go from the first to the second, of 0 to 1.
    """

    kind = "styles"

    def __init__(self, opened: SavedRun, data: Numbered) -> None:
        super().__init__(opened, data)
        self.folder, self.painter = opened.folder, Painter(opened)
        self._remembered = lru_cache(RECENT)(lambda which, written: StyleSource(self.painter, which))

    def about(self) -> dict[str, Any]:
        return {**super().about(), "files": sorted(self.files())}

    def files(self) -> dict[str, Path]:
        """The files of styles in the run's folder, as gan.sample RUN save-styles writes them, by name."""
        inside = self.folder.path.resolve()
        found = [path for place in (self.folder.samples, inside / "styles") for path in place.glob("*.pt")]
        own = [path for path in found if path.resolve().is_relative_to(inside)]
        return {path.name: path for path in own if not path.name.startswith("mean-of-")}

    def source(self, which: str) -> StyleSource:
        """Styles by a name that may have come from anywhere."""
        if which == "mean" or (which.isdecimal() and which.isascii()):
            return self._remembered(which, 0)
        path = self.files().get(which)
        if path is None:
            raise UserError(f"the run has no styles '{which[:80]}'; choose own, mean, a picture's number or a file")
        return self._remembered(str(path), path.stat().st_mtime_ns)

    def paint(self, picture: Picture, before: Picture, seed: int, edit: Edit) -> tuple[Tensor, list[str]]:
        own = self.source(before.title)
        sources, styles = [own], own.on(picture, edited=True)
        for name, how in part(edit, "styles", dict, {}).items():
            share, chosen = number(how, "share", 0.0, 0, 1), regions([name], self.names)
            if chosen[0] not in picture.regions:
                continue
            ends = [part(how, end, str, "own") for end in ("from", "to")]
            both = [own if which == "own" else self.source(which) for which in ends]
            first, second = (source.on(picture, chosen, source is own, styles) for source in both)
            sources, styles = [*sources, *both], first.towards(second, share)
        self.painter.seed = seed
        notes = dict.fromkeys(line for source in sources for line in source.notes())
        return self.painter.paint(picture, styles), list(notes)


@dataclass(frozen=True)
class Slider:
    """A number to change, perhaps by `names`, and where it begins. It is `kept` in the picture before the edit."""

    name: str
    title: str
    min: float
    max: float
    step: float
    value: float
    kept: bool = False
    names: Sequence[str] = ()


class NoiseEditor(Editor):
    kind = "noise"

    def __init__(self, shown: Drawings) -> None:
        path = shown.drawer.title if shown.run is None else shown.run.folder.path
        super().__init__(Path(path).name, 0 if shown.run is None else shown.run.step)
        self.drawer, self.steps = shown.drawer, torch.zeros(0)
        drawer, layers = shown.drawer, shown.drawer.layers
        self.sliders = [Slider("seed", "Seed", 0, 9999, 1, 0, kept=True)]
        if drawer.classes:
            self.sliders.append(Slider("class", "Class", 0, drawer.classes - 1, 1, 0, True, drawer.class_names))
        if layers:
            self.sliders += [
                Slider("truncation", "Truncation: at 0 the average picture", -1, 2, 0.05, 1.0),
                Slider("layers", "Layers of this seed", 0, layers, 1, layers),
                Slider("other", "Seed of the other layers", 0, 9999, 1, 1),
            ]
            self.steps = directions(drawer, "weights")[:DIRECTIONS]
            self.sliders += [Slider(f"direction{k}", f"Direction {k}", -4, 4, 0.1, 0.0) for k in range(len(self.steps))]

        self.parts = [slider.name for slider in self.sliders]

    def about(self) -> dict[str, Any]:
        return {**super().about(), "sliders": [asdict(slider) for slider in self.sliders]}

    @torch.no_grad()
    def draw(self, edit: Edit) -> tuple[Image.Image, list[str]]:
        values = {each.name: number(edit, each.name, each.value, each.min, each.max) for each in self.sliders}
        seed = values["seed"]
        label = values.get("class") if "class" in edit else None  # None: the class that gan.sample gives the seed
        if not self.drawer.layers:
            return grids.picture(self.drawer.pictures([seed], label=label)[0], transparent=True), []
        own, other = self.drawer.w_of([seed, values["other"]], label=label, truncation=values["truncation"])
        mixed = torch.cat([own[: values["layers"]], other[values["layers"] :]])
        moved = sum((values[f"direction{k}"] * step for k, step in enumerate(self.steps)), mixed.cpu()).to(mixed)
        return grids.picture(self.drawer.from_w(moved.unsqueeze(0))[0], transparent=True), []


def editor_of(shown: Shown) -> Editor:
    if isinstance(shown, Drawings):
        return NoiseEditor(shown)
    if shown.run is None:
        raise UserError(
            f"nothing can be edited of {shown.title}, which translates; type python -m gan.sample "
            f"{quoted(shown.title)} --inputs and a folder"
        )
    data = shown.saved.run.data
    if has_numbers(data) and isinstance(shown, Paintings):
        return StyleEditor(shown.saved, data)
    if has_numbers(data) and isinstance(shown.game, Pix2pix | Spade) and shown.game.labels:
        return LabelEditor(shown.saved, data)
    raise UserError(
        f"nothing can be edited of {shown.saved.folder.path}: {type(shown.game).__name__} paints no label maps and "
        f"draws no pictures from noise; type python -m gan.sample {quoted(shown.saved.folder.path)} show"
    )


def open(path: str | Path = "auto", device: str = "auto", **options: Any) -> Shown:
    """Open a run's folder, a checkpoint inside one, the newest run (`auto`), or a published file.

    `options` are those of `gan.app.run.reopen.open_run`, such as `data=` where the run's pictures have moved.
    """
    if is_published(Path(path)):
        opened = open_published(Path(path), device)
    else:
        run = open_run(str(path), device=device, **options)
        if isinstance(run.run.game, FromNoise):
            opened: Shown = Drawings(Drawer.of_run(run), run)
        else:
            opened = Paintings(run) if has_styles(run) else Shown(run)
    opened.editor = cache(lambda: editor_of(opened))
    return opened

"""Pictures for translation: two folders, with pairs of the same names or without, or both halves of each picture."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import PurePosixPath
from typing import Any, Self

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import Dataset
from torchvision import tv_tensors

from datasets.augment import Augment, corner
from datasets.files.cache import listed
from datasets.files.find import find_source
from datasets.files.pairs import Size, as_size
from datasets.files.pictures import Headers, MadeUp, Pictures, in_share
from datasets.files.sources import SPLITS, Source
from gan.files.errors import UserError
from gan.noise import seed_for

KNOWN = (("a", "b"), ("images", "targets"), ("inputs", "targets"), ("input", "target"), ("source", "target"))
SPLIT_AND_SIDE = re.compile(r"(train|val|valid|validation|test)[-_]?([ab])")
TRAINED = ("", "train", "training")
ROUNDING = 2  # pixels that both pictures of a pair may differ by when they are scaled
FOLDERS = "two folders such as A/ and B/, or trainA/, trainB/, testA/ and testB/"
FORMS = f"{FOLDERS}; or pairs as A|B in one picture"


class Part(Source):
    """Some pictures of a source, whole or one half of each. `part` is for the name of the cache, `title` the side's."""

    title = ""

    def __init__(self, source: Source, rows: Sequence[int], half: int | None, *part: object) -> None:
        self.source, self.rows, self.half, self.part = source, np.array(rows, int), half, (half, *part)
        self.kind, self.path, self.note = source.kind, source.path, source.note
        self.names, self.stamps = source.names[self.rows], source.stamps[self.rows]
        self.labels, self.class_names = None, ()

    def read(self, index: int) -> Any:
        return self.source.read(int(self.rows[index]))

    @contextmanager
    def opened(self, index: int) -> Iterator[Image.Image]:
        with self.source.opened(int(self.rows[index])) as picture:
            yield picture if self.half is None else cut(picture, self.half)


def cut(picture: Image.Image, half: int) -> Image.Image:
    """The left half, 0, or the right one, 1, of a picture as the camera was held."""
    picture = ImageOps.exif_transpose(picture)
    middle = picture.width // 2
    return picture.crop((half * middle, 0, (half + 1) * middle, picture.height))


Both = tuple[Part, Part]


def find_sides(data: str, *, paired: bool, held_out: float = 0.02, leave_out: bool = False) -> tuple[Both, Both, str]:
    """Both sides at a path, to train on and held out, and what they are. Pairs are in the same order.

    The sides' names are found out: A/ and B/, trainA/ ..., or the halves of pairs.

    What is in val/ or testB/ is held out, else the share `held_out`, which the names decide. A picture without a
    partner is an error, unless `leave_out`.
    """
    source = find_source(data, classes=False)
    names = [PurePosixPath(os.fsdecode(name)) for name in source.names]
    places, titles = _places([name.with_suffix("").parts if paired else name.parts for name in names])
    halves = not titles
    if halves and not paired:
        raise UserError(f"{data} does not say which pictures are of which of two kinds; give {FOLDERS}")
    if halves:
        with source.opened(0) as picture:
            width, height = ImageOps.exif_transpose(picture).size
        if width <= height:
            raise UserError(f"{source.name(0)} is not wide enough to be two pictures side by side; give {FORMS}")
    splits = {split for split, _, _ in places} - set(TRAINED)
    held = next(({split} for split in ("val", "valid", "validation", "test") if split in splits), set())
    found: dict[tuple[bool, str], dict[str, int]] = {(out, side): {} for out in (False, True) for side in "ab"}
    for row, (split, side, key) in enumerate(places):
        if split in TRAINED or split in held:
            for each in side if not halves else "ab":
                if (other := found[split in held, each].setdefault(key, row)) != row:
                    raise UserError(f"{source.name(other)} and {source.name(row)} have the same name; remove one")
    if paired:
        _pair_up(found, data, leave_out)
    for side in "ab":
        if not found[False, side]:
            raise UserError(f"{data} has no pictures to train on of the side {side.upper()}; give {FORMS}")
        if not held:
            keys = list(found[False, side])
            chosen = compress(keys, in_share(list(map(os.fsencode, keys)), held_out))
            found[True, side] = {key: found[False, side].pop(key) for key in chosen}

    def part(out: bool, side: str) -> Part:
        rows = [found[out, side][key] for key in sorted(found[out, side])]
        number = "ab".index(side)
        made = Part(source, rows, number if halves else None, side, out, "" if held else held_out)
        made.title = (titles or ("left halves", "right halves"))[number]
        return made

    said = "halves of each picture, left to right" if halves else f"{titles[0]} to {titles[1]}"
    shown = "a" if paired else "ab"
    train, out = (" and ".join(f"{len(found[each, side]):,}" for side in shown) for each in (False, True))
    what = "pairs" if paired else "pictures"
    said = f"data {data}: {said}, {train} {what} to train on and {out} held out"
    if idle := [split for split, side, _ in places if split in splits - held and (side or halves)]:
        said += f"; {len(idle):,} pictures of {' and '.join(sorted(set(idle)))} are not used"
    if not halves and (others := sum(not side for _, side, _ in places)):
        said += f"; {others:,} pictures in other folders left out"
    said += f"; not read: {source.note}" if source.note else ""
    return (part(False, "a"), part(False, "b")), (part(True, "a"), part(True, "b")), said


def refuse_single(left: Headers, data: str) -> None:
    """Refuse pictures of which some do not look like two side by side, by the sizes of their left halves."""
    sizes = {k: [int(each) for each in text.split()[:2]] for k, text in enumerate(left.texts) if text is not None}
    odd = [k for k, (width, height) in sizes.items() if abs(width - height) > max(ROUNDING, height / 50)]
    if odd:
        raise UserError(
            f"{len(odd):,} of {len(sizes):,} training pictures in {data} are not twice as wide as high, such as "
            f"{left.source.name(odd[0])}; if each is a pair all the same, A on the left and B on the right, type "
            f"--side-by-side true, else give {FOLDERS}"
        )


def _places(parts: Sequence[tuple[str, ...]]) -> tuple[list[tuple[str, str, str]], tuple[str, ...]]:
    """The split, the side (a, b or none) and the rest of each name; and what both sides are called."""

    def heads(depth: int) -> set[str]:
        return {each[depth].lower() for each in parts if len(each) > depth + 1}

    while len(heads(0)) == 1 and all(len(each) > 2 for each in parts) and not heads(0) & SPLITS:
        parts = [each[1:] for each in parts]
    words = heads(0) | (heads(1) if heads(0) & SPLITS else set())
    words -= SPLITS
    titles = next((pair for pair in KNOWN if words >= set(pair)), ())
    if any(SPLIT_AND_SIDE.fullmatch(word) for word in words):
        titles = "A", "B"
    elif not titles and len(words) == 2 and all(len(each) > 1 for each in parts):
        titles = tuple(sorted(words))
    sides = dict(zip(map(str.lower, titles), "ab", strict=False))
    spelt = {word.lower(): word for each in parts for word in each[:-1][:2]}
    return [_place(each, sides) for each in parts], tuple(spelt.get(title, title) for title in titles)


def _place(parts: tuple[str, ...], sides: Mapping[str, str]) -> tuple[str, str, str]:
    split, side, rest = "", "", list(parts)
    while len(rest) > 1 and not (split and side):
        word = rest[0].lower()
        if both := SPLIT_AND_SIDE.fullmatch(word):
            split, side = both.groups()
        elif word in SPLITS and not split:
            split = word
        elif word in sides and not side:
            side = sides[word]
        else:
            break
        del rest[0]
    return split, side, "/".join(rest)


def _pair_up(found: dict[tuple[bool, str], dict[str, int]], data: str, leave_out: bool) -> None:
    """Keep the pictures that have a partner."""
    alone = []
    for out in (False, True):
        a, b = found[out, "a"], found[out, "b"]
        for key in a.keys() ^ b.keys():
            alone.append(f"{key} of {'A' if key in a else 'B'}")
            (a if key in a else b).pop(key)
    if not any(found.values()):
        raise UserError(f"no picture in {data} has a partner of the same name; without pairs, train cyclegan or cut")
    if alone and not leave_out:
        advice = "type --skip-broken to leave them out"
        raise UserError(listed(f"{len(alone)} pictures in {data} have no partner of the same name; {advice}:", alone))


class Side(Dataset):
    """The pictures of one side, of which a part of this size is shown: at random in training, else the middle."""

    def __init__(self, pictures: Pictures | MadeUp, size: tuple[int, int]) -> None:
        self.pictures, self.size = pictures, size

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._cut(index, lambda larger: ((larger[0] - self.size[0]) // 2, (larger[1] - self.size[1]) // 2))

    def load_crop(self, index: int, down: float, right: float) -> dict[str, Any]:
        return self._cut(index, lambda larger: corner(larger, self.size, down, right))

    def _cut(self, index: int, place: Callable[[Sequence[int]], tuple[int, int]]) -> dict[str, Any]:
        pixels, (height, width) = self.pictures[index]["image"].as_subclass(torch.Tensor), self.size
        top, left = place(pixels.shape[1:])
        return {"image": tv_tensors.Image(pixels[:, top : top + height, left : left + width].contiguous())}


class PairedSides(Dataset):
    """Items {"a", "b"} of two sides: pairs, or each picture of the larger side with one of the other."""

    classes, class_names = 0, ()

    def __init__(self, a: Side, b: Side) -> None:
        self.a, self.b, self.size = a, b, a.size
        self.channels = a.pictures.channels, b.pictures.channels

    @classmethod
    def made_up(cls, stored: Size, size: Size, channels: Sequence[int], **rule: Any) -> Self:
        return cls(*(Side(MadeUp(stored, each, **rule), as_size(size)) for each in channels))

    @property
    def half(self) -> int | None:
        """Which half of each picture "a" is; None where "a" are whole pictures."""
        return getattr(getattr(self.a.pictures, "source", self.a.pictures), "half", None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What both sides are called, if they have come from files."""
        sources = [getattr(side.pictures, "source", None) for side in (self.a, self.b)]
        return tuple(each.title for each in sources if isinstance(each, Part))

    @property
    def sample_names(self) -> list[bytes]:
        return [*self.a.pictures.sample_names, *self.b.pictures.sample_names]

    def __len__(self) -> int:
        return max(len(self.a), len(self.b))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(index)
        return {"a": self.a[index % len(self.a)]["image"], "b": self.b[index % len(self.b)]["image"]}

    def load_crop(self, index: int, down: float, right: float) -> dict[str, Any]:
        return {name: getattr(self, name).load_crop(index, down, right)["image"] for name in "ab"}


class UnpairedSides(PairedSides):
    """In training the picture of b is drawn at random, by (seed, epoch, index), and each is mirrored and cropped by
    itself, as published.
    """

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Also which pictures they are: those of the smaller side come again."""
        return super().__getitem__(index) | {"number_a": index % len(self.a), "number_b": index % len(self.b)}

    def load_augmented(self, augment: Augment, epoch: int, index: int) -> dict[str, Any]:
        partner = seed_for("partner", augment.seed, epoch, index) % len(self.b)
        other = Augment(seed_for("partner", augment.seed, index), augment.flip, augment.crop)
        a = augment.load(self.a, epoch, index % len(self.a))
        return {"a": a["image"], "b": other.load(self.b, epoch, partner)["image"]}


def aligned(a: Pictures, b: Pictures) -> tuple[Pictures, Pictures]:
    """Two sides without the pairs of which one picture is broken. The same part is cropped from both of a pair."""
    both = np.intersect1d(a.entries, b.entries)
    a, b = a.part(np.isin(a.entries, both)), b.part(np.isin(b.entries, both))
    odd = np.flatnonzero((abs(a.shapes - b.shapes) > ROUNDING).any(1))
    if len(odd):
        what = f"{len(odd)} pairs in {a.source.path} are pictures of two shapes; crop them, or type --fit stretch:"
        raise UserError(listed(what, [f"{a.name(row)} and {b.name(row)}" for row in odd.tolist()]))
    return a, b

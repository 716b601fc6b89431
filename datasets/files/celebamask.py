"""CelebAMask-HQ (Lee et al. 2020): 30,000 faces, whose 18 parts come as masks that are painted together once."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from datasets.drawn.portrait import FLIP_PAIRS, LABELS
from datasets.files.index import cache_folder, go_through, refuse, walk
from datasets.files.pairs import MAPS, UNREADABLE, Column, Pairs, Size, choose, inside, unreadable
from gan.errors import UserError

MAPPING = "CelebA-HQ-to-CelebA-mapping.txt"
PARTS = "CelebAMask-HQ-mask-anno"
FACES = "CelebA-HQ-img"
JPEG = (".jpg",)
FOLDER = 2000  # pictures whose masks share a folder

# The first of CelebA's pictures that are for validation and for tests, and the end.
BOUNDS = {"train": (0, 162771), "val": (162771, 182638), "test": (182638, 1 << 31)}


class CelebAMask(Pairs):
    """`CelebA-HQ-img/<k>.jpg` with the masks `CelebAMask-HQ-mask-anno/<k // 2000>/<k>_<part>.png`.

    Below `root` or below `root/CelebAMask-HQ`. The masks of a face are painted in the order of LABELS, later
    ones on top, into one label map that is kept (see datasets/files/index.py for where) and made anew when a mask
    changes. Splits are "train", "val" and "test", by the picture's number in CelebA as the mapping file has it.
    """

    num_labels, label_names, flip_pairs = len(LABELS), LABELS, FLIP_PAIRS

    def __init__(self, root: str | Path, split: str = "train", size: Size = 256) -> None:
        root = inside(root, "CelebAMask-HQ")
        numbers = _numbers(root / MAPPING, *choose(split, BOUNDS))
        only = frozenset(map(str, numbers))
        maps = Column("label map", (_merged(root, numbers, split),), only=only)
        super().__init__(root, (Column("picture", (FACES,), suffixes=JPEG, only=only), maps), size, split)


def _numbers(mapping: Path, first: int, end: int) -> np.ndarray:
    """The pictures whose number in CelebA, the second column, is at least `first` and below `end`."""
    try:
        lines = mapping.read_text().splitlines()[1:]
    except OSError as error:
        raise UserError(f"cannot read {mapping} ({error.strerror}); it comes with the data set") from error
    numbers = []
    for place, line in enumerate(lines, 2):
        match line.split():
            case [number, origin, *_] if number.isdecimal() and origin.isdecimal():
                if first <= int(origin) < end:
                    numbers.append(int(number))
            case [_, *_]:
                raise UserError(f"{mapping}, line {place}: '{line}' does not begin with two numbers; get the file anew")
    if not numbers:
        raise UserError(f"{mapping} has no picture of this split, whose numbers in CelebA are {first} to {end - 1}")
    return np.unique(numbers)


@dataclass(frozen=True)
class Merge:
    """Makes the label map of the picture at an index, whole or not at all; processes get a copy of it."""

    root: Path
    labels: Path
    numbers: np.ndarray
    present: np.ndarray  # [numbers, labels], the masks that there are
    part: str  # how the name of a file begins that is being written

    def __call__(self, index: int) -> None:
        """Paint and write one."""
        number = int(self.numbers[index])
        masks = [(label, _part(self.root, number, LABELS[label])) for label in np.flatnonzero(self.present[index])]
        merged = Image.fromarray(merge_masks(masks))
        self.labels.mkdir(exist_ok=True)
        part = self.labels.with_name(f"{self.part}.{number}-{os.getpid()}.part")
        merged.save(part, format="PNG")
        part.replace(self.labels / f"{number}.png")

    def lost(self) -> np.ndarray:
        """The pictures whose label map is not there, or no longer."""
        made = _names(self.labels, MAPS)
        return np.array([str(number) not in made for number in self.numbers])


def _merged(root: Path, numbers: np.ndarray, split: str) -> str:
    """The folder of label maps, `<k>.png`, with those of all the numbers in it."""
    cache = cache_folder(root)
    stamps = _parts(root, numbers)
    present = stamps[:, :, 1] > 0
    refuse(_gaps(root, numbers, present), root)
    file, keys = cache / f"merged-{split}.npz", list(map(str, numbers))
    merge = Merge(root, cache / "labels", numbers, present, file.stem)
    refuse(go_through(file, keys, stamps.reshape(len(keys), -1), merge, "merging masks", merge.lost), root)
    labels = merge.labels
    return str(labels.relative_to(root)) if labels.is_relative_to(root) else str(labels.absolute())


def _parts(root: Path, numbers: np.ndarray) -> np.ndarray:
    """Size and time of every mask, [numbers, labels, 2]; zeros where there is none."""
    stamps = np.zeros((len(numbers), len(LABELS), 2), np.int64)
    rows = {number: row for row, number in enumerate(numbers)}
    for folder in np.unique(numbers // FOLDER):
        if not (root / PARTS / str(folder)).is_dir():
            continue
        for entry in walk(root / PARTS / str(folder)):
            number, _, part = entry.name.removesuffix(".png").partition("_")
            if not number.isdecimal() or int(number) not in rows:
                continue
            if part not in LABELS[1:]:
                raise UserError(f"{entry.path} is a mask of no known part; known are {', '.join(LABELS[1:])}")
            state = entry.stat()
            stamps[rows[int(number)], LABELS.index(part)] = state.st_size, state.st_mtime_ns
    return stamps


def _part(root: Path, number: int, part: str) -> Path:
    return root / PARTS / str(number // FOLDER) / f"{number:05d}_{part}.png"


def _gaps(root: Path, numbers: np.ndarray, present: np.ndarray) -> list[str]:
    """What the mapping names and is not there."""
    pictures = _names(root / FACES, JPEG)
    bare = [root / FACES / f"{number}.jpg" for number in numbers if str(number) not in pictures]
    unmasked = [_part(root, int(number), "*") for number in numbers[~present.any(1)]]
    return [
        f"{len(paths)} of {len(numbers)} {what} are missing: {', '.join(map(str, paths[:3]))}"
        f"{' ...' if len(paths) > 3 else ''}; unpack the data set anew, or take their lines out of {MAPPING}"
        for what, paths in (("pictures", bare), ("pictures' masks", unmasked))
        if paths
    ]


def _names(folder: Path, suffixes: tuple[str, ...]) -> set[str]:
    if not folder.is_dir():
        return set()
    pieces = (os.path.splitext(entry.name) for entry in walk(folder))
    return {name for name, suffix in pieces if suffix.lower() in suffixes}


def merge_masks(paths: list[tuple[int, Path]]) -> np.ndarray:
    """One label map of some masks: where a mask is not black its label is painted, later ones on top."""
    merged: np.ndarray | None = None
    for label, path in paths:
        try:
            with Image.open(path) as picture:
                mask = np.array(picture.convert("L")) > 0
        except UNREADABLE as error:
            raise unreadable(path, error) from error
        if merged is None:
            merged, first = np.zeros(mask.shape, np.uint8), path
        if mask.shape != merged.shape:
            one, other = (f"{width}x{height}" for height, width in (mask.shape, merged.shape))
            raise UserError(f"{path} is {one} and {first} is {other}; masks of a picture have one size")
        merged[mask] = label
    return merged

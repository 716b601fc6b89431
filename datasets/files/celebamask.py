"""CelebAMask-HQ (Lee et al. 2020): 30,000 faces with 18 masks each, which are merged into label maps once."""

import os
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from datasets.drawn.drawing import FLIP_PAIRS, LABELS
from datasets.files.cache import MAX_PROBLEMS, all_files, cache_folder, raise_problems, remember
from datasets.files.pairs import Column, Pairs, Size, look_up_split, opened, unpacked_folder
from gan.files.disk import read_text
from gan.files.errors import UserError

MAPPING = "CelebA-HQ-to-CelebA-mapping.txt"
PARTS = "CelebAMask-HQ-mask-anno"
FACES = "CelebA-HQ-img"
PER_FOLDER = 2000  # pictures whose masks share a folder

# The numbers in CelebA of each split: the first one, and the end.
BOUNDS = {"train": (0, 162771), "val": (162771, 182638), "test": (182638, 1 << 31)}


class CelebAMask(Pairs):
    """`CelebA-HQ-img/<k>.jpg` with the masks `CelebAMask-HQ-mask-anno/<k // 2000>/<k>_<part>.png`.

    They lie in `root` or in `root/CelebAMask-HQ`. The masks of a face are merged into one label map, in the order of
    LABELS, later ones on top. The cache keeps the label map and makes it again when a mask changes (where it is, see
    datasets/files/cache.py). Splits are "train", "val" and "test", by the picture's number in CelebA, which is in the
    mapping file.
    """

    num_labels, label_names, flip_pairs = len(LABELS), LABELS, FLIP_PAIRS

    def __init__(self, root: str | Path, split: str = "train", size: Size = 256) -> None:
        root = unpacked_folder(root, "CelebAMask-HQ")
        numbers = _numbers(root / MAPPING, *look_up_split(split, BOUNDS))
        only = frozenset(map(str, numbers))
        maps = Column("label map", (_merged(root, numbers, split),), only=only)
        super().__init__(root, (Column("picture", (FACES,), suffixes=(".jpg",), only=only), maps), size, split)


def _numbers(mapping: Path, first: int, end: int) -> np.ndarray:
    """The pictures whose number in CelebA (the second column) is `first` or more and below `end`."""
    try:
        lines = read_text(mapping, 100_000_000).splitlines()[1:]
    except OSError as error:
        raise UserError(f"cannot read {mapping} ({error.strerror}); it comes with the data set") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{mapping} is no text; get the file again") from error
    numbers = []
    for row, line in enumerate(lines, 2):
        match line.split():
            case [number, origin, *_] if number.isdecimal() and origin.isdecimal():
                if first <= int(origin) < end:
                    numbers.append(int(number))
            case [_, *_]:
                raise UserError(f"{mapping}, line {row}: '{line}' does not begin with two numbers; get the file again")
    if not numbers:
        raise UserError(f"{mapping} has no picture of this split, whose numbers in CelebA are {first} to {end - 1}")
    return np.unique(numbers)


def merge(root: Path, labels: Path, numbers: np.ndarray, present: np.ndarray, part: str, index: int) -> str:
    """Make the label map of a picture, of the masks that are `present` [numbers, labels].

    `part` begins the name of an unfinished file.
    """
    number = int(numbers[index])
    masks = [(label, _mask_path(root, number, LABELS[label])) for label in np.flatnonzero(present[index]).tolist()]
    picture = root / FACES / f"{number}.jpg"
    if not masks or not picture.is_file():
        path = picture if masks else _mask_path(root, number, "*")
        raise UserError(f"{path} is missing; unpack the data set again, or take the picture's line out of {MAPPING}")
    merged = Image.fromarray(merge_masks(masks))
    labels.mkdir(exist_ok=True)
    unfinished = labels.with_name(f"{part}.{number}-{os.getpid()}.part")
    merged.save(unfinished, format="PNG")
    unfinished.replace(labels / f"{number}.png")
    return f"{number}.png"


def _merged(root: Path, numbers: np.ndarray, split: str) -> str:
    """Make the label maps `<k>.png` of all pictures, and return their folder."""
    cache = cache_folder(root)
    stamps = _mask_stamps(root, numbers)
    present = stamps[:, :, 1] > 0
    file, labels = cache / f"merged-{split}.jsonl", cache / "labels"
    work = partial(merge, root, labels, numbers, present, file.stem)
    _, problems = remember(
        file, numbers.astype("S"), stamps.reshape(len(numbers), -1), work, "merging masks",
        good=lambda name: (labels / name).exists(), most=MAX_PROBLEMS,
    )  # fmt: skip
    raise_problems(problems, root)
    above = root.resolve().parent
    return f"../{labels.relative_to(above)}" if labels.is_relative_to(above) else str(labels.absolute())


def _mask_stamps(root: Path, numbers: np.ndarray) -> np.ndarray:
    """Size and time of every mask [numbers, labels, 2]; zeros where there is no mask."""
    stamps = np.zeros((len(numbers), len(LABELS), 2), np.int64)
    rows = {number: row for row, number in enumerate(numbers)}
    for folder in np.unique(numbers // PER_FOLDER):
        if not (root / PARTS / str(folder)).is_dir():
            continue
        for entry in all_files(root / PARTS / str(folder)):
            number, _, part = entry.name.removesuffix(".png").partition("_")
            if not number.isdecimal() or int(number) not in rows:
                continue
            if part not in LABELS[1:]:
                raise UserError(f"{entry.path} is a mask of no known part; known are {', '.join(LABELS[1:])}")
            state = os.stat(entry)
            stamps[rows[int(number)], LABELS.index(part)] = state.st_size, state.st_mtime_ns
    return stamps


def _mask_path(root: Path, number: int, part: str) -> Path:
    return root / PARTS / str(number // PER_FOLDER) / f"{number:05d}_{part}.png"


def merge_masks(paths: list[tuple[int, Path]]) -> np.ndarray:
    """One label map from masks of (label, file): a label is where its mask is not black, later ones on top."""
    merged, first = None, Path()
    for label, path in paths:
        with opened(path) as picture:
            mask = np.array(picture.convert("L")) > 0
        if merged is None:
            merged, first = np.zeros(mask.shape, np.uint8), path
        if mask.shape != merged.shape:
            one, other = (f"{width}x{height}" for height, width in (mask.shape, merged.shape))
            raise UserError(f"{path} is {one} and {first} is {other}; masks of a picture have one size")
        merged[mask] = label
    assert merged is not None, "a picture without masks is not read"
    return merged

"""Pictures and label maps in files, paired by name: the base of all data sets on disk."""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from datasets.augment import corner, enlarged
from datasets.files.cache import MAX_PROBLEMS, FoundFile, all_files, cache_folder, raise_problems, remember
from gan.files.disk import regular
from gan.files.errors import UserError, explained, reason
from nets.blocks import edges_of

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
MAPS = (".png",)
ONE_CHANNEL = ("L", "P", "1", "I", "I;16", "I;16B")  # the modes in which a pixel is one number
PAINTED = 1 << 24  # is added to 0xrrggbb where the pixels of a label map are colours
DEEP = ("I", "I;16", "I;16B", "F")  # the modes whose pixels do not fit into a byte
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")  # for others Pillow may start a program

Size = int | tuple[int, int]
Labels = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Fit:
    """How pictures and label maps of another shape get a size. `how` is "stretch", "crop" (the middle) or "pad".

    Pictures are resized by bicubic with antialiasing, label maps by nearest. Padding is `background`, and has a label.
    `partner` is the height and width of the other of both: where one is a whole multiple, the same part is cut.
    """

    how: str = "stretch"
    background: str = "white"
    label: int = 0

    def __post_init__(self) -> None:
        colour_of(self.background)  # a mistyped one is an error before the work

    def picture(self, pixels: Tensor, size: Sequence[int], partner: Sequence[int]) -> Tensor:
        part = self._part(pixels.shape[1:], size, partner)
        left, top, right, bottom = margins = self._margins(part[2:], size)
        inner = [size[0] - top - bottom, size[1] - left - right]
        made = functional.resized_crop(pixels, *part, inner, InterpolationMode.BICUBIC, antialias=True)
        return functional.pad(made, margins, fill=list(colour_of(self.background))) if any(margins) else made

    def map(self, values: np.ndarray, size: Sequence[int], partner: Sequence[int], labels: Labels) -> np.ndarray:
        """`labels` makes labels of the file's numbers, once they are resized."""
        top, left, height, width = self._part(values.shape, size, partner)
        before, above, after, below = self._margins((height, width), size)
        inner = size[0] - above - below, size[1] - before - after
        resized = labels(resize_map(values[top : top + height, left : left + width], inner))
        return np.pad(resized, ((above, below), (before, after)), constant_values=self.label)

    def _part(self, shape: Sequence[int], size: Sequence[int], partner: Sequence[int]) -> tuple[int, int, int, int]:
        """Top, left, height and width of what is taken."""
        if self.how != "crop":
            return 0, 0, shape[0], shape[1]
        times = max(1, shape[0] // partner[0])
        scale = min(shape[0] / size[0], shape[1] / size[1]) / times
        both = zip(shape, size, strict=True)
        height, width = (min(side // times, max(1, round(wanted * scale))) for side, wanted in both)
        top, left = (shape[0] // times - height) // 2, (shape[1] // times - width) // 2
        return times * top, times * left, times * height, times * width

    def _margins(self, shape: Sequence[int], size: Sequence[int]) -> list[int]:
        """What is added to a picture of this shape at its left, top, right and bottom, once it is resized."""
        if self.how != "pad":
            return [0, 0, 0, 0]
        scale = min(size[0] / shape[0], size[1] / shape[1])
        down, across = (outer - max(1, round(side * scale)) for side, outer in zip(shape, size, strict=True))
        return [across // 2, down // 2, across - across // 2, down - down // 2]


def colour_of(name: str) -> tuple[int, ...]:
    with explained(f"there is no colour {name!r}; try white, black, or #c0c0c0", ValueError):
        return ImageColor.getrgb(name)[:3]


@dataclass(frozen=True)
class Column:
    """One kind of file: all files below `folders` that end in `ending` and a suffix. The rest of the path is a name.

    The cache's file name depends on the names of this class and its fields. See [Note: the name of the cache].
    """

    what: str
    folders: tuple[str, ...]
    ending: str = ""
    suffixes: tuple[str, ...] = MAPS
    only: frozenset[str] = field(default=frozenset(), repr=False)  # if not empty, other names are left out

    def find(self, root: Path) -> tuple[dict[str, FoundFile], list[str]]:
        """The files by name, and the problems with them."""
        kinds = ", ".join(f"*{self.ending}{suffix}" for suffix in self.suffixes)
        files: dict[str, FoundFile] = {}
        problems = []
        for number, folder in enumerate(self.folders):
            if not (root / folder).is_dir():
                problems.append(f"there is no folder {root / folder}; put the {self.what}s there ({kinds})")
                continue
            start, before, unlike = len(str(root / folder)) + 1, len(files), ""
            for entry in all_files(root / folder):
                stem, dot, suffix = entry.path[start:].rpartition(".")
                if (dot + suffix).lower() not in self.suffixes or not stem.endswith(self.ending):
                    unlike = f", but there is {entry.name}"
                    continue
                name = stem.removesuffix(self.ending)
                if self.only and name not in self.only:
                    continue
                try:
                    name, state = f"{number}/{name}", os.stat(entry)
                except OSError as error:
                    problems.append(f"{entry.path} cannot be read ({error.strerror}); replace or remove it")
                    continue
                if name in files:
                    one, other = sorted((str(root / files[name].path), entry.path))
                    problems.append(f"{one} and {other} have the same name; remove one of them")
                files[name] = FoundFile(f"{folder}/{entry.path[start:]}", state.st_size, state.st_mtime_ns)
            if len(files) == before:
                problems.append(f"there are no {self.what}s ({kinds}) in {root / folder}{unlike}")
        return files, problems


class Pairs(Dataset):
    """Pairs of a picture and its label map, and for edges a map of instances too, of one size: see `Fit`.

    All files are checked when the set is opened: that each has its partner, can be read to its end and has the shape
    of its partner, and that labels are 0 to num_labels - 1 or in `void`. The cache remembers files that are good, see
    datasets/files/cache.py.

    Both are resized directly from the stored size. An edge is a pixel with a neighbour above, below, left or right that
    belongs to another instance. Edges are made after resizing. `sizes` [pictures, 2] are widths and heights, noted
    when the pictures were checked; listings of before have none.

    [Note: the name of the cache]
    The cache's file name is a checksum of `repr(columns)` and what else decides whether a pair is good. So a change of
    Column's name or fields makes every user check the whole data set again.
    """

    num_labels: int
    label_names: tuple[str, ...]
    flip_pairs: tuple[tuple[int, int], ...] = ()
    void: Mapping[int, int] = {}  # values in files, and the label that each stands for
    fit = Fit()
    padded = 0  # labels that only padding has
    painted = False  # whether pixels of label maps may be colours, which `void` has with PAINTED

    def __init__(self, root: Path, columns: Sequence[Column], size: Size, part: str = "") -> None:
        self.root, self.size = root, as_size(size)
        table, stamps = _pair_up(root, columns)
        # One array and no Python objects, so that worker processes go on sharing its memory.
        self._files = np.array([[os.fsencode(path) for path in row] for row in table])
        self.stamps = stamps.reshape(*self._files.shape, 2)
        rule = repr((1, self.num_labels, sorted(self.void.items()), columns, part))
        file = cache_folder(root) / f"checked-{zlib.crc32(rule.encode()):08x}.jsonl"
        keys = np.array([os.fsencode("|".join(row)) for row in table])
        texts, problems = remember(file, keys, stamps, self._check, f"checking {root.name}", most=MAX_PROBLEMS)
        raise_problems(problems, root)
        self.sizes = np.array([text.split("x") for text in texts if text], int).reshape(-1, 2)

    def keep_only(self, entries: slice | np.ndarray) -> None:
        """Drop all other entries: for splits that share their folders."""
        self._files, self.stamps = self._files[entries], self.stamps[entries]

    def __len__(self) -> int:
        return len(self._files)

    @property
    def sample_names(self) -> list[bytes]:
        return self._files[:, 0].tolist()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._load(index, self.size, (0, 0))

    def load_crop(self, index: int, down: float, right: float) -> dict[str, Tensor]:
        """A random part of the enlarged sample, whose place `down` and `right` choose from 0 to 1."""
        larger = enlarged(self.size)
        return self._load(index, larger, corner(larger, self.size, down, right))

    def paths(self, index: int) -> tuple[Path, ...]:
        """The files of a sample: picture, label map and, with edges, instance map."""
        row = self._files[range(len(self))[index]]
        return tuple(self.root / os.fsdecode(path) for path in row)

    def _load(self, index: int, resized: tuple[int, int], at: tuple[int, int]) -> dict[str, Tensor]:
        """A sample, resized to `resized` and then cropped to this set's size, with `at` as its upper left."""
        (picture, *maps), (stamp, *stamps) = self.paths(index), self.stamps[index]
        (label, *instances), (label_stamp, *instance_stamps) = maps, stamps
        (top, left), (height, width) = at, self.size

        def crop(value: Any) -> Any:
            return value[..., top : top + height, left : left + width]

        pixels, values = read_picture(picture, stamp), read_map(label, label_stamp, self.painted)
        shape, partner = pixels.shape[1:], values.shape
        pixels = self.fit.picture(pixels, resized, partner)
        values = crop(self.fit.map(values, resized, shape, partial(self._labels, label)))
        item: dict[str, Tensor] = {
            "image": tv_tensors.Image(crop(pixels).contiguous()),
            "label": tv_tensors.Mask(torch.from_numpy(np.ascontiguousarray(values))),
        }
        for path, stamp in zip(instances, instance_stamps, strict=True):
            values = crop(resize_map(read_map(path, stamp), resized))
            item["edges"] = tv_tensors.Mask(edges_of(torch.from_numpy(values)).byte())
        return item

    def _check(self, index: int) -> str:
        """Read a pair to its end and raise what is wrong with it. Of a good one the picture's size is remembered."""
        (picture, *maps), (stamp, *stamps) = self.paths(index), self.stamps[index]
        width, height = _try_picture(picture, stamp)
        for number, (path, stamp) in enumerate(zip(maps, stamps, strict=True)):
            values = read_map(path, stamp, self.painted and number == 0)
            if not _same_shape((height, width), values.shape):
                raise UserError(
                    f"{picture} is {width}x{height} and {path} is {values.shape[1]}x{values.shape[0]}; "
                    "make them the same size, or one a whole multiple of the other"
                )
            if number == 0:
                self._labels(path, values)
        return f"{width}x{height}"

    def _labels(self, path: Path, values: np.ndarray) -> np.ndarray:
        labels = labels_in(path, values, self.num_labels - self.padded, self.void)
        return labels.astype(np.uint8) if self.num_labels <= 256 else labels


@contextmanager
def opened(path: Path, stamp: np.ndarray | None = None) -> Iterator[Image.Image]:
    """A picture or a label map, open for reading. What is wrong with the file is a UserError that names it.

    `stamp` is its size and time when the data set was opened. A file that is another one now would be trained on
    unchecked, and the run could not be repeated.
    """
    try:
        state = regular(path)
        changed = stamp is not None and (state.st_size, state.st_mtime_ns) != tuple(stamp)
        if not changed:
            with Image.open(path, formats=FORMATS) as picture:
                yield picture
    except FileNotFoundError as error:
        gone = f"there is no file '{path}'" if stamp is None else f"there is no {path} any more; put it back"
        raise UserError(gone) from error
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise UserError(
            f"{path} cannot be read as a picture ({why_unreadable(error)}); replace or remove it"
        ) from error
    if changed:
        how = f"it had {stamp[0]:,} bytes, and has {state.st_size:,}"
        if state.st_size == stamp[0]:
            how = f"it was written again at {datetime.fromtimestamp(state.st_mtime):%Y-%m-%d %H:%M:%S}"
        raise UserError(
            f"{path} has changed since the data set was opened: {how}; put the old one back, or type --resume auto to "
            f"go on with what it is now"
        )


def why_unreadable(error: Exception, formats: Sequence[str] = FORMATS) -> str:
    """What is wrong with a picture that Pillow does not read, in one line."""
    if isinstance(error, UnidentifiedImageError):
        return f"it is none of {', '.join(formats)}"
    if isinstance(error, Image.DecompressionBombError):
        return f"it has more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels, the most that is read; make it smaller"
    return getattr(error, "strerror", None) or reason(error)


def read_picture(path: Path, stamp: np.ndarray | None = None) -> Tensor:
    """A picture as RGB bytes [3, H, W]. An EXIF orientation is ignored, because the label map has none.

    Pillow decodes and torchvision resizes. torchvision's decoders are about to be removed, and Pillow's bicubic is ten
    times slower. A JPEG decoder that shrinks the picture itself would save a third of the time, but with another
    filter: the result is 43 to 51 dB away from bicubic, from 1024 to 256 pixels.
    """
    with opened(path, stamp) as picture:
        pixels = np.array(picture if picture.mode == "RGB" else picture.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def read_map(path: Path, stamp: np.ndarray | None = None, painted: bool = False) -> np.ndarray:
    """The numbers in a PNG of one channel or a palette, [H, W]; where it may be `painted` also colours, see PAINTED."""
    return values_of(loaded(path, stamp), path, painted)


def loaded(path: Path, stamp: np.ndarray | None = None) -> Image.Image:
    with opened(path, stamp) as picture:
        picture.load()
    return picture


def values_of(picture: Image.Image, name: str | Path, painted: bool = False) -> np.ndarray:
    if picture.mode not in ONE_CHANNEL and painted:
        return np.array(picture.convert("RGB"), np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32) + PAINTED
    if picture.mode not in ONE_CHANNEL:
        raise UserError(
            f"{name} is a picture of mode {picture.mode}; a label map has one channel (mode L) or a palette (mode P), "
            "and its values are the labels"
        )
    return np.array(picture, np.uint8 if picture.mode == "1" else None)


def labels_in(path: str | Path, values: np.ndarray, count: int, void: Mapping[int, int]) -> np.ndarray:
    """The labels of a file's values. A label out of range is refused, because a network would fail on it."""
    labels = values.astype(np.int32)
    for value, label in void.items():
        labels[values == value] = label
    for value in (labels.min(), labels.max()):
        if value >= PAINTED:
            raise UserError(f"{path} has the colour #{value - PAINTED:06x}, of no label; leave --labels out for advice")
        if not 0 <= value < count:
            also = "".join(f", and {value} for {label}" for value, label in void.items() if value < PAINTED)
            raise UserError(
                f"{path} has the label {int(value)}; with {count} labels the allowed range is 0..{count - 1}{also}"
            )
    return labels


def resize_map(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Nearest: each pixel gets one stored value, never a mixture."""
    picture = Image.fromarray(values if values.dtype == np.uint8 else values.astype(np.int32))
    return np.array(picture.resize((size[1], size[0]), Image.Resampling.NEAREST))


def as_size(size: Size) -> tuple[int, int]:
    """Height and width. One number stands for both."""
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise UserError(f"size {height}x{width} has no pixels; try 256")
    return height, width


def look_up_split(split: str, splits: Mapping[str, Any]) -> Any:
    if split not in splits:
        raise UserError(f"split {split!r} is not known; try one of {', '.join(splits)}")
    return splits[split]


def unpacked_folder(root: str | Path, name: str) -> Path:
    """The folder of a data set: `root` itself, or the folder `name` in it, which the set's archive unpacks to."""
    root = Path(root).expanduser()
    return root / name if (root / name).is_dir() else root


def _pair_up(root: Path, columns: Sequence[Column]) -> tuple[list[list[str]], np.ndarray]:
    """The paths of each name, sorted by name, and the sizes and times of these files."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; give the folder in which the data set lies")
    files, problems = zip(*(column.find(root) for column in columns), strict=True)
    flat = [problem for some in problems for problem in some]
    pictures, labels = files[:2]
    for column, others in zip(columns[1:], files[1:], strict=True):
        if pictures and others:
            flat += _without_partner(pictures, others, columns[0], column, root)
    if pictures and labels:
        flat += _without_partner(labels, pictures, columns[1], columns[0], root)
    raise_problems(flat, root)
    names = sorted(pictures)
    table = [[column[name].path for column in files] for name in names]
    stamps = [[value for column in files for value in column[name][1:]] for name in names]
    return table, np.array(stamps, np.int64)


def _without_partner(
    files: dict[str, FoundFile], others: dict[str, FoundFile], column: Column, other: Column, root: Path
) -> list[str]:
    alone = sorted(files.keys() - others.keys())
    if not alone:
        return []
    names = ", ".join(str(root / files[name].path) for name in alone[:3]) + (" ..." if len(alone) > 3 else "")
    where = " or ".join(str(root / folder) for folder in other.folders)
    small = {name.lower() for name in others}
    case = "capital letters count too; " if any(name.lower() in small for name in alone) else ""
    return [
        f"{len(alone)} of {len(files)} {column.what}s have no {other.what} of the same name: {names}; "
        f"{case}add each {other.what} to {where}, or remove the {column.what}"
    ]


def _same_shape(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Equal, or one is a whole multiple of the other, such as 1024 px pictures with 512 px label maps."""
    small, large = sorted((one, other))
    return large[0] % small[0] == 0 and all(a * (large[0] // small[0]) == b for a, b in zip(small, large, strict=True))


def _try_picture(path: Path, stamp: np.ndarray) -> tuple[int, int]:
    """Width and height of a picture, read to its end; a JPEG at an eighth of its size, which saves most of the time."""
    with opened(path, stamp) as picture:
        size, mode = picture.size, picture.mode
        picture.draft("RGB", (max(1, size[0] // 8), max(1, size[1] // 8)))
        picture.load()
    if mode in DEEP:
        raise UserError(f"{path} has more than 8 bits a channel (mode {mode}); save it with 8")
    return size

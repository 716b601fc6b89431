"""What a typed PATH is: where each picture lies, how its file is read, and which class it has."""

import io
import json
import math
import os
import tarfile
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

import numpy as np
from PIL import Image

from datasets.files.cache import all_files
from datasets.files.decoding import MOST_BYTES, READ, SUFFIXES
from datasets.files.pairs import why_unreadable
from gan.files.disk import regular
from gan.files.errors import UserError, explained

# The class of each picture, int64 [pictures] or float32 [pictures, length], and the names of all classes.
Labels = tuple[np.ndarray, tuple[str, ...]]
JSON = "dataset.json"
MOST_JSON = 2**28
NOT_READ = ".heic", ".heif", ".dng", ".raw", ".cr2", ".nef", ".psd", ".svg"  # pictures in formats that we cannot read
SPLITS = {"train", "training", "val", "valid", "validation", "test"}
FORMS = "a folder of pictures, a .zip, .tar or .parquet file or a folder of those, or a name such as cifar10"


class Source(ABC):
    """Pictures by number. `names` are bytes in one array, so that worker processes share its memory.

    `stamps` show whether a picture has changed: its size, or 0, and a time. `note` says what of all that is `there`
    was left out.
    """

    part: tuple[object, ...] = ()  # which of the pictures at the path
    what, forms = "pictures", FORMS
    suffixes: tuple[str, ...] = SUFFIXES

    def __init__(
        self,
        kind: str,
        path: Path,
        names: Sequence[str],
        stamps: Sequence[tuple[int, int]],
        labels: Labels | None = None,
        there: Iterable[str] = (),
    ) -> None:
        others = Counter(_suffix(name) for name in there if name != JSON and _suffix(name) not in self.suffixes)
        save = dict.fromkeys(NOT_READ if self.what == "pictures" else (), " (save as JPEG or PNG first)")
        kinds = [f"{count} {kind or 'without a suffix'}{save.get(kind, '')}" for kind, count in others.most_common(8)]
        note = ", ".join(kinds)
        self.kind, self.path, self.note = kind, path, note
        if not names:
            raise UserError(f"there are no {self.what} in {path}{f' ({note})' if note else ''}; give {self.forms}")
        order = sorted(range(len(names)), key=names.__getitem__)
        self.names = np.array([os.fsencode(names[row]) for row in order])
        self.stamps = np.array(stamps, np.int64).reshape(len(names), 2)[order]
        self.order = np.array(order)
        self.labels, self.class_names = (None, ()) if labels is None else (labels[0][order], labels[1])
        self._kept: tuple[tuple[Any, ...], Any] = ((), None)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return str(self.path / os.fsdecode(self.names[index]))

    @abstractmethod
    def read(self, index: int) -> bytes | BinaryIO | Image.Image:
        """The picture's file, its content, or the picture."""

    @contextmanager
    def opened(self, index: int) -> Iterator[Image.Image]:
        """The picture, to be read. What is wrong with it is a UserError that names it.

        Pillow refuses pictures of more than 179 million pixels before it makes them.
        """
        try:
            if self.stamps[index][0] > MOST_BYTES:
                raise UserError(f"it has more than {MOST_BYTES:,} bytes")
            content = self.read(index)
            if isinstance(content, Image.Image):
                yield content
                return
            if not content:
                raise UserError("it is empty")
            file = io.BytesIO(content) if isinstance(content, bytes) else content
            with file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what Pillow finds odd, and reads
                with Image.open(file, formats=READ) as picture:
                    yield picture
        except Exception as error:  # Pillow and archives raise many kinds for damaged files
            name = self.name(index).replace("\n", "\\n")  # or the rest would look like another message
            raise UserError(f"{name}: {why_unreadable(error, READ)}") from error

    def kept(self, what: object, make: Callable[[], Any]) -> Any:
        """What `make` opens, until something else is asked for, in each process: two would share one position in it."""
        if self._kept[0] != (os.getpid(), what):
            self._kept = (os.getpid(), what), make()
        return self._kept[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": ((), None)}


class Folder(Source):
    """Files in a folder, however deep, or one file; with StyleGAN's dataset.json, their labels."""

    def __init__(self, path: Path, classes: bool | None) -> None:
        names, stamps, there = [], [], []
        folder = path.parent if path.is_file() else path
        start = os.path.join(folder, "")
        for file in (entry.path for entry in all_files(path)) if folder == path else [start + path.name]:
            name = file.removeprefix(start).replace(os.sep, "/")
            there.append(name)
            if name == JSON or _suffix(name) not in self.suffixes:
                continue
            names.append(name)
            try:
                state = os.stat(file)
                stamps.append((state.st_size, state.st_mtime_ns))
            except OSError:  # a link to nothing; to read it says so
                stamps.append((0, 0))
        labels, kind = class_folders(names, classes), "a folder"
        if (path / JSON).exists() and classes is not False:
            with reading(path / JSON, "labels"):
                regular(path / JSON)
                labels, kind = _labels_in((path / JSON).open("rb"), names, path / JSON), f"a folder with {JSON}"
        super().__init__(kind, folder, names, stamps, labels, there)

    def read(self, index: int) -> BinaryIO:
        path, stamp = self.name(index), tuple(self.stamps[index])
        state = regular(path)
        if (state.st_size, state.st_mtime_ns) != stamp:
            raise UserError("it has changed since the data set was opened")
        if not state.st_size:
            raise UserError("it is empty")
        return Path(path).open("rb")


class Zip(Source):
    """A zip of pictures, as StyleGAN's dataset_tool makes them, or any other."""

    def __init__(self, path: Path, classes: bool | None) -> None:
        with reading(path, "a zip"), zipfile.ZipFile(path) as file:
            there = {each.filename: each for each in file.infolist() if _is_file(each.filename)}
            names = [name for name in there if _suffix(name) in SUFFIXES]
            labels, kind = class_folders(names, classes), "a zip"
            if JSON in file.NameToInfo and classes is not False:
                labels, kind = _labels_in(file.open(JSON), names, path / JSON), f"a zip with {JSON}"
        stamps = [(there[name].file_size, there[name].CRC) for name in names]
        super().__init__(kind, path, names, stamps, labels, there)

    def read(self, index: int) -> bytes:
        file = self.kept(None, lambda: zipfile.ZipFile(self.path))
        with file.open(os.fsdecode(self.names[index])) as stream:
            return stream.read(MOST_BYTES)


class Tar(Source):
    """Tar shards of WebDataset: the files of a sample follow each other and have one name before the first dot."""

    def __init__(self, path: Path, shards: list[Path], classes: bool | None) -> None:
        self.shards, names, stamps, places = shards, [], [], []
        samples: dict[tuple[int, str], int | None] = {}  # their classes
        stems = []
        for number, shard in enumerate(shards):
            with reading(shard, "a tar"), tarfile.open(shard, "r:") as file:
                for member in filter(tarfile.TarInfo.isreg, file):
                    folder, _, base = member.name.rpartition("/")
                    first, dot, rest = base.partition(".")
                    stem, suffix = f"{folder}/{first}", (dot + rest).lower()
                    if suffix in SUFFIXES:
                        stems.append((number, stem))
                        names.append(f"{shard.name}/{member.name}" if len(shards) > 1 else member.name)
                        stamps.append((member.size, shard.stat().st_mtime_ns))
                        places.append((number, member.offset_data, member.size))
                    elif suffix in (".cls", ".json") and member.size < 2**20:
                        stream = file.extractfile(member)
                        assert stream is not None, "a regular member has content"
                        samples[number, stem] = _class_in(stream.read(), samples.get((number, stem)))
        found = [label for stem in stems if (label := samples.get(stem)) is not None]
        labels = class_folders([name.partition("/")[2] for name in names] if len(shards) > 1 else names, classes)
        if names and len(found) == len(names) and classes is not False:
            labels = classes_by_number(found)
        super().__init__("tar shards" if len(shards) > 1 else "a tar", path, names, stamps, labels)
        self.places = np.array(places, np.int64)[self.order]

    def read(self, index: int) -> bytes:
        shard, offset, size = self.places[index].tolist()
        with self.shards[shard].open("rb") as file:
            file.seek(offset)
            return file.read(size)


def reading(file: Path, kind: str) -> AbstractContextManager[None]:
    """Inside the `with`, a file is listed: zipfile, tarfile and pyarrow raise many kinds of errors for damaged ones."""
    return explained(f"{file} cannot be read as {kind} ({{why}}); get the file again", Exception)


def class_folders(names: Sequence[str], classes: bool | None) -> Labels | None:
    """The class of each picture, if the sub-folders of the first level hold all pictures and are two or more.

    `classes` decides it otherwise. Folders train/ and val/ are splits, and no classes: theirs are inside. StyleGAN
    puts pictures into folders 00000, 00001 ... of a thousand each, which are no classes either.
    """
    if classes is False:
        return None
    parts = [PurePosixPath(name).parts for name in names]
    if parts and all(len(each) > 1 and each[0].lower() in SPLITS for each in parts):
        parts = [each[1:] for each in parts]
    found = sorted({each[0] for each in parts if len(each) > 1})
    thousands = all(name.isdecimal() and len(name) == 5 for name in found)
    if classes is None and (len(found) < 2 or thousands or any(len(each) == 1 for each in parts)):
        return None
    if not found or any(len(each) == 1 for each in parts):
        raise UserError("classes are the sub-folders of the first level, and pictures lie beside those; move them")
    numbers = {name: number for number, name in enumerate(found)}
    return np.array([numbers[each[0]] for each in parts]), tuple(found)


def _labels_in(stream: IO[bytes], names: Sequence[str], file: Path) -> Labels | None:
    """The labels of a dataset.json: a number or a vector for each picture, or null for none."""
    with stream:
        text = stream.read(MOST_JSON + 1)
    if len(text) > MOST_JSON:
        raise UserError(f"{file} is larger than {MOST_JSON:,} bytes; it should hold labels alone")
    other = f'{file} is not {{"labels": [["name.png", 3], ...]}} or {{"labels": null}}; correct it, or type --classes '
    with explained(f"{other}false to train without labels", ValueError, TypeError, AttributeError, RecursionError):
        content = json.loads(text)
        given = content.get("labels") if isinstance(content, dict) else content
        if given is None:
            return None
        known = {name.replace("\\", "/"): label for name, label in given}
    here = set(names)
    for what, missing in (("names files that are not there", known.keys() - here), ("misses", here - known.keys())):
        if missing:
            shown = ", ".join(sorted(missing)[:3]) + (" ..." if len(missing) > 3 else "")
            raise UserError(f"{file} {what}: {shown} ({len(missing)} in all); correct it, or type --classes false")
    labels = [known[name] for name in names]
    if all(type(label) is int and 0 <= label < 2**20 for label in labels):
        return classes_by_number(labels)
    lengths = {len(label) if isinstance(label, list) else 0 for label in labels}
    finite = (type(value) in (int, float) and math.isfinite(value) for label in labels for value in label)
    if len(lengths) == 1 and lengths != {0} and all(finite):
        return np.array(labels, np.float32), tuple(str(number) for number in range(*lengths))
    raise UserError(f"{file} has labels that are neither whole numbers from 0 on nor vectors of one length")


def classes_by_number(labels: Sequence[int], names: Sequence[str] = ()) -> Labels:
    """Classes that are numbers. Without names they go by their number."""
    return np.array(labels), tuple(names or map(str, range(max(labels, default=0) + 1)))


def _class_in(content: bytes, before: int | None) -> int | None:
    """The class in a sample's .cls or .json; what has none leaves what was known before."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return before
    if isinstance(value, dict):
        value = next((value[key] for key in ("cls", "label", "class") if key in value), None)
    return value if type(value) is int and 0 <= value < 2**20 else before


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_file(name: str) -> bool:
    """Whether what is in a zip is a file of a person's own, which no system has added."""
    return not name.endswith("/") and not PurePosixPath(name).name.startswith(".") and "__MACOSX" not in name

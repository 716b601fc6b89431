"""Finds out what a typed PATH is, and reads what needs another package: Parquet, and torchvision's sets by name."""

import json
from collections import defaultdict
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from datasets.files.cache import all_files
from datasets.files.decoding import MOST_BYTES, SUFFIXES
from datasets.files.sources import FORMS, Folder, Source, Tar, Zip, classes_by_number, reading
from gan.files.errors import UserError, explained

# torchvision's sets by the names that are typed.
KINDS = """CIFAR10 CIFAR100 MNIST FashionMNIST KMNIST SVHN STL10 CelebA LSUN Flowers102 Food101 Caltech101 DTD EuroSAT
Places365"""
NAMED = {kind.lower(): kind for kind in KINDS.split()} | {"pets": "OxfordIIITPet"}
# The folders by which they are known.
MARKS = {"cifar-10-batches-py": "cifar10", "cifar-100-python": "cifar100"}
MARKS |= {f"{kind}/raw": kind.lower() for kind in ("MNIST", "FashionMNIST", "KMNIST")}
COMPRESSED = (".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")
HOME = "data"  # where sets by name lie, or are downloaded to
UNLABELLED = ("celeba", "lsun")  # their numbers are no classes to train by


def absent_data(data: str, forms: str = "", option: str = "--data") -> UserError:
    """The error of data that are not there, which may be those that nobody has typed after the `option`."""
    data += ", which is taken where --data is not typed" if data == HOME else ""
    return UserError(f"there is no folder {data}; type {option} and the folder in which the data set lies{forms}")


def check_there(data: str, option: str = "--data", named: bool = True) -> None:
    """Refuse what is not there, or an empty folder, without reading a file. A set that is `named` may be downloaded."""
    path, forms = Path(data).expanduser(), f", or {FORMS}" if named else ""
    if not path.exists() and not (named and _name(data) in NAMED):
        raise absent_data(data, forms, option)
    with suppress(OSError):  # who reads the folder says why that cannot be
        if path.is_dir() and next(all_files(path), None) is None:
            raise UserError(f"the folder {data} is empty; type {option} and one in which data lie{forms}")


def find_source(data: str, classes: bool | None = None, option: str = "--data") -> Source:
    """The pictures at a path, or of a name. `classes` decides whether they have labels; None finds out."""
    check_there(data, option)
    path = Path(data).expanduser()
    if not path.exists():
        return Named(_name(data), Path(HOME), classes)
    with explained(f"cannot read {data} ({{why}}); give {FORMS}", OSError):
        return _at(path, classes)


def _at(path: Path, classes: bool | None) -> Source:
    found: dict[str, list[Path]] = defaultdict(list)
    if path.is_dir():
        for mark, name in MARKS.items():
            if (path / mark).is_dir():
                return Named(name, path, classes)
        for entry in all_files(path):
            suffix = Path(entry.name).suffix.lower()
            if suffix in SUFFIXES:
                return Folder(path, classes)
            found[suffix].append(Path(entry.path))
    elif path.is_file():
        found[path.suffix.lower()].append(path)
    else:
        raise UserError(f"{path} is no file and no folder; give {FORMS}")
    if shards := sorted(found[".tar"]):
        return Tar(path, shards, classes)
    if tables := sorted(found[".parquet"]):
        return Parquet(path, [file for file in tables if file.name.startswith("train")] or tables, classes)
    if len(found[".zip"]) == 1:
        return Zip(found[".zip"][0], classes)
    if path.is_dir():
        return Folder(path, classes)
    if path.suffix.lower() in COMPRESSED:
        raise UserError(f"{path} is compressed as a whole; unpack it, and give the folder")
    what = "one picture" if path.suffix.lower() in SUFFIXES else "no kind of data set that is known"
    raise UserError(f"{path} is {what}; give {FORMS}")


def _name(data: str) -> str:
    return data.lower().replace("-", "").replace("_", "")


class Parquet(Source):
    """Tables with a column of pictures, as hubs store them: structs of bytes and path, or bytes alone."""

    def __init__(self, path: Path, files: list[Path], classes: bool | None) -> None:
        needed = f"to read {path}, Parquet's reader is needed; type pip install pyarrow"
        with explained(needed, ModuleNotFoundError):
            from pyarrow import parquet
        names, stamps, places, labels = [], [], [], []
        class_names: tuple[str, ...] = ()
        for number, file in enumerate(files):
            with reading(file, "Parquet"):
                table, state = parquet.ParquetFile(file), file.stat()
                self.column, label = _columns(table.schema_arrow, file)
                class_names = _names_of_classes(table.schema_arrow.metadata or {}, label)
                for group in range(table.num_row_groups):
                    rows = table.metadata.row_group(group).num_rows
                    places += [(number, group, row) for row in range(rows)]
                    names += [f"{file.name}/{group:04}-{row:07}" for row in range(rows)]
                    stamps += [(0, state.st_mtime_ns)] * rows
                    labels += table.read_row_group(group, [label])[label].to_pylist() if label else []
        whole = classes is not False and len(labels) == len(names) > 0 and all(type(each) is int for each in labels)
        known = classes_by_number(labels, class_names) if whole and min(labels) >= 0 else None
        self.files = files
        super().__init__("Parquet", path, names, stamps, known)
        self.places = np.array(places, np.int64)[self.order]

    def read(self, index: int) -> bytes:
        """One row. Its whole group is read, and kept until another one is asked for."""
        from pyarrow import parquet

        def column() -> Any:
            return parquet.ParquetFile(self.files[number]).read_row_group(group, [self.column])[self.column]

        number, group, row = self.places[index].tolist()
        value = self.kept((number, group), column)[row].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes) or len(content) > MOST_BYTES:
            raise UserError("the row holds no picture's bytes")
        return content


def _columns(schema: Any, file: Path) -> tuple[str, str | None]:
    from pyarrow import types as kinds

    def holds_bytes(kind: Any) -> bool:
        if kinds.is_struct(kind):
            return kind.get_field_index("bytes") >= 0
        return kinds.is_binary(kind) or kinds.is_large_binary(kind)

    pictures = [field.name for field in schema if holds_bytes(field.type)]
    if not pictures:
        raise UserError(f"{file} has no column of pictures (bytes); its columns: {', '.join(schema.names)[:200]}")
    labels = [name for name in ("label", "labels", "class", "cls", "fine_label") if name in schema.names]
    picture = next((name for name in ("image", "img", "picture") if name in pictures), pictures[0])
    return picture, next((name for name in labels if kinds.is_integer(schema.field(name).type)), None)


def _names_of_classes(metadata: dict[bytes, bytes], label: str | None) -> tuple[str, ...]:
    """As hubs write them beside the columns."""
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
        return tuple(map(str, names))
    except (KeyError, ValueError, TypeError, RecursionError):
        return ()


class Named(Source):
    """A set of torchvision by its name: where it lies in a folder, else downloaded there."""

    def __init__(self, name: str, root: Path, classes: bool | None) -> None:
        from torchvision import datasets as published

        kind = NAMED[name]
        make = getattr(published, kind)
        how = dict.fromkeys({"download", "small"} & signature(make).parameters.keys(), True)
        why = f"{name} is not in the folder {root} and cannot be downloaded ({{why}}); put it there as "
        with explained(f"{why}torchvision.datasets.{kind} wants it", Exception):  # the network raises many kinds
            self.set = make(root, **how)
        given = [getattr(self.set, each, None) for each in ("targets", "labels", "_labels")]
        labels = next((np.asarray(each).tolist() for each in given if each is not None), None)
        whole = labels is not None and classes is not False and name not in UNLABELLED
        names = [f"{name}/{row:08}" for row in range(len(self.set))]
        known = classes_by_number(labels, getattr(self.set, "classes", ())) if whole else None
        super().__init__(f"torchvision's {kind}", root, names, [(0, 0)] * len(names), known)

    def read(self, index: int) -> Image.Image:
        return self.set[index][0]

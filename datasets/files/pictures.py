"""Pictures alone, or with classes, from whatever a path holds: looked at once, decoded once, all of one size."""

import os
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors

from datasets.files.cache import cache_folder, listed, remember
from datasets.files.decoding import Frame, header
from datasets.files.pairs import Size, as_size
from datasets.files.sources import Source
from gan.files.errors import UserError
from gan.noise import seed_for

LARGEST = 1024  # pixels of a side that is taken as it is, where no size is typed
USUAL = 256  # and the largest size that is chosen where pictures differ
MARGIN = 2**30  # bytes of the disk that we leave free
FEWEST = 8  # held-out pictures, where there are four times as many


class Headers:
    """What is known of pictures before they are decoded: width, height and mode of each; None where it is broken."""

    def __init__(self, source: Source) -> None:
        self.source = source
        file = cache_folder(source.path) / f"headers-{_sum(source.path, *source.part)}.jsonl"
        what = f"looking at {source.path.name}"
        self.texts, self.problems = remember(file, source.names, source.stamps, self._read, what)
        rows = [text.split() for text in self.texts if text is not None]
        if not rows:
            raise_broken(source, self.problems)
        self.sizes = Counter((int(width), int(height)) for width, height, _ in rows)
        self.modes = Counter(mode for *_, mode in rows)

    def _read(self, index: int) -> str:
        with self.source.opened(index) as picture:
            return header(picture)

    @property
    def channels(self) -> int:
        """1 if all pictures are gray, else 3."""
        return 1 if all(mode.rstrip("+") in ("1", "L", "LA", "I", "F") or "I;16" in mode for mode in self.modes) else 3

    def size(self) -> tuple[tuple[int, int], str]:
        """Height and width that fit these pictures, and why."""
        ((width, height), most), *_ = self.sizes.most_common(1)
        if most >= 0.5 * self.sizes.total() and max(width, height) <= LARGEST:
            return (height, width), "all are" if most == self.sizes.total() else "most are"
        shorter = np.repeat([min(size) for size in self.sizes], list(self.sizes.values()))
        power = 2 ** int(np.log2(max(4, np.median(shorter))))
        return (min(power, USUAL),) * 2, "most reach it"


class UsableSamples(Dataset):
    """The samples of a source that can be used: `entries` are their numbers there."""

    source: Source
    entries: np.ndarray

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def sample_names(self) -> list[bytes]:
        return self.source.names[self.entries].tolist()

    def split(self, held_out: float) -> tuple[Self, Self]:
        """Two sets: for training, and that share to hold out, which the names decide.

        In small sets a few more are held out, or there would be nothing to look at. There some samples change sides
        when others are added. Where the share itself is FEWEST or more, each keeps its side.
        """
        out = in_share(self.sample_names, held_out)
        return self.part(~out), self.part(out)

    def part(self, rows: np.ndarray) -> Self:
        part = copy(self)
        part.entries = self.entries[rows]
        return part


class Pictures(UsableSamples):
    """Items {"image": uint8 [channels, height, width]}, and where there are classes {"class": number or vector} too.

    All are of the frame's size; in a frame of "whole" each has its own shape, see `shapes` [samples, 2].

    All pictures are decoded when the set is opened, and stay in the cache as one array of bytes, which processes
    share. Where the disk has no room for that they are only tried, and decoded again each time. Without `keep` only
    their headers are read, and each is decoded when it is asked for; but to skip broken ones all must be decoded.

    A broken picture is an error that names it, unless `skip_broken` leaves it out.
    """

    def __init__(self, source: Source, frame: Frame, skip_broken: bool = False, keep: bool = True) -> None:
        self.source, self.frame = source, frame
        self.size, self.channels = (frame.height, frame.width), frame.channels
        self.class_names = source.class_names
        self.classes = len(self.class_names)  # or how long their vectors are
        whole = frame.fit == "whole"
        known = Headers(source).texts if whole else [None] * len(source)
        shapes = [frame.shape(*map(int, text.split()[:2])) if text is not None else self.size for text in known]
        self._shapes = np.array(shapes)  # of all entries
        # A picture is a row of the array; in a frame of "whole" it has a row for each pixel of its longer side.
        self.bytes = frame.channels * frame.height * (1 if whole else frame.width)
        self._lengths = self._shapes.prod(1) * frame.channels // self.bytes
        self._array: np.ndarray | None = None
        stem = f"pixels-{_sum(source.path, frame, *source.part)}"
        self.file = cache_folder(source.path) / f"{stem}.bytes"
        if keep or skip_broken:
            texts, self.problems = remember(
                self.file.with_suffix(".jsonl"), source.names, source.stamps, self._write, "decoding pictures",
                begin=self._reserve, good=self._is_there, saving=self._on_disk,
            )  # fmt: skip
        else:
            headers = Headers(source)
            tiny = [text and frame.tiny(*map(int, text.split()[:2])) for text in headers.texts]
            self.problems = headers.problems + [f"{source.name(k)}: {why}" for k, why in enumerate(tiny) if why]
            texts = [text and "-1" for text in headers.texts]
        if self.problems and (not skip_broken or len(self.problems) == len(source)):
            raise_broken(source, self.problems)
        self.entries = np.array([entry for entry, text in enumerate(texts) if text is not None])
        # Of all entries, see _write. Listings of before have no checksums.
        self._rows, self._sums = np.array([(*map(int, (text or "-1").split()), -1)[:2] for text in texts]).T
        for entry, text in enumerate(texts if whole else ()):
            self._shapes[entry] = list(map(int, text.split()[2:])) if text and " " in text else self._shapes[entry]
        self.decoded = bool((self._rows[self.entries] >= 0).all())

    @property
    def shapes(self) -> np.ndarray:
        return self._shapes[self.entries]

    @property
    def room(self) -> int:
        """The bytes of all pictures, decoded."""
        return int(self._lengths.sum()) * self.bytes

    def name(self, index: int) -> str:
        return os.fsdecode(self.source.names[self.entries[index]])

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = int(self.entries[index])
        try:
            pixels = self._decode(entry) if self._rows[entry] < 0 else self._read(entry)
        except UserError as error:  # it was not decoded before
            raise_broken(self.source, [str(error)])
        item: dict[str, Any] = {"image": tv_tensors.Image(pixels)}
        if self.source.labels is not None:
            label = self.source.labels[entry]
            item["class"] = torch.from_numpy(label) if label.ndim else int(label)
        return item

    def _read(self, entry: int) -> Tensor:
        """A picture's row. If its bytes are no longer what was written, the picture is decoded into it again."""
        row = self._rows[entry]
        pixels = self._open()[row : row + self._lengths[entry]].copy()
        if self._sums[entry] in (-1, zlib.crc32(pixels.data)):
            return torch.from_numpy(pixels).view(self.channels, *self._shapes[entry].tolist())
        decoded = self._decode(entry)
        with suppress(OSError):  # it may not be written
            self._fill(entry, decoded)
        return decoded

    def _open(self) -> np.ndarray:
        if self._array is None:
            rows = self.file.stat().st_size // self.bytes
            self._array = np.memmap(self.file, np.uint8, "r", shape=(rows, self.bytes))
        return self._array

    def _decode(self, entry: int) -> Tensor:
        with self.source.opened(entry) as picture:
            return self.frame.pixels(picture)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_array": None}  # or all pictures would be sent to a worker

    # The array grows: a new picture gets a new row, and only a damaged row is written twice. So who reads it is not
    # disturbed.

    def _reserve(self, todo: np.ndarray) -> None:
        """Give these entries rows at the end of the file, as far as the disk has room.

        A row that a killed process has given is not given again, because its workers may still write there.
        """
        room = max(0, shutil.disk_usage(self.file.parent).free - MARGIN) // self.bytes
        ends = np.cumsum(self._lengths[todo])
        ends = ends[ends <= room]
        todo = todo[: len(ends)]
        with self.file.open("ab") as file:
            first = -(-file.tell() // self.bytes)
            # On most disks only what is written takes room.
            file.truncate((first + int(ends.max(initial=0))) * self.bytes)
        self._rows = np.full(len(self.source), -1)
        self._rows[todo] = first + ends - self._lengths[todo]

    def _write(self, entry: int) -> str | OSError:
        """Decode a picture into its row, if there is room for it. Returns the row, the checksum of its bytes, and in a
        frame of "whole" the shape, which for some files the header did not say.
        """
        pixels = self._decode(entry)
        try:
            if self._rows[entry] >= 0:
                self._fill(entry, pixels)
        except OSError as error:
            return error  # the disk's, not the picture's
        shape = " {} {}".format(*pixels.shape[1:]) if self.frame.fit == "whole" else ""
        return f"{self._rows[entry]} {zlib.crc32(pixels.numpy().data)}{shape}"

    def _fill(self, entry: int, pixels: Tensor) -> None:
        with self.file.open("r+b") as file:
            file.seek(int(self._rows[entry]) * self.bytes)
            file.write(pixels.numpy().data)

    def _is_there(self, text: str) -> bool:
        row = int(text.split()[0])
        return row < 0 or (self.file.exists() and self.file.stat().st_size >= (row + 1) * self.bytes)

    def _on_disk(self) -> None:
        """A row is known only when the disk has it."""
        if self.file.exists():
            with self.file.open("r+b") as file:
                os.fsync(file.fileno())


class MadeUp(Dataset):
    """Samples of the right shape for a plan. Labels are in blocks, which is about what a label map costs on a CPU.

    `gone`: stands for data that cannot be opened, and why. Whoever reads a sample gets this as an error.
    """

    flip_pairs, sample_names, classes, class_names, half = (), (), 0, (), None

    def __init__(
        self,
        size: Size = (1, 1),
        channels: int = 3,
        num_labels: int = 0,
        edges: bool = False,
        *,
        length: int = 1_000_000,
        gone: str = "",
        void: Iterable[tuple[int, int]] = (),
        **noted: Any,
    ) -> None:
        self.size, self.channels, self.num_labels, self.edges = as_size(size), channels, num_labels, edges
        self.length, self.gone, self.void = length, gone, dict(void)
        vars(self).update(noted)  # what else `noted` says of such data

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.gone:
            raise UserError(self.gone)
        item: dict[str, Any] = {"image": tv_tensors.Image(torch.zeros(self.channels, *self.size, dtype=torch.uint8))}
        if self.num_labels:
            down, across = (torch.arange(length) * 8 // length for length in self.size)
            label = (index + across + 8 * down[:, None]) % self.num_labels
            item["label"] = tv_tensors.Mask(label)
            item |= {"edges": tv_tensors.Mask(label % 2)} if self.edges else {}
        return item


NOTED = "size", "channels", "classes", "class_names", "num_labels", "label_names", "half"


def facts_of(samples: Any) -> dict[str, Any]:
    """What `MadeUp` needs to stand for samples of files, by JSON's values; of other samples nothing."""
    if not type(samples).__module__.startswith(__package__ or ""):
        return {}
    found = {name: getattr(samples, name) for name in NOTED if hasattr(samples, name)}
    void = list(getattr(samples, "void", {}).items())
    return found | {"kind": type(samples).__name__, "length": len(samples), "void": void}


def in_share(names: Sequence[bytes], share: float) -> np.ndarray:
    """Which of these names are in that share, as True: they decide it themselves. Of few names it is a few more."""
    draws = np.array([seed_for("held out", name.hex()) / 2**63 for name in names])
    few = min(FEWEST, len(names) // 4)
    return draws < (max(share, float(np.partition(draws, few)[few])) if share else 0.0)


def raise_broken(source: Source, problems: Sequence[str]) -> NoReturn:
    advice = "replace or remove them" if len(problems) == len(source) else "type --skip-broken to leave them out"
    count = f"{len(problems)} of {len(source)} {source.what} in {source.path} cannot be used; {advice}:"
    raise UserError(listed(count, problems))


def _sum(path: Path, *rule: object) -> str:
    return f"{zlib.crc32(repr((3, os.fspath(path.resolve()), *rule)).encode(errors='surrogateescape')):08x}"

"""Weights of a player from safetensors files: `Player(weights=PATH)`.

PATH is a safetensors file, or an index of several, as the hubs ship them (`model.safetensors.index.json`), or a folder
that has one of them. Each rank reads only the bytes that it keeps.

The files are read by hand, in pieces of a few MB. The format is simple: the header's length, the header, and all
numbers. The package safetensors maps a whole file into memory, which counts in full under `ulimit -v`.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gan.files.checkpoint import Share
from gan.files.disk import regular
from gan.files.errors import UserError, reason
from gan.phase import Player

INDEX, ENDING = ".safetensors.index.json", ".safetensors"
PIECE = 8 * 2**20  # bytes that are read at a time
SHOWN = 3  # names in an error
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class _Entry:
    """A tensor in a file, and the place of its first byte."""

    file: Path
    dtype: torch.dtype
    shape: torch.Size
    place: int


class WeightFiles:
    """The files of one player's weights. Errors are UserErrors that name the player and the file.

    A file must stay as it is while a run reads it. If it is changed meanwhile, that is an error.
    """

    def __init__(self, player: Player) -> None:
        """Read the headers only."""
        self.player = player
        self.path = Path(player.weights).expanduser()
        self.entries: dict[str, _Entry] = {}
        self.identities: dict[Path, tuple[int, ...]] = {}
        with self._failing(self.path):
            first = _found(self.path)
        if first.name.endswith(INDEX):
            self._read_index(first)
        else:
            self.entries = self._header(first)

    @contextmanager
    def _failing(self, file: Path) -> Iterator[None]:
        """Name the player and the file in what the disk or the file's content raises."""
        try:
            yield
        except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = reason(error) if isinstance(error, OSError | UserError) else f"it is damaged ({reason(error)})"
            raise UserError(f"player '{self.player.name}': cannot read weights from {file}: {why}") from error

    def _read_index(self, index: Path) -> None:
        with self._failing(index):
            self._note(index)
            where = json.loads(index.read_text("utf-8"))["weight_map"]
            files = {name: index.with_name(file) for name, file in where.items()}
        headers = {file: self._header(file) for file in sorted(set(files.values()))}
        for name, file in files.items():
            with self._failing(file):
                if name not in headers[file]:
                    raise UserError(f"{index.name} says that '{name}' is in it, and it is not; fetch both again")
            self.entries[name] = headers[file][name]

    def _header(self, file: Path) -> dict[str, _Entry]:
        with self._failing(file):
            self._note(file)
            size = file.stat().st_size
            with file.open("rb") as content:
                length = int.from_bytes(content.read(8), "little")
                if length + 8 > size:
                    raise UserError("it is no safetensors file, or a part of one; fetch it again")
                header = json.loads(content.read(length))
            return {
                name: _entry(file, name, saved, 8 + length, size)
                for name, saved in header.items()
                if name != "__metadata__"
            }

    def _note(self, file: Path) -> None:
        self.identities[file] = _identity(file)

    @contextmanager
    def _opened(self, file: Path) -> Iterator[BinaryIO]:
        with self._failing(file):
            if _identity(file) != self.identities[file]:
                raise UserError("it was changed while the run was set up; start again")
            with file.open("rb", buffering=0) as content:
                yield content

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the player's network, by the names under which the files have them. Raises if any differs.

        A tensor that has several names may be in the files under one of them.
        """
        own = self.player.module.state_dict(keep_vars=True)
        own = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        there = {id(own[name]) for name in own.keys() & self.entries.keys()}
        kind = type(self.player.module).__name__
        with self._failing(self.path):
            if missing := [name for name, value in own.items() if id(value) not in there]:
                raise UserError(f"it has no {_some(missing)}, which the network ({kind}) has; {_ADVICE}")
            if unexpected := [name for name in self.entries if name not in own]:
                raise UserError(f"it has {_some(unexpected)}, which the network ({kind}) does not have; {_ADVICE}")
            found: dict[int, tuple[str, Tensor]] = {}
            for name, value in own.items():
                if name not in self.entries:
                    continue
                found[id(value)] = name, value  # of several names the last one counts, as for load_state_dict
                if self.entries[name].shape != value.shape:
                    shapes = f"{tuple(self.entries[name].shape)} there and {tuple(value.shape)} in the network ({kind})"
                    raise UserError(f"'{name}' has shape {shapes}; make the network with the sizes of the file")
        return dict(found.values())

    @torch.no_grad()
    def read(self, name: str, share: Share) -> None:
        """Fill a share of a tensor. Only the bytes of this share are read."""
        entry, count = self.entries[name], share.tensor.numel()
        target = share.tensor.detach().contiguous()
        flat = target.view(-1)
        size = max(1, min(count, PIECE // entry.dtype.itemsize))
        piece = torch.empty(size, dtype=entry.dtype)
        content = memoryview(piece.view(torch.uint8).numpy())
        with self._opened(entry.file) as file:
            file.seek(entry.place + share.start * entry.dtype.itemsize)
            for first in range(0, count, size):
                part = min(size, count - first)
                _fill(file, content[: part * entry.dtype.itemsize])
                flat[first : first + part].copy_(piece[:part])
        if not share.tensor.is_contiguous():  # a copy was filled, for it has no flat view
            share.tensor.detach().copy_(target)

    def digest(self) -> str:
        """The sha256 of the file, or of what `sha256sum` says of several. It reads them whole, a few MB at a time."""
        sums = {}
        for path in self.identities:
            digest, piece = hashlib.sha256(), bytearray(PIECE)
            with self._opened(path) as file:
                while size := file.readinto(piece):
                    digest.update(memoryview(piece)[:size])
            sums[path] = digest.hexdigest()
        if len(sums) == 1:
            return next(iter(sums.values()))
        return hashlib.sha256("".join(f"{code}  {path.name}\n" for path, code in sums.items()).encode()).hexdigest()


_ADVICE = "names must be those of its state_dict()"


def check_files(noted: Mapping[str, Any], files: Mapping[str, WeightFiles], digests: Mapping[str, str]) -> None:
    """Raise if the files that a checkpoint leaves to `weights=` are not those of now, or are not named any more.

    `noted` is what the checkpoint says of them, by player. `digests` are those of the files now.
    """
    for name, note in noted.items():
        what = f"checkpoints leave the weights of player '{name}' out, for they are in {note['path']}"
        if name not in files:
            raise UserError(f"{what}; type Player('{name}', ..., weights='{note['path']}')")
        if digests[name] != note["sha256"]:
            raise UserError(
                f"{what}, and {files[name].path} has other content now (sha256 {digests[name][:12]}..., then "
                f"{note['sha256'][:12]}...); give back the file that it was. To go on with this one, type strict=False "
                f"in load_from_checkpoint(...), or game.strict_loading = False"
            )


def open_files(players: Iterable[Player]) -> dict[str, WeightFiles]:
    """The files of all these players that have some."""
    return {player.name: WeightFiles(player) for player in players if player.weights is not None}


def _found(path: Path) -> Path:
    """The file or the index that a path means."""
    if path.is_dir():
        indices = sorted(path.glob(f"*{INDEX}"))
        found = indices or sorted(path.glob(f"*{ENDING}"))
        if len(found) > 1:
            raise UserError(f"it has {', '.join(each.name for each in found)}; name one: weights='{found[0]}'")
        if not found:
            raise UserError(f"it has no *{ENDING} and no *{INDEX}; name a file, or a folder that has one")
        return found[0]
    if not path.exists():
        raise UserError(f"there is no such file; type weights= and a *{ENDING}, a *{INDEX}, or a folder with one")
    if not path.name.endswith((INDEX, ENDING)):
        raise UserError(
            f"its name ends neither in {ENDING} nor in {INDEX}; write it with safetensors.torch.save_file(weights, "
            f"path)"
        )
    return path


def _entry(file: Path, name: str, saved: Mapping[str, Any], first: int, size: int) -> _Entry:
    if saved["dtype"] not in DTYPES:
        raise UserError(f"'{name}' has numbers of kind {saved['dtype']}; known are {', '.join(DTYPES)}")
    begin, end = saved["data_offsets"]
    entry = _Entry(file, DTYPES[saved["dtype"]], torch.Size(saved["shape"]), first + begin)
    whole = math.prod(entry.shape) * entry.dtype.itemsize == end - begin
    if not whole or begin < 0 or first + end > size:
        raise UserError(f"'{name}' is not whole in it; fetch it again")
    return entry


def _identity(file: Path) -> tuple[int, ...]:
    state = regular(file)
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _fill(file: BinaryIO, content: memoryview) -> None:
    while content:
        size = file.readinto(content)
        if not size:
            raise UserError("it ends too early; fetch it again")
        content = content[size:]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:SHOWN]) + more

"""Weights of a player from safetensors files: `Player(weights=PATH)`.

PATH is a safetensors file, or an index of several, as the hubs ship them (`model.safetensors.index.json`), or a folder
that has one of them. Each rank reads only the bytes that it keeps.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gan.files.disk import regular
from gan.files.errors import Damaged, UserError, reading, reason
from gan.files.tensors import Piece, Share, pieces
from gan.phase import Player

INDEX, ENDING = ".safetensors.index.json", ".safetensors"
SHOWN = 3  # names in an error


class WeightFiles:
    """Errors are UserErrors that name the player and the file. A file that is changed while a run reads it is one."""

    def __init__(self, player: Player) -> None:
        """Read the headers only."""
        assert player.weights is not None
        self.player = player
        self.path = Path(player.weights).expanduser()
        self.entries: dict[str, Piece] = {}
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
        except (OSError, UserError) as error:
            again = "; fetch it again" if isinstance(error, Damaged) else ""
            raise UserError(
                f"player '{self.player.name}': cannot read weights from {file}: {reason(error)}{again}"
            ) from error

    def _read_index(self, index: Path) -> None:
        with self._failing(index):
            self.identities[index] = _identity(index)
            with reading(index.name, "it is no index of safetensors files"):
                where = json.loads(index.read_text("utf-8"))["weight_map"]
                where = {name: index.with_name(file) for name, file in where.items()}
        headers = {file: self._header(file) for file in sorted(set(where.values()))}
        for name, file in where.items():
            with self._failing(file):
                if name not in headers[file]:
                    raise UserError(f"{index.name} says that '{name}' is in it, and it is not; fetch both again")
            self.entries[name] = headers[file][name]

    def _header(self, file: Path) -> dict[str, Piece]:
        with self._failing(file):
            self.identities[file] = _identity(file)
            return pieces(file)

    @contextmanager
    def _opened(self, file: Path) -> Iterator[FileIO]:
        with self._failing(file):
            if _identity(file) != self.identities[file]:
                raise UserError("it was changed while the run was set up; start again")
            with file.open("rb", buffering=0) as content:
                yield content

    def tensors(self) -> dict[str, Tensor]:
        """The network's tensors, by their names in the files: one of several names will do. Raises if any differs."""
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
        piece = self.entries[name]
        with self._opened(piece.file) as file, share.filled() as room:
            piece.read(file, share, room)

    def digest(self) -> str:
        """The sha256 of the file, or of what `sha256sum` says of several. It reads them whole, a few MB at a time."""
        sums = {}
        for path in self.identities:
            with self._opened(path) as file:
                sums[path] = hashlib.file_digest(file, "sha256").hexdigest()
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
    return {player.name: WeightFiles(player) for player in players if player.weights is not None}


def _found(path: Path) -> Path:
    """The file or the index that a path means."""
    if path.is_dir():
        found = sorted(path.glob(f"*{INDEX}")) or sorted(path.glob(f"*{ENDING}"))
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


def _identity(file: Path) -> tuple[int, ...]:
    state = regular(file)
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:SHOWN]) + more

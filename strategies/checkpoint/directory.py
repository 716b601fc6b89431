"""A checkpoint: one directory to which every rank writes its shares, there whole or not at all.

    step-000123.ckpt/
        shard-00001-model-00001-of-00001.safetensors     what the first rank wrote: ranges of tensors, laid flat
        shard-00002-model-00001-of-00001.safetensors     what the second did
        values.pt                                        what is no tensor of a player's, and where the tensors belong

[Note: complete or absent]
All of it is written into `step-000123.ckpt.part`, and flushed. Once every rank has finished, and the first sees all
their files, that one renames it; where a checkpoint of this name is there already the two change names in one
operation of the file system, so that at any moment there is a whole one. What a killed process has left half written
keeps its `.part`, under which nothing is loaded, and is removed by the next save into the same folder. A checkpoint
that is removed is renamed first.

A checkpoint is a tree of dicts in which tensors of players are `Share`s when it is saved, and `Saved`s, which say where
to read, when it is loaded. The tensors are written and read by torch's distributed checkpoint, in its safetensors form:
its other form unpickles. Everything else is what a weights-only `torch.load` accepts. So loading runs no code.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from gan.errors import UserError
from strategies.sharding.share import Share

VALUES = "values.pt"
PART = ".part"
FILE = 2**29  # bytes of tensors in one file: writing takes that much memory beside the tensors, twice
FORMAT = 1

Key = tuple[str | int, ...]  # where in the tree
Place = tuple[Key, tuple[int, ...], torch.dtype]  # of a tensor, its shape, its kind


@dataclass(frozen=True)
class Saved:
    """A tensor in a checkpoint, not read yet."""

    source: Path
    identity: tuple[int, int]  # of the directory, which another may have taken the place of
    key: str
    shape: torch.Size
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Room for all of it."""
        return torch.empty(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class Ranks:
    """Those who save together."""

    rank: int = 0
    size: int = 1

    def each(self, step: Callable[[], None]) -> None:
        """All do a step; where one of them fails, all raise."""
        failure = None
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the others must not wait for this rank
            failure = error
        said: list[str | None] = [None if failure is None else _said(failure)]
        if self.size > 1:
            said = [None] * self.size
            dist.all_gather_object(said, None if failure is None else _said(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(said):
            if text is not None:
                raise UserError(f"rank {rank}: {text}")

    def first(self, step: Callable[[], None]) -> None:
        """The first does a step, for all."""
        self.each(step if self.rank == 0 else lambda: None)


def _said(error: BaseException) -> str:
    return _reason(error) if isinstance(error, (OSError, UserError)) else f"{type(error).__name__}: {error}"


ALONE = Ranks()


# ---- saving ----


def save(path: str | Path, tree: dict[str, Any], ranks: Ranks = ALONE) -> None:
    """Write a checkpoint, by all ranks together: each its own shares, the first also everything else.

    All ranks name the same path, on a file system that they share. A failure of one is an error of all, and leaves
    what was there before.
    """
    path = Path(path)
    part = path.with_name(path.name + PART)
    values, shares = _without_shares(tree)
    with _failing(f"cannot write checkpoint {path}", many=ranks.size > 1), _writing(path, part, ranks):
        found = _save_shares(part, shares, ranks)
        ranks.first(lambda: _complete(path, part, values, found))


@contextmanager
def _writing(path: Path, part: Path, ranks: Ranks) -> Iterator[None]:
    """The directory to write to, on all ranks; it is locked while somebody lives who does, and gone after a failure."""
    locked: list[int] = []

    def make() -> None:
        _not_another(path)
        part.parent.mkdir(parents=True, exist_ok=True)
        _sweep(part)
        locked.append(_make(part))

    def look() -> None:
        # Making it again asks the file server itself; looking might ask this machine's memory of it.
        try:
            part.mkdir()
        except FileExistsError:
            return
        except FileNotFoundError:
            pass
        else:
            part.rmdir()
        raise UserError(f"the first rank made {part} and it is not there; save to a disk that all machines share")

    try:
        ranks.first(make)
        ranks.each(look if ranks.rank else lambda: None)
        yield
    except BaseException:
        if locked:
            shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        for handle in locked:
            os.close(handle)


def _make(part: Path) -> int:
    """A new directory, locked; the lock goes with its holder."""
    while True:
        part.mkdir()
        handle = os.open(part, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if part.is_dir() and os.path.samestat(os.fstat(handle), part.stat()):
            return handle
        os.close(handle)  # another process has swept it away before it was locked


def _sweep(part: Path) -> None:
    """Remove what killed processes have left half written; what a living one is writing is locked by it."""
    for left in part.parent.glob("*" + "".join(part.suffixes[-2:])):
        with suppress(FileNotFoundError):  # finished meanwhile
            if _is_ours(left):
                _remove_if_free(left, part)
    if os.path.lexists(part):
        raise UserError(f"{part} is in the way: another process is writing it, or it is no checkpoint; remove it")


def _remove_if_free(left: Path, part: Path) -> None:
    handle = os.open(left, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    except OSError:
        free = left == part  # a file system without locks, where a living one could not be seen
    try:
        if free:
            shutil.rmtree(left)
    finally:
        os.close(handle)


def _is_ours(path: Path) -> bool:
    """Whether a directory is a checkpoint, or as much of one as there is."""
    return path.is_dir() and all(
        entry.name == VALUES or (entry.name.startswith("shard-") and entry.suffix == ".safetensors")
        for entry in path.iterdir()
    )


def _not_another(path: Path) -> None:
    if path.is_dir() and not (path / VALUES).is_file() and not _is_ours(path):
        raise UserError("there is a folder of this name that is no checkpoint; give another name")


def _save_shares(part: Path, shares: dict[Key, Share], ranks: Ranks) -> dict[str, Place]:
    """Write tensors; returns where those of all ranks belong."""
    named = {"/".join(map(str, key)): share for key, share in shares.items()}
    assert len(named) == len(shares), "two tensors of one name"
    places = {
        name: (key, tuple(share.shape), share.tensor.dtype)
        for (key, share), name in zip(shares.items(), named, strict=True)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        metadata = dcp.save(
            _apart({name: share for name, share in named.items() if share.tensor.numel()}),
            storage_writer=_Writer(str(part), save_distributed=True),
            planner=_SavePlanner(places),
            no_dist=ranks.size == 1,
        )
    return metadata.planner_data


def _apart(shares: dict[str, Share]) -> dict[str, Share]:
    """safetensors refuses two tensors in one memory, such as two buffers that an author has tied."""
    seen: set[int] = set()
    for name, share in shares.items():
        if share.tensor.data_ptr() in seen:
            shares[name] = replace(share, tensor=share.tensor.clone())
        seen.add(share.tensor.data_ptr())
    return shares


def _complete(path: Path, part: Path, values: dict[str, Any], tensors: dict[str, Place]) -> None:
    """All tensors are written: add the rest, flush, and give it its name."""
    with (part / VALUES).open("wb") as file:
        torch.save({"format": FORMAT, "values": values, "tensors": tensors}, file)
        file.flush()
        os.fsync(file.fileno())
    _flush(part)
    _put(part, path)
    _flush(path.parent)


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put(part: Path, path: Path) -> None:
    """Give a complete directory its name, which an older one may have; see [Note: complete or absent]."""
    if not os.path.lexists(path):
        part.rename(path)
        return
    try:
        _exchange(part, path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
            raise
        # A file system that cannot: the older one has another name for a moment, under which it can be loaded too.
        older = _older(path)
        _discard(older)
        path.rename(older)
        part.rename(path)
        older.rename(part)
    with suppress(OSError):  # the next save tries again
        _discard(part)


def _older(path: Path) -> Path:
    return path.with_name(f"{path.stem}.old{path.suffix}")


def _exchange(one: Path, other: Path) -> None:
    """Two names in one folder change places, at once. By hand: Python has no name for this call of Linux."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), swap):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one), None, str(other))


def remove(path: str | Path) -> None:
    """Remove a checkpoint, or what stands in its place; one half removed is never loaded."""
    path = Path(path)
    if not os.path.lexists(path):
        return
    _not_another(path)
    part = path.with_name(path.name + PART)
    _discard(part)
    path.rename(part)
    _discard(part)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _without_shares(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[Key, Share]]:
    shares: dict[Key, Share] = {}

    def walk(node: Any, key: Key) -> Any:
        if isinstance(node, dict):
            for name, value in node.items():
                if isinstance(value, Share):
                    shares[(*key, name)] = value
            return {name: walk(v, (*key, name)) for name, v in node.items() if not isinstance(v, Share)}
        if type(node) is list:
            return [walk(value, (*key, number)) for number, value in enumerate(node)]
        return node

    return walk(tree, ()), shares


class _SavePlanner(DefaultSavePlanner):
    """Every rank offers its shares; of those that several offer torch gives one to each rank in turn, by size."""

    def __init__(self, places: dict[str, Place]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.places = places

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, share) for name, share in self.state_dict.items()])
        return replace(self.plan, planner_data=self.places)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        places = {name: place for plan in all_plans for name, place in plan.planner_data.items()}
        plans, metadata = super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])
        metadata.planner_data = places
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor.detach().reshape(-1)


def _write_item(name: str, share: Share) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, [share.start]),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_range(share),
            properties=TensorProperties(dtype=share.tensor.dtype),
            size=torch.Size([share.shape.numel()]),
        ),
    )


def _range(share: Share) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([share.start]), torch.Size([share.tensor.numel()]))


class _Writer(dcp.HuggingFaceStorageWriter):
    """One or more files a rank, of a size that bounds the memory writing takes."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = super().prepare_global_plan(plans)
        return [
            replace(plan, storage_data={**plan.storage_data, "fqn_to_index_mapping": _files(plan.items)})
            for plan in plans
        ]

    def finish(self, metadata: Metadata, results: list[Sequence[Any]]) -> None:
        """The first rank must see what the others wrote."""
        for rank, written in enumerate(results):
            for name in {result.storage_data.relative_path for result in written}:
                if not (Path(self.path) / name).is_file():
                    raise UserError(f"what rank {rank} wrote is not there; save to a disk that all machines share")


def _files(items: list[WriteItem]) -> dict[str, int]:
    """Which of a rank's files each of its tensors goes to."""
    number, bytes_, files = 1, 0, {}
    for item in items:
        if bytes_ >= FILE:
            number, bytes_ = number + 1, 0
        bytes_ += item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        assert item.index.fqn not in files, "a rank has one share of a tensor"
        files[item.index.fqn] = number
    return files


# ---- loading ----


def load(path: str | Path, weights_only: bool = True) -> dict[str, Any]:
    """A checkpoint's tree, with a `Saved` for each tensor that is not read yet."""
    path = Path(path)
    if path.name.endswith(PART):
        raise UserError(f"{path} is not complete; give a checkpoint without {PART}")
    if path.is_file():
        raise UserError(
            f"{path} cannot be read as a checkpoint: it is one file, and checkpoints are directories; "
            f"those of earlier versions are not read any more"
        )
    if not path.is_dir():
        older = _older(path)
        there = f"{older.name} is there, the one before" if older.is_dir() else "look in the run's checkpoints/ folder"
        raise UserError(f"no checkpoint at {path}; {there}, or type --resume auto")
    if not (path / VALUES).is_file():
        raise UserError(f"{path} cannot be read as a checkpoint: it has no {VALUES}; is it a run's folder?")
    with _failing(f"{path} cannot be read as a checkpoint", Exception):
        identity = _identity(path)
        saved = torch.load(path / VALUES, map_location="cpu", weights_only=weights_only)
        if saved["format"] != FORMAT:
            raise UserError(f"it has format {saved['format']}, and this version reads {FORMAT}")
        tree = saved["values"]
        for name, (key, shape, dtype) in saved["tensors"].items():
            _enter(tree, key, Saved(path, identity, name, torch.Size(shape), dtype))
        return tree


def _enter(tree: Any, key: Key, saved: Saved) -> None:
    for name in key[:-1]:
        tree = tree[name] if isinstance(tree, list) else tree.setdefault(name, {})
    tree[key[-1]] = saved


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def read(wanted: Mapping[Saved, Share]) -> None:
    """Fill shares with what was saved, read straight from the files: no more than what is wanted."""
    assert all(saved.shape == share.shape for saved, share in wanted.items())
    for path, identity in dict.fromkeys((saved.source, saved.identity) for saved in wanted):
        with _failing(f"{path} cannot be read as a checkpoint"):
            _read(path, {saved.key: share for saved, share in wanted.items() if saved.source == path})
            if _identity(path) != identity:
                raise UserError("it was replaced by a newer one meanwhile; try again")


@torch.no_grad()
def _read(path: Path, wanted: dict[str, Share]) -> None:
    flat: dict[str, Share] = {}
    scattered: list[tuple[Tensor, Tensor]] = []
    for key, share in wanted.items():
        tensor = share.tensor.detach()
        if not tensor.is_contiguous():
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            scattered.append((share.tensor, tensor))
        if tensor.numel():
            flat[key] = replace(share, tensor=tensor.view(-1))
    if flat:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(flat, storage_reader=_Reader(path), planner=_LoadPlanner(), no_dist=True)
    for there, tensor in scattered:
        there.copy_(tensor)


def whole(tree: Any) -> Any:
    """The tree with every tensor read, in the memory of the CPU."""
    found: dict[Saved, Share] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, Saved):
            return found.setdefault(node, Share.whole(node.empty())).tensor
        if isinstance(node, dict):
            return {name: walk(value) for name, value in node.items()}
        return [walk(value) for value in node] if type(node) is list else node

    tree = walk(tree)
    read(found)
    return tree


class _Reader(dcp.HuggingFaceStorageReader):
    """Looks at the files before torch asks, which takes every failure to do so for a checkpoint of another form."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.metadata = super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self.metadata


class _LoadPlanner(DefaultLoadPlanner):
    """Reads of every tensor the range that is wanted."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Share], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, share in self.state_dict.items():
            there = self.metadata.state_dict_metadata.get(name)
            if there is None or sum(chunk.sizes[0] for chunk in there.chunks) != share.shape.numel():
                raise UserError(f"'{name}' is missing or not whole; has a file been removed?")
            items += create_read_items_for_chunk_list(name, there, [_range(share)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


@contextmanager
def _failing(what: str, *kinds: type[Exception], many: bool = False) -> Iterator[None]:
    """Failures of disks and files, here or on another rank, in words; mistakes of ours as they are."""
    kinds = (OSError, SafetensorError, UserError, *kinds)
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(cause, kinds):
            raise cause from error
        raise UserError(f"{what}: {f'rank {rank}: ' if many else ''}{_reason(cause)}") from error
    except kinds as error:
        raise UserError(f"{what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]

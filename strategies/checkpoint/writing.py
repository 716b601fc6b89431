"""Writing a checkpoint: every rank writes its shares to a file of its own. For the format see gan/files/checkpoint.py.

The files have the format of torch's distributed checkpoint (DCP), and DCP can read them. But DCP does not write them.
To write ranges of flat tensors in bounded memory, most of its planner and its writer would have to be replaced. That
would take more code than this file has.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_leaves_with_path, tree_map_only

from gan.files import tensors
from gan.files.checkpoint import FORMAT, SHARE, TENSOR
from gan.files.errors import DiskError, UserError, reason
from gan.files.tensors import NAMES, Share
from gan.files.values import VALUES, Key, encode, sealed, text_of
from strategies.checkpoint.folders import check_seen, new_part, part_of, put_in_place
from strategies.world import ALONE, World


def refuse_other(io: Any) -> None:
    """Refuse a CheckpointIO of Lightning's, or of a person's own."""
    if io is not None:
        raise UserError(
            f"{type(io).__name__} cannot write what ranks hold in shares, and PhaseStrategy writes its checkpoints "
            f"itself; leave {type(io).__name__} out (strategy.save_in_background(path) saves while training goes on)"
        )


class Offer(NamedTuple):
    """A rank's description of a share that it has and could write, for the other ranks."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    count: int


def save(path: str | Path, tree: dict[str, Any], world: World = ALONE) -> None:
    """Write a checkpoint. All ranks call it: each writes its own shares, and the first also writes everything else.

    All ranks pass the same path, on a file system that they share. If one rank fails, all raise, and an older
    checkpoint at this path stays.
    """
    prepare(path, tree, world)(world)


def prepare(
    path: str | Path, tree: dict[str, Any], world: World = ALONE, copied: bool = False
) -> Callable[[World], None]:
    """Decide together who writes what. Returns the function that writes it, which every rank must call.

    With `copied` that may be in a thread, while training changes the tensors: the function then has copies in host
    memory of those that this rank writes. Everything else is turned into text here in any case.
    """
    path = Path(path)
    part = part_of(path)
    values, shares = _split(tree)
    mine: dict[str, Share] = {}
    text = b""

    def offer() -> dict[str, Offer]:
        if world.rank:
            check_seen(part)
        return {
            name: Offer(key, tuple(share.shape), share.tensor.dtype, share.start, share.tensor.numel())
            for name, (key, share) in shares.items()
        }

    def fix() -> None:
        nonlocal text
        if world.rank == 0:
            for each in (each for offered in offers for each in offered.values()):
                inner: Any = values
                for name in each.key[:-1]:
                    inner = inner.setdefault(name, {}) if isinstance(inner, dict) else inner[name]
                inner[each.key[-1]] = each
            text = text_of(_encoded(values, mine))
        mine.update((name, shares[name][1]) for name in dealt[world.rank])
        if copied:
            mine.update({name: _copy(share) for name, share in mine.items()})

    with _naming(path, world), ExitStack() as stack:
        world.first(lambda: stack.enter_context(new_part(path)))
        offers = world.each(offer)
        dealt = _deal(offers)
        world.each(fix)
        return partial(_write, path, mine, text, stack.pop_all())


def _write(path: Path, mine: Mapping[str, Share], text: bytes, stack: ExitStack, world: World) -> None:
    with _naming(path, world), stack:
        files = world.each(lambda: _write_file(part_of(path), world.rank, mine))
        world.first(lambda: _complete(path, text, files))


@contextmanager
def _naming(path: Path, world: World) -> Iterator[None]:
    """Errors name the checkpoint, and a failing disk names the rank."""
    try:
        yield
    except OSError as error:
        where = f"rank {world.rank}: " if world.size > 1 else ""
        raise DiskError(f"cannot write checkpoint {path}: {where}{reason(error)}") from error
    except UserError as error:
        kind = DiskError if isinstance(error, DiskError) else UserError
        raise kind(f"cannot write checkpoint {path}: {error}") from error


def _copy(share: Share) -> Share:
    """The share in memory of its own. It is not pinned: torch's pinned memory is not given back after the save."""
    tensor = share.tensor.detach()
    return replace(share, tensor=torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor))


def _split(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Key, Share]]]:
    """The tree with None in place of its shares, and the shares by name."""
    shares: dict[str, tuple[Key, Share]] = {}
    for path, leaf in tree_leaves_with_path(tree):
        if isinstance(leaf, Share):
            key = tuple(each.key if isinstance(each, MappingKey) else each.idx for each in path)  # pyrefly: ignore[missing-attribute] - of lists
            assert _name(key) not in shares, "two tensors of one name"
            shares[_name(key)] = key, leaf
    return tree_map_only(Share, lambda _: None, tree), shares


def _name(key: Key) -> str:
    return "/".join(map(str, key))


def _encoded(values: dict[str, Any], own: dict[str, Share]) -> Any:
    """The values as JSON has them. Tensors that are no shares are put into `own`: the first rank writes them too."""

    def other(key: Key, value: Any) -> Any:
        if isinstance(value, Offer):
            return {f"${SHARE}": [_name(key), NAMES[value.dtype], list(value.shape)]}
        plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_meta
        if not plain or value.dtype not in NAMES:
            return None
        name = _name(("values", *key))
        while name in own:
            name += "'"
        own[name] = Share.whole(value)
        return {f"${TENSOR}": [name, NAMES[value.dtype], list(value.shape)]}

    return encode(values, other)


def check_loadable(values: dict[str, Any]) -> None:
    """Raise before training what a checkpoint would raise after hours."""
    _encoded(values, {})


def _deal(offers: list[dict[str, Offer]]) -> list[list[str]]:
    """Decide which shares each rank writes. If several ranks have a share, the one with the least to write gets it.

    Every rank computes the same result, from the offers of all ranks.
    """
    owners: dict[tuple[int, str, int, int], list[int]] = defaultdict(list)
    for rank, offered in enumerate(offers):
        for name, offer in offered.items():
            if offer.count:
                owners[-offer.count * offer.dtype.itemsize, name, offer.start, offer.count].append(rank)
    written = [0] * len(offers)
    dealt: list[list[str]] = [[] for _ in offers]
    for share in sorted(owners, key=lambda share: (len(owners[share]) > 1, share)):  # large ones first
        rank = min(owners[share], key=written.__getitem__)
        written[rank] -= share[0]
        dealt[rank].append(share[1])
    return dealt


def _write_file(part: Path, rank: int, shares: Mapping[str, Share]) -> dict[str, str]:
    """Write this rank's file, if it has anything to write. Returns the file's name and what a reader checks it with."""
    if not shares:
        return {}
    file = part / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
    return {file.name: tensors.write(file, shares)}


def _complete(path: Path, text: bytes, files: list[dict[str, str]]) -> None:
    """After all tensors are written: write values.json, and give the folder its final name."""
    part = part_of(path)
    for rank, written in enumerate(files):
        if any(not (part / name).is_file() for name in written):
            raise UserError(f"what rank {rank} wrote is not there; save to a disk that all machines share")
    checksums = {name: checksum for written in files for name, checksum in written.items()}
    with (part / VALUES).open("wb") as file:
        file.write(sealed({"format": FORMAT, "files": checksums}, text))
        file.flush()
        os.fsync(file.fileno())
    put_in_place(path)


# ---- beside training ----


# [Note: beside training]
# On the main thread the ranks agree on who writes what, and each copies what it will write to host memory (`prepare`).
# Then training goes on. The thread writes and flushes the files. It meets the threads of the other ranks through
# torch's store (StoreWorld), never in a collective: training runs its own meanwhile. A thread that has failed asks the
# run to end, and all ranks raise the failure after the same step. Only a disk's failure may be excused: whoever saves
# is told of it at once, and nothing is raised.
#
# torch's `async_save` is not used. Its writer leaves incomplete folders behind when it is killed. Its stager copies
# whole storages, which is a bucket of all ranks where we want one rank's shard of it, and it keeps the copies between
# saves.


@dataclass(frozen=True)
class InBackground:
    """How a checkpoint is saved, passed through Lightning as its storage options."""

    excuse: Callable[[DiskError], None] | None = None


@contextmanager
def excused(excuse: Callable[[DiskError], None] | None) -> Iterator[None]:
    """Inside the `with`, `excuse` is called with the failure of a disk. Without one that is raised."""
    try:
        yield
    except DiskError as error:
        if excuse is None:
            raise
        excuse(error)


class Background:
    """The save that is in flight, if any, and what is done after it."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # made by the first save, because a strategy may be pickled
        self._tasks: list[Future[None]] = []
        self._whole = True  # whether all of them so far are done

    def start(
        self, write: Callable[[], None], failed: Callable[[], None], excuse: Callable[[DiskError], None] | None = None
    ) -> None:
        """Begin to write. `failed` is called in the thread if that, or what is done afterwards, raises an error.

        With `excuse`, that is called in its place with a DiskError, which `wait` then does not raise.
        """
        assert not self._tasks, "one save at a time"
        self._failed, self._excuse, self._whole = failed, excuse, True
        self._submit(write)

    def afterwards(self, deed: Callable[[], None]) -> None:
        """Do it when the checkpoint in flight is whole, and never if it fails. Without one, do it now."""
        if self._tasks:
            self._submit(deed)
        else:
            deed()

    def _submit(self, deed: Callable[[], None]) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
        self._tasks.append(self._thread.submit(self._do, deed))

    def _do(self, deed: Callable[[], None]) -> None:
        """In the thread, one after the other."""
        if not self._whole:
            return
        self._whole = False
        try:
            with excused(self._excuse):
                deed()
                self._whole = True
        except BaseException:
            self._failed()
            raise

    def wait(self) -> None:
        """Return when nothing is in flight. What has failed is raised, once, if it is not excused."""
        wait(self._tasks)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.result()

    def settle(self) -> None:
        """The same while another error is raised: a failure is a warning."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other error came first
            rank_zero_warn(str(error))

    def close(self) -> None:
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

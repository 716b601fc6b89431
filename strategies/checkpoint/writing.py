"""Writing a checkpoint: every rank writes its shares to a file of its own. For the format see gan/files/checkpoint.py.

The files have the format of torch's distributed checkpoint (DCP), and DCP can read them. But DCP does not write them.
To write ranges of flat tensors in bounded memory, most of its planner and its writer would have to be replaced. That
would take more code than this file has.
"""

import io
import itertools
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from gan.files import tensors
from gan.files.checkpoint import Key, Share
from gan.files.checkpoint_files import DIGESTS, FORMAT, VALUES, digests_text
from gan.files.errors import UserError, reason
from gan.files.tensors import Digest, Piece, crc32
from strategies.checkpoint.folders import check_seen, new_part, part_of, put
from strategies.private import default_store

T = TypeVar("T")


class DiskError(UserError):
    """The disk of one of the ranks has failed, or is full. All ranks that save together raise it."""


@dataclass(frozen=True)
class SavingRanks:
    rank: int = 0
    size: int = 1

    def each(self, step: Callable[[], T]) -> list[T]:
        """Run a step on all ranks. Returns all results. If one rank fails, all raise, so that none waits for it."""
        result, failure, told = None, None, None
        try:
            result = step()
        except (OSError, UserError) as error:
            failure, told = error, (DiskError if isinstance(error, OSError) else UserError, reason(error))
        except Exception as error:  # noqa: BLE001 - our own mistake, so it is no UserError on the other ranks
            failure, told = error, (RuntimeError, f"{type(error).__name__}: {error}")
        heard = self._gather((result, told)) if self.size > 1 else [(result, told)]
        if failure is not None:
            raise failure
        for rank, (_, told) in enumerate(heard):
            if told is not None:
                kind, text = told
                raise kind(f"rank {rank}: {text}")
        return [result for result, _ in heard]

    def first(self, step: Callable[[], None]) -> None:
        """Run a step on the first rank, while the others wait."""
        self.each(step if self.rank == 0 else lambda: None)

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


ALONE = SavingRanks()


@dataclass(frozen=True)
class StoreRanks(SavingRanks):
    """The same for a thread beside training. It uses torch's store, because its collectives would meet training's.

    `name` is of one save, the same on all ranks. `limit` is how many seconds a rank waits for the others; it gives up
    at once when `lost` says that one of them is gone.
    """

    name: str = ""
    limit: float = 1800.0
    lost: Callable[[], bool] = bool
    store: Any = field(default_factory=default_store)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def _gather(self, value: Any) -> list[Any]:
        """Rank 0 collects the values and shows them all. It waits until all have read them: it may be about to exit,
        and its host serves the store.
        """
        shown = f"{self.name}, {next(self.numbers)}"
        keys = [f"{shown}, rank {rank}" for rank in range(1, self.size)]
        if self.rank:
            own = keys[self.rank - 1]
            self.store.set(own, pickle.dumps(value))
            self._until(lambda: self.store.check([shown]))
            values = pickle.loads(self.store.get(shown))
            self.store.delete_key(own)
            return values
        self._until(lambda: self.store.check(keys))
        values = [value, *(pickle.loads(self.store.get(key)) for key in keys)]
        self.store.set(shown, pickle.dumps(values))
        for key in keys:
            self._until(lambda key=key: not self.store.check([key]))
        self.store.delete_key(shown)
        return values

    def _until(self, answer: Callable[[], bool]) -> None:
        """Ask again and again. `store.wait` would keep the main thread from the store."""
        until, pause = time.monotonic() + self.limit, 0.001
        while not answer():
            if self.lost():
                raise dist.DistError("a rank was lost while a checkpoint was written")
            if time.monotonic() > until:
                raise UserError(f"rank {self.rank} has waited {self.limit:g} seconds for what other ranks write")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)


# Where in a checkpoint a value stands says who put it there, and so what to type.
ADVICE = {
    "hyper_parameters": "type self.save_hyperparameters(ignore=['{last}']), or save plain values",
    "datamodule_hyper_parameters": "type self.save_hyperparameters(ignore=['{last}']), or save plain values",
    "callbacks": "let the callback's state_dict() return plain values",
    "state_dict": "let the module's get_extra_state() return plain values",
}
PLAIN = "numbers, text, lists, dicts, tensors; str(path) for a path"


def check_loadable(values: Any) -> None:
    """Raise before training what a checkpoint would raise after hours."""
    if not _loads(values):
        raise unloadable(values)


def unloadable(values: Any) -> UserError:
    """The error for values that cannot be saved, or not be loaded again, without running code. It names the first."""
    key, value = next(_found(values, ()))
    kind = type(value)
    kind = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    advice = ADVICE.get(str(key[0]) if key else "", "save plain values").format(last=key[-1] if key else "")
    return UserError(
        f"'{'/'.join(map(str, key))}' is a {kind}, which could not be loaded again without running code; {advice} "
        f"({PLAIN}), or allow a class of your own by torch.serialization.add_safe_globals"
    )


def _found(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    """The values that cannot be loaded, innermost first, with their places."""
    if _loads(value):
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if type(value) in (list, tuple) else ()
    for name, item in items:
        yield from _found(item, (*key, name))
    yield key, value


def _loads(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - a value may fail in any way while it is pickled
        return False
    return True


class Offer(NamedTuple):
    """A rank's description of a share that it has and could write, for the other ranks."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    count: int


def save(path: str | Path, tree: dict[str, Any], ranks: SavingRanks = ALONE) -> None:
    """Write a checkpoint. All ranks call it: each writes its own shares, and the first also writes everything else.

    All ranks pass the same path, on a file system that they share. If one rank fails, all raise, and an older
    checkpoint at this path stays.
    """
    prepare(path, tree, ranks)(ranks)


def prepare(
    path: str | Path, tree: dict[str, Any], ranks: SavingRanks = ALONE, copied: bool = False
) -> Callable[[SavingRanks], None]:
    """Decide together who writes what. Returns the function that writes it, which every rank must call.

    With `copied` that may be in a thread, while training changes the tensors: the function then has copies in host
    memory of those that this rank writes. What is no share is pickled here in any case.
    """
    path = Path(path)
    part = part_of(path)
    values, shares = _split(tree)
    mine: dict[str, Share] = {}
    pickled = io.BytesIO()

    def offer() -> dict[str, Offer]:
        if ranks.rank:
            check_seen(part)
        return {
            name: Offer(key, tuple(share.shape), share.tensor.dtype, share.start, share.tensor.numel())
            for name, (key, share) in shares.items()
        }

    def fix() -> None:
        for name in dealt[ranks.rank]:
            _, share = shares[name]
            mine[name] = _copy(share) if copied else share
        if ranks.rank == 0:
            _pickle(values, offers, pickled)

    with _naming(path, ranks), ExitStack() as stack:
        ranks.first(lambda: stack.enter_context(new_part(path)))
        offers = ranks.each(offer)
        dealt = _deal(offers)
        ranks.each(fix)
        return partial(_write, path, mine, pickled, stack.pop_all())


def _write(
    path: Path,
    mine: Mapping[str, Share],
    pickled: io.BytesIO,
    stack: ExitStack,
    ranks: SavingRanks,
) -> None:
    with _naming(path, ranks), stack:
        files = ranks.each(lambda: _write_file(part_of(path), ranks.rank, mine))
        ranks.first(lambda: _complete(path, pickled, files))


@contextmanager
def _naming(path: Path, ranks: SavingRanks) -> Iterator[None]:
    """Errors name the checkpoint, and a failing disk names the rank."""
    try:
        yield
    except OSError as error:
        where = f"rank {ranks.rank}: " if ranks.size > 1 else ""
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

    def walk(node: Any, key: Key) -> Any:
        if isinstance(node, Share):
            full = "/".join(map(str, key))
            assert full not in shares, "two tensors of one name"
            shares[full] = key, node
            return None
        if isinstance(node, dict):
            return {name: walk(value, (*key, name)) for name, value in node.items()}
        return [walk(value, (*key, number)) for number, value in enumerate(node)] if type(node) is list else node

    return walk(tree, ()), shares


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


def _file(part: Path, rank: int) -> Path:
    return part / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"


def _write_file(part: Path, rank: int, shares: Mapping[str, Share]) -> dict[str, Digest]:
    """Write this rank's file, if it has anything to write. Returns the file's name and what a reader checks it with."""
    if not shares:
        return {}
    file = _file(part, rank)
    return {file.name: tensors.write(file, {name: Piece(s.tensor, s.start) for name, s in shares.items()})}


def _pickle(values: dict[str, Any], offers: list[dict[str, Offer]], file: io.BytesIO) -> None:
    """Write the content of values.pt.

    It is read once, so that a checkpoint that could not be loaded never takes the place of one that can.
    """
    tensors = {name: (offer.key, offer.shape, offer.dtype) for offered in offers for name, offer in offered.items()}
    try:
        torch.save({"format": FORMAT, "values": values, "tensors": tensors}, file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise unloadable(values) from error
    file.seek(0)
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise unloadable(values) from error


def _complete(path: Path, pickled: io.BytesIO, files: list[dict[str, Digest]]) -> None:
    """After all tensors are written: write values.pt and digests.json, and give the folder its final name."""
    part = part_of(path)
    for rank, written in enumerate(files):
        if any(not (part / name).is_file() for name in written):
            raise UserError(f"what rank {rank} wrote is not there; save to a disk that all machines share")
    values = pickled.getbuffer()
    digests = {name: digest for written in files for name, digest in written.items()}
    digests[VALUES] = Digest(len(values), crc32(values))
    for name, content in ((VALUES, values), (DIGESTS, digests_text(digests).encode())):
        with (part / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    put(path)


# [Note: beside training]
# On the main thread the ranks agree on who writes what, and each copies what it will write to host memory (`prepare`).
# Then training goes on. The thread writes and flushes the files. It meets the threads of the other ranks through
# torch's store (StoreRanks), never in a collective: training runs its own meanwhile. A thread that has failed asks the
# run to end, and all ranks raise the failure after the same step. Only a disk's failure may be excused: whoever saves
# is told of it at once, and nothing is raised.
#
# torch's `async_save` is not used. Its writer leaves incomplete folders behind when it is killed. Its stager copies
# whole storages, which is a bucket of all ranks where we want one rank's shard of it, and it keeps the copies between
# saves.


class Background:
    """The save that is in flight, if any, and what is done after it."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # made by the first save, because a strategy may be pickled
        self._tasks: list[Future[None]] = []
        self._excuse: Callable[[DiskError], None] | None = None

    def start(
        self,
        write: Callable[[], None],
        failed: Callable[[], None],
        excuse: Callable[[DiskError], None] | None = None,
    ) -> None:
        """Begin to write. `failed` is called in the thread if that, or what is done afterwards, raises an error.

        With `excuse`, that is called in its place with a DiskError, which `wait` then does not raise.
        """
        assert not self._tasks, "one save at a time"
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
        self._failed, self._excuse = failed, excuse
        self._submit(write)

    def afterwards(self, deed: Callable[[], None]) -> None:
        """Do it when the checkpoint in flight is whole, and never if it fails. Without one, do it now."""
        if not self._tasks:
            deed()
            return
        before = list(self._tasks)
        self._submit(lambda: None if any(task.exception() for task in before) else deed())

    def _submit(self, deed: Callable[[], None]) -> None:
        def told() -> None:
            try:
                deed()
            except BaseException as error:
                if self._excused(error):
                    self._excuse(error)
                else:
                    self._failed()
                raise

        self._tasks.append(self._thread.submit(told))

    def _excused(self, error: BaseException | None) -> bool:
        return self._excuse is not None and isinstance(error, DiskError)

    def wait(self) -> None:
        """Return when nothing is in flight. What has failed is raised, once, if it is not excused."""
        wait(self._tasks)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if not self._excused(task.exception()):
                task.result()

    def settle(self) -> None:
        """The same while another error is raised: a failure is a warning."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other error came first
            rank_zero_warn(str(error))

    def close(self) -> None:
        """End the thread."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

"""Writing a checkpoint: every rank writes its shares to a file of its own. For the format see gan/files/checkpoint.py.

The files have the format of torch's distributed checkpoint (DCP), and DCP can read them. But DCP does not write them.
To write ranges of flat tensors in bounded memory, most of its planner and its writer would have to be replaced. That
would take more code than this file has.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_leaves_with_path, tree_map_only

from gan.files import tensors
from gan.files.checkpoint import FORMAT, SHARE, TENSOR, load
from gan.files.errors import UserError, reason
from gan.files.tensors import NAMES, Share
from gan.files.values import VALUES, Key, encode, sealed, text_of
from strategies.checkpoint.background import ALONE, DiskError, SavingRanks
from strategies.checkpoint.folders import check_seen, new_part, part_of, put, remove


class WholeCheckpointIO(CheckpointIO):
    """All ranks write a checkpoint together. It appears completely or not at all. Loading runs no code."""

    def __init__(self, ranks: SavingRanks = ALONE) -> None:
        self.ranks = ranks

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Every rank must call it, with its own shares in the checkpoint."""
        if storage_options is not None:
            raise UserError("checkpoints are written to a local or mounted disk; leave storage_options out")
        save(path, checkpoint, self.ranks)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """A checkpoint's tree. The tensors in it are read later, when they are needed."""
        return load(path, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        remove(path)


def refuse_other(io: Any) -> None:
    """Refuse a CheckpointIO that is not ours."""
    if io is not None and not isinstance(io, WholeCheckpointIO):
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
    memory of those that this rank writes. Everything else is turned into text here in any case.
    """
    path = Path(path)
    part = part_of(path)
    values, shares = _split(tree)
    mine: dict[str, Share] = {}
    text = b""

    def offer() -> dict[str, Offer]:
        if ranks.rank:
            check_seen(part)
        return {
            name: Offer(key, tuple(share.shape), share.tensor.dtype, share.start, share.tensor.numel())
            for name, (key, share) in shares.items()
        }

    def fix() -> None:
        nonlocal text
        if ranks.rank == 0:
            for each in (each for offered in offers for each in offered.values()):
                _insert(values, each)
            text = text_of(_encoded(values, mine))
        mine.update((name, shares[name][1]) for name in dealt[ranks.rank])
        if copied:
            mine.update({name: _copy(share) for name, share in mine.items()})

    with _naming(path, ranks), ExitStack() as stack:
        ranks.first(lambda: stack.enter_context(new_part(path)))
        offers = ranks.each(offer)
        dealt = _deal(offers)
        ranks.each(fix)
        return partial(_write, path, mine, text, stack.pop_all())


def _write(path: Path, mine: Mapping[str, Share], text: bytes, stack: ExitStack, ranks: SavingRanks) -> None:
    with _naming(path, ranks), stack:
        files = ranks.each(lambda: _write_file(part_of(path), ranks.rank, mine))
        ranks.first(lambda: _complete(path, text, files))


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
    for path, leaf in tree_leaves_with_path(tree):
        if isinstance(leaf, Share):
            key = tuple(each.key if isinstance(each, MappingKey) else each.idx for each in path)
            assert _name(key) not in shares, "two tensors of one name"
            shares[_name(key)] = key, leaf
    return tree_map_only(Share, lambda _: None, tree), shares


def _name(key: Key) -> str:
    return "/".join(map(str, key))


def _insert(tree: Any, offer: Offer) -> None:
    *outer, last = offer.key
    for name in outer:
        tree = tree[name] if isinstance(tree, list) else tree.setdefault(name, {})
    tree[last] = offer


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
    put(path)

"""Cutting a batch by its samples: into the micro-batches of a phase, and among the ranks of dp.

[Note: what has a row for each sample]
A batch may be any nesting of dicts, UserDicts, lists, tuples, NamedTuples and dataclasses. In it are cut:

    a tensor or array               by its rows
    a list or tuple of strings      by its items; so is one of other objects that are no numbers
    a list or tuple of tensors      of the same length: each by its rows, as torch's default_collate makes them;
                                    of different lengths: by its items

The batch itself, or that of one of several loaders, if it is a list or tuple of tensors, is always that of
default_collate. A list of tensors of one length is cut by its items if its number of items, and not their length, fits
the rest of the batch, or the loader's number of samples; or if `learn_lists` has seen it so. Several loaders may have
made the batch together, with batches of different sizes: what has their ratio is cut in this ratio. Shared by all parts
are numbers, a single string, scalar tensors and tensors of one row. Whatever else does not fit is refused.

[Note: every k-th row]
Micro-batch k of M has the rows k, k + M, k + 2 M and so on of the rank's batch. A rank has neighbouring rows of the
global batch, and their number divides by M. So micro-batch k of all ranks together is the same set of samples at any
number of ranks, in the same order. A loss that looks at the whole micro-batch (batch norm, gan.ranks) is then the same
too. With chunks of neighbours it would not be.
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import chain, permutations
from numbers import Number
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from gan.files.errors import UserError
from strategies.sharding.resharded_parameter import version_of

# How certain it is that a column of a batch has a row for each sample; the smallest is the most certain.
TENSOR, ITEMS, COLUMNS, ITEMS_OF_ONE_ROW, ONE_ROW = range(5)


class Batches:
    """What is known of the batches of a training. Without `begin` they are those of one loader, as in a validation."""

    def __init__(self) -> None:
        self.draws: dict[str, Any] = {}  # under dp: the states of the generators of all loaders
        self.begin(None)

    def begin(self, loaders: Any) -> None:
        """Another training begins, with these loaders."""
        # How many samples a batch of each loader has; None if a loader does not say it.
        self.sizes: list[int | None] = [getattr(each, "batch_size", None) for each in tree_leaves(loaders)]
        self.ratios = {Fraction(*pair) for pair in permutations(filter(None, self.sizes), 2)}
        self.tops = set(_paths_of(loaders, "batch"))  # at which a batch is made of loaders' batches, or is one of them
        # Lists, by where they are and the dimensions of their tensors: whether each has an item for each sample.
        # False: its length and that of its items have fit, so its items may be columns.
        self.lists: dict[tuple[str, frozenset[int]], bool] = {}
        # Micro-batches of a step, by the batch's id and their number. First comes the batch. Each has its leaves when
        # it was cut.
        self.cut: dict[tuple[int, int], list[tuple[Any, list[tuple[Any, int]]]]] = {}

    @property
    def samples(self) -> int | None:
        """How many samples the loaders say that their batches have, if it is one number."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else None

    def fits(self, count: int, total: int) -> bool:
        """Whether a column of so many rows has one for each of the samples, of their loader or of another one."""
        return count == total or Fraction(count, total) in self.ratios

    def rows(self, batch: Any) -> int:
        return self.row_counts(batch)[0]

    def row_counts(self, batch: Any) -> list[int]:
        """How many samples a batch has, and then other numbers of rows in it, such as those of a second loader."""
        counts = self.counts(batch, "batch")
        if not counts:
            raise UserError(
                f"the batch is a {type(batch).__name__} that holds nothing with a row for each sample; return a "
                f"tensor, a list of strings, or a dict or dataclass of them"
            )
        return list(dict.fromkeys(count for _, count in sorted(counts, key=itemgetter(0))))

    def counts(self, node: Any, path: str) -> list[tuple[int, int]]:
        """For each column of a batch: how certain it is that it has a row for each sample, and its number of rows."""
        if isinstance(node, (Tensor, np.ndarray)):
            if not node.ndim:
                return []
            rows = len(node)
            return [(ONE_ROW if rows == 1 else TENSOR, rows)]
        if isinstance(node, PackedSequence):  # its rows are those of all steps in time
            return [(TENSOR, int(node.batch_sizes[0]))]
        if (fields := _fields(node)) is not None:
            return [count for name, value in fields.items() for count in self.counts(value, f"{path}[{name!r}]")]
        if not isinstance(node, (list, tuple)) or not node:
            return []
        items = () if set(map(type, node)) == {str} else enumerate(node)
        inside = [count for number, item in items for count in self.counts(item, f"{path}[{number}]")]
        counts = {count for _, count in inside} - {1}
        if path in self.tops and inside:
            return inside
        if not counts and not all(isinstance(item, Number) for item in node):
            return [(ITEMS_OF_ONE_ROW if inside else ITEMS, len(node)), *inside]
        if len(counts) == 1 and not self.by_items(node, path):
            return [(COLUMNS, counts.pop())]
        return [(ITEMS, len(node))] if counts else []

    def check_first(self, batch: Any) -> None:
        """Warn where the first dimension of a training's first batch is not the sample."""
        with suppress(UserError):
            if len(self.sizes) == 1 and self.samples and self.rows(batch) % self.samples:
                rank_zero_warn(
                    f"the first batch has {self.rows(batch)} rows, and the loader's batches have {self.samples} "
                    f"samples. The first dimension must be the sample, or ranks and micro-batches get parts of "
                    f"samples, and no trial sees it: put samples first (batch_first=True, x.transpose(0, 1)), and a "
                    f"list of samples into a dict"
                )

    # ---- lists ----

    def by_items(self, node: Any, path: str) -> bool:
        """Whether a list was seen to have an item for each sample."""
        return self.lists.get(_key(node, path), False)

    def learn_lists(self, batch: Any, samples: int | None) -> str | None:
        """Note which lists have an item for each of the `samples`, or None. Returns the path of an unclear list.

        A list is read so from then on: few samples, or those of one rank, may all have one length.
        """
        return self._learn(batch, samples, "batch")

    def _learn(self, node: Any, count: int | None, path: str) -> str | None:
        if path in self.tops and not any(each.startswith(f"{path}[") for each in self.tops):  # what a loader gives
            certain = {rows for how, rows in self.counts(node, path) if how == TENSOR}
            if len(certain) > 1:  # it is made of several loaders' batches by the author
                return None
            count = certain.pop() if certain else count if len(self.tops) == 1 else None
        if (fields := _fields(node)) is not None:
            found = [self._learn(each, count, f"{path}[{name!r}]") for name, each in fields.items()]
            return next(filter(None, found), None)
        if not isinstance(node, (list, tuple)):
            return None
        inside = {rows for number, each in enumerate(node) for _, rows in self.counts(each, f"{path}[{number}]")} - {1}
        if path not in self.tops and inside and len(node) == (count or len(node)) and (count or len(inside) > 1):
            key = _key(node, path)
            if len(inside) > 1:
                self.lists[key] = True
            elif inside == {count}:
                self.lists.setdefault(key, False)
            elif count != 1 and not self.lists.get(key, next(iter(inside)) % (count or 1)):
                return path  # its items may be columns with several rows a sample; of one sample nothing is cut
            else:
                self.lists[key] = True
            return None
        found = [self._learn(each, count, f"{path}[{number}]") for number, each in enumerate(node)]
        return next(filter(None, found), None)

    def add_lists(self, there: Mapping[tuple[str, frozenset[int]], bool]) -> None:
        """What another rank has noted."""
        self.lists |= {key: by_items or self.lists.get(key, False) for key, by_items in there.items()}

    # ---- cut, and join ----

    def split(self, batch: Any, total: int, parts: int, phase: str) -> list[Any]:
        """The micro-batches of a rank's batch of `total` samples. See [Note: every k-th row]."""
        if parts == 1:
            return [batch]
        if total % parts:
            raise UserError(
                f"phase '{phase}': a rank's batch of {total} does not divide into {parts} micro-batches; "
                f"choose micro_batches or the batch size so that it does"
            )
        return [Cut(self, f"phase '{phase}'", slice(part, None, parts), total)(batch) for part in range(parts)]

    def parts(self, batch: Any, total: int, parts: int, phase: str) -> list[Any]:
        """As `split`, but what was cut in this step is not cut again.

        What a loss writes into its part of the batch, later phases find there.
        """
        for (of, number), each in self.cut.items():
            whole, *others = (_written(*pair) for pair in each)
            if of == id(batch) and (any(others) if number != parts else whole):
                raise UserError(
                    f"phase '{phase}' has micro_batches={parts}, and what a phase with another number has written into "
                    f"the batch is not in its parts; give all phases the same number, or do not write into the batch: "
                    f"take self.shared, or compute with a copy"
                )
        if (id(batch), parts) not in self.cut and parts > 1:
            made = [batch, *self.split(batch, total, parts, phase)]
            self.cut[id(batch), parts] = [(each, _leaves(each)) for each in made]
        return [each for each, _ in self.cut[id(batch), parts][1:]] if parts > 1 else [batch]

    def forget_parts(self) -> None:
        self.cut = {}

    def deal(self, batch: Any, rank: int, ranks: int) -> Any:
        """The part of a rank of dp: neighbouring rows of the global batch."""
        total = self.rows(batch)
        if total % ranks:
            raise UserError(
                f"a batch of {total} does not divide among the {ranks} ranks of strategy dp; choose a batch_size that "
                f"does, and drop_last=True in the loader"
            )
        size = total // ranks
        return Cut(self, "strategy dp", slice(rank * size, (rank + 1) * size), total)(batch)

    def first_rows(self, batch: Any, count: int) -> Any:
        return Cut(self, "the first samples", slice(count), self.rows(batch))(batch)

    def join(self, batches: Sequence[Any]) -> Any:
        """One batch of the samples of several, in their order: the reverse of cutting."""
        return Cut(self, "the samples of all ranks", None, self.rows(batches[0]))(*batches)


def _paths_of(loaders: Any, path: str) -> Iterator[str]:
    yield path
    if isinstance(loaders, Mapping):
        for name, each in loaders.items():
            yield from _paths_of(each, f"{path}[{name!r}]")
    elif isinstance(loaders, (list, tuple)):
        for number, each in enumerate(loaders):
            yield from _paths_of(each, f"{path}[{number}]")


def _key(node: Any, path: str) -> tuple[str, frozenset[int]]:
    return path, frozenset(each.ndim for each in tensors(node))


def not_clear(path: str) -> UserError:
    return UserError(
        f"{path} is a list of tensors of one length, and it is not clear whether it has a tensor for each sample: add "
        f"a tensor with a row for each sample to the batch, such as torch.zeros(len(rows), 1)"
    )


def tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    fields = _fields(batch)
    items = fields.values() if fields is not None else batch if isinstance(batch, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def columns(batch: Any, count: int, top: bool = True) -> list[Tensor]:
    """The tensors of a batch, but not those in lists of `count` items, which may be a sample's."""
    fields = _fields(batch)
    if fields is None and (not isinstance(batch, (list, tuple)) or (not top and len(batch) == count)):
        return [batch] if isinstance(batch, Tensor) else []
    return [each for item in (batch if fields is None else fields.values()) for each in columns(item, count, top=False)]


def _leaves(batch: Any) -> list[tuple[Any, int]]:
    """The objects in a batch, and how often each was written."""
    if isinstance(batch, Tensor):
        return [(batch, version_of(batch))]
    fields = _fields(batch)
    items = fields.values() if fields is not None else batch if isinstance(batch, (list, tuple)) else None
    return [(batch, 0)] if items is None else [leaf for item in items for leaf in _leaves(item)]


def _written(batch: Any, before: list[tuple[Any, int]]) -> bool:
    now = _leaves(batch)
    return len(now) != len(before) or any(a is not b or m != n for (a, m), (b, n) in zip(now, before, strict=True))


@dataclasses.dataclass(frozen=True)
class Cut:
    """Takes `rows` of a batch of `total` samples, or joins such parts. See [Note: what has a row for each sample]."""

    batches: Batches
    what: str  # who cuts, for an error
    rows: slice | None  # None joins
    total: int

    def __call__(self, *batches: Any) -> Any:
        return self._made_of(batches, "batch")

    def _made_of(self, nodes: Sequence[Any], path: str) -> Any:
        """What is cut out of one node, or joined of several."""
        first = nodes[0]
        if isinstance(first, (Tensor, np.ndarray)):
            return self._joined(nodes, path) if self.rows is None else self._cut(first, path)
        if (fields := _fields(first)) is not None:
            columns = {name: [(_fields(node) or {})[name] for node in nodes] for name in fields}
            return _rebuilt(first, {name: self._made_of(each, f"{path}[{name!r}]") for name, each in columns.items()})
        if isinstance(first, (list, tuple)):
            if self._has_samples(first, path):
                joins = self.rows is None
                return type(first)(chain.from_iterable(nodes)) if joins else first[self._rows_of(len(first), path)]
            items = enumerate(zip(*nodes, strict=True))
            return type(first)([self._made_of(each, f"{path}[{number}]") for number, each in items])
        if self.rows is not None and callable(getattr(first, "to", None)):
            raise self._refusal(path, f"a {type(first).__name__}, which cannot be cut", "return tensors in its place")
        return first

    def _cut(self, node: Any, path: str) -> Any:
        if not node.ndim or (len(node) == 1 and not self.batches.fits(1, self.total)):
            return node
        rows = self._rows_of(len(node), path)
        if isinstance(node, Tensor) and (node.is_nested or node.layout != torch.strided):
            raise self._refusal(
                path, "a sparse or nested tensor", "return dense tensors, and make it of them in the loss"
            )
        spread = isinstance(node, Tensor) and rows.step is not None
        return node[rows].clone() if spread else node[rows]  # a clone is dense, in the same memory format

    def _rows_of(self, count: int, path: str) -> slice:
        """Those to take of a column of so many rows."""
        assert self.rows is not None
        if not self.batches.fits(count, self.total):
            raise self._refusal(path, f"of {count} rows")
        rows, share = self.rows, Fraction(count, self.total)
        start, stop = (0, 0) if rows.step else ((rows.start or 0) * share, rows.stop * share)
        if int(start) != start or int(stop) != stop or (rows.step and count % rows.step):
            raise self._refusal(path, f"of {count} rows", "give its loader a batch size that divides as well")
        return rows if rows.step else slice(int(start), int(stop))

    def _joined(self, nodes: Sequence[Any], path: str) -> Any:
        first = nodes[0]
        if not first.ndim or not self.batches.fits(len(first), self.total):
            return first
        if len({node.shape[1:] for node in nodes}) > 1:
            raise UserError(
                f"samples of {path} have another shape on another rank, as where a loader makes samples as long as "
                f"the longest one of their batch; give all batches one length"
            )
        if isinstance(first, np.ndarray):
            return np.concatenate(nodes)
        return torch.cat([node.detach() for node in nodes]).requires_grad_(first.requires_grad)

    def _has_samples(self, node: list | tuple, path: str) -> bool:
        """Whether each item is that of one sample. If not, the items are searched."""
        found = [self.batches.counts(item, f"{path}[{number}]") for number, item in enumerate(node)]
        inside = {count for each in found for _, count in each}
        if path in self.batches.tops and inside:
            return False
        counts = sorted(inside - {1})
        by_items = len(inside) != 1 or self.batches.by_items(node, path)
        of_samples = len(node) == self.total or (by_items and self.batches.fits(len(node), self.total))
        if not counts:
            if all(isinstance(item, Number) for item in node) and of_samples:
                raise self._refusal(path, f"a list of {len(node)} numbers", "return a tensor")
            if not of_samples and any(isinstance(item, str) for item in node):
                raise self._refusal(path, f"a list of {len(node)} strings")
            return of_samples
        if len(counts) > 1 and not of_samples:
            raise self._refusal(path, f"a list of {len(node)} with {' and '.join(map(str, counts))} rows in its items")
        if counts == [self.total] and of_samples and not self.batches.by_items(node, path):
            advice = "return a dict, or add a tensor with a row for each sample, such as torch.zeros(len(rows), 1)"
            raise self._refusal(path, f"a list of {len(node)} with {self.total} rows in each item", advice)
        return of_samples

    def _refusal(self, path: str, found: str, advice: str = "") -> UserError:
        advice = advice or (
            "give it one row for each sample; what all samples share can be an attribute of the game, parts of samples "
            "(nodes of graphs) belong into a list with a tensor for each sample, and loaders of one batch belong "
            "into the dict that train_dataloader() returns"
        )
        return UserError(
            f"{self.what}: the batch has {self.total} samples and {path} is {found}, so it is not clear how to cut it; "
            f"{advice}"
        )


def _fields(node: Any) -> Mapping[Any, Any] | None:
    """The named values of a dict, NamedTuple or dataclass."""
    if type(node) is dict or isinstance(node, Mapping):
        return node
    if isinstance(node, tuple) and hasattr(node, "_asdict"):
        return node._asdict()
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return None


def _rebuilt(node: Any, fields: dict[Any, Any]) -> Any:
    """A dict, NamedTuple or dataclass like this one, with other values."""
    if isinstance(node, tuple):
        return type(node)(**fields)
    if isinstance(node, Mapping) and not isinstance(node, MutableMapping):
        return fields
    made = copy.copy(node)
    for name, value in fields.items():
        if isinstance(node, Mapping):
            made[name] = value
        else:
            object.__setattr__(made, name, value)  # a dataclass may be frozen
    return made

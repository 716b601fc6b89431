"""fsdp on paper: units are gathered around the calls of their modules, as FSDP2 and sharding/fully_shard.py do it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from strategies.paper.paper import size
from strategies.paper.sharded import Reduced
from strategies.paper.trace import Trace


class PaperUnit:
    """The bytes of a unit: of the weights that learn, as they are reduced, and of all, as they are gathered."""

    def __init__(
        self,
        module: nn.Module | None,
        everything: Mapping[str, nn.Parameter],
        learning: Collection[str],
        ranks: int,
        dtype: torch.dtype | None,
    ) -> None:
        """Without a module it is the unit of what is outside of blocks."""
        self.module, self.everything = module, everything
        self.weights = {name: weight for name, weight in everything.items() if name in learning}
        self.ids = frozenset(map(id, self.weights.values()))
        self.whole = sum(_padded(weight, ranks) for weight in self.weights.values())
        self.shard = self.whole / ranks
        self.owned = sum(_padded(weight, ranks) for weight in everything.values()) / ranks
        part = 1.0 if dtype is None else dtype.itemsize / next(iter(everything.values())).element_size()
        self.gathered = self.owned * ranks * part
        self.used = size(everything.values()) * part


def _padded(weight: nn.Parameter, ranks: int) -> int:
    """Bytes of a weight, of which each rank has equally many rows."""
    rows = weight.shape[0] if weight.ndim else 1
    return -(-rows // ranks) * ranks * (weight.numel() // max(1, rows)) * weight.element_size()


class Units(Reduced):
    """See [Note: what FSDP2 does not see] in sharding/fully_shard.py.

    FSDP2 gathers a unit into one piece of memory, and copies it from there into the weights. In a forward of the
    network that piece stays until the next unit is there, so that gathering and copying overlap. In backward the next
    unit's piece is gathered one unit ahead.
    """

    def __init__(self, *args: Any, root: nn.Module, units: Sequence[PaperUnit], whole: bool, **kwargs: Any) -> None:
        learning = [unit for unit in units if unit.weights]
        super().__init__(*args, buckets=learning, **kwargs)
        self.root, self.units, self.always_whole, self.in_flight = root, units, whole, 1
        self.unit_of = {id(weight): unit for unit in units for weight in unit.everything.values()}
        self.of_module = {unit.module: unit for unit in units if unit.module is not None}

    def begin(self, trace: Trace, learning: bool) -> None:
        self.hooks_on = not trace.second_order
        self.there: set[PaperUnit] = set()
        self.keeping = {unit for unit in self.units if unit.module is None}
        self.pieces: dict[PaperUnit, float] = {}  # gathered, and not yet copied into the weights
        self.lingering = 0.0  # the piece of the last unit of a forward
        self.calls: list[PaperUnit | None] = []  # the running forwards, and which of them are units'
        self.outermost: list[int] = []  # how many forwards ran when FSDP2's outermost one began
        self.called: list[PaperUnit] = []  # in order, each call once
        self.first: list[PaperUnit] = []  # in the order in which units were first gathered
        self.current: PaperUnit | None = None
        self.recomputing = False
        self.all_next = self.always_whole or trace.second_order
        super().begin(trace, learning)
        if trace.second_order and learning and self.weights:
            self.gather_all()
            for unit in self.units:
                self.gather(unit)

    def order(self) -> list[int]:
        """The reverse of the order in which units were gathered; with `whole`, of the network's."""
        if self.always_whole or not self.hooks_on:
            return super().order()
        places = {unit: place for place, unit in enumerate(self.first)}
        latest = {number: -places.get(unit, -1) for number, unit in enumerate(self.buckets)}
        return sorted(reversed(latest), key=latest.__getitem__)

    def gather_all(self) -> None:
        self.all_next = False
        for unit in self.units:
            self.keeping.add(unit)
            self.start(unit)

    def start(self, unit: PaperUnit) -> None:
        if unit not in self.there and unit not in self.pieces:
            self.pieces[unit] = unit.gathered
            self.take(flying=unit.gathered)
            self.move("all-gather", unit.gathered, self.share)

    def gather(self, unit: PaperUnit, forward: bool = False) -> None:
        """Make a unit whole."""
        if unit in self.there:
            return
        asynchronous = unit in self.pieces
        self.start(unit)
        if forward:
            self.take(flying=-self.lingering)
            self.lingering = 0.0
        self.take(flying=unit.used)
        piece = self.pieces.pop(unit)
        if forward and not asynchronous:
            self.lingering = piece
        else:
            self.take(flying=-piece)
        self.there.add(unit)
        if unit not in self.first:
            self.first.append(unit)

    def free(self, unit: PaperUnit | None) -> None:
        if unit in self.there and unit not in self.keeping:
            self.there.remove(unit)
            self.take(flying=-unit.used)

    def enter(self, module: nn.Module) -> None:
        unit = self.of_module.get(module) if self.hooks_on else None
        if (unit is not None or module is self.root) and not self.outermost:
            self.outermost.append(len(self.calls))
        self.calls.append(unit)
        if unit is not None:
            if self.all_next:
                self.gather_all()
            self.gather(unit, forward=True)

    def leave(self) -> None:
        unit = self.calls.pop()
        if unit is not None:
            self.called.append(unit)
            self.free(unit)
        if self.outermost == [len(self.calls)]:
            self.outermost.clear()
            self.take(flying=-self.lingering)
            self.lingering = 0.0

    def read(self, weights: tuple[int, ...]) -> None:
        for unit in dict.fromkeys(self.unit_of[key] for key in weights if key in self.unit_of):
            if self.recomputing:  # FSDP2 has gathered it for the block's backward
                self.need(next(id(weight) for weight in unit.everything.values()))
                continue
            if self.all_next:
                self.gather_all()
            if unit not in self.calls and unit is not self.current:
                self.keeping.add(unit)
                self.gather(unit)

    def backward(self, last: bool) -> None:
        super().backward(last)
        self.turns = self.order()
        self.recomputing = False

    def again(self) -> None:
        self.recomputing = True

    def need(self, weight: int) -> None:
        unit = self.unit_of.get(weight)
        if unit is None or unit is self.current:
            return
        self.free(self.current)
        self.current = unit
        self.gather(unit)
        if self.called and unit in self.called:
            while self.called.pop() is not unit:
                pass
            if self.called and self.called[-1] not in self.there:
                self.start(self.called[-1])

    def finish(self) -> None:
        while len(self.flat) < len(self.buckets):
            self.reduce()
        if self.home:
            self.now.gradients = 0
        self.move("all-reduce", 8 * len(self.weights), self.share)

    def end(self) -> None:
        self.now.flying = 0

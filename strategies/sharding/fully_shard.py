"""torch's FSDP2 as the storage of a player, and the reduction of its gradients."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gan.checkpoint import Share
from strategies import private
from strategies.sharding.fsdp_units import wrap
from strategies.sharding.parameters import listen, unlisten
from strategies.sharding.reduce_scatter import ReduceScatter
from strategies.sharding.saved_tensors import places_in
from strategies.sharding.storage import Storage
from strategies.sharding.versions import end_graphs


class FullyShard(Storage):
    """The weights are rows of FSDP2's, of which this rank owns its part; whole in the phases that read them.

    [Note: what FSDP2 does not see]
    FSDP2 gathers a unit when its module is called, and frees it when the call or its backward has ended. Four things it
    would not notice, so they are done here:

    - A weight that is read outside of a call of its module: by a method of the network, by another module, after the
      call. Then its unit is gathered at that moment, and stays whole until the phase ends.
    - A graph that needs a weight when FSDP2 has freed it, or that is older than the weight: autograd saves places of
      weights, and not weights (see saved_tensors.py).
    - Gradients. FSDP2 reduces a unit as often as its module was called, and in the order of this rank's backward. A
      weight that one rank's loss does not reach would end it. So each unit is reduced once in a phase, with zeros for
      such weights, in the same order on all ranks.
    - A phase of second order: FSDP2 frees weights that the second backward needs. There its hooks rest, and every unit
      stays whole until the phase ends.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        others: Mapping[str, nn.Parameter],
        root: nn.Module,
        blocks: Sequence[nn.Module],
        readers: Sequence[nn.Module],
        group: Any,
        **settings: Any,
    ) -> None:
        """`group` has the ranks that together own the player once. `settings` are those of torch's `fully_shard`."""
        super().__init__(weights)
        self.group, self.readers, self.released = group, readers, False
        self.playing = self.calling = False  # in a phase; and FSDP2's hooks work in it
        self.at_once = False  # in a phase whose first read gathers everything
        self.order: list[int] | None = []  # the units that this phase has gathered, in order; None if nobody asks
        parameters = {**weights, **others}
        self.units, self.hooks = wrap(root, blocks, parameters, self._called, **settings)
        self.of: dict[int, int] = {}  # the number of a parameter's unit, by its id
        for number, unit in enumerate(self.units):
            unit.number, unit.learning = number, [name for name in unit.parts if name in weights]
            unit.fetch = partial(self._fetch, number)
            unit.told = partial(self._gathered, number)
            self.of.update({id(part.author): number for part in unit.parts.values()})
        self.parts = {name: part for unit in self.units for name, part in unit.parts.items()}
        self.learning = [unit for unit in self.units if unit.learning]
        self.owned = {name: self.parts[name].piece for name in weights if self.parts[name].piece.numel()}
        listen(readers, self._read)

    @property
    def sharded(self) -> bool:
        return True

    @property
    def unsharded(self) -> bool:
        return self.released or all(unit.unsharded for unit in self.units)

    # ---- in a phase ----

    @contextmanager
    def during(self, phase: str, whole: bool, second_order: bool, now: bool) -> Iterator[None]:
        """A context around a phase. `whole`: the first read gathers everything, which stays until the phase ends.

        `now`: it is gathered at the start. After an error it waits for no rank.
        """
        self.playing, self.calling, self.at_once = True, not second_order, whole
        self.order = None if whole else []
        for unit in self.units:
            if unit.of_root:  # FSDP2 keeps it from forward to backward; here also from one micro-batch to the next
                unit.hold()
        if now:
            self._gather_all()
            for unit in self.units:
                unit.unshard()
        try:
            with places_in(phase, saved=not second_order):
                yield
        finally:
            self.playing = self.calling = self.at_once = False
        for unit in self.units:
            unit.end_phase()
        if second_order:
            end_graphs([part.author for part in self.parts.values()])

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside the `with`, also during a phase, neither reads nor calls gather or free anything."""
        before = self.playing, self.calling
        self.playing = self.calling = False
        try:
            yield
        finally:
            self.playing, self.calling = before

    def check_code(self) -> int | None:
        """A number made from the order of this phase's gathers, to compare between ranks; None if all stay whole."""
        return None if self.order is None else zlib.crc32(repr(self.order).encode())

    def _read(self, weights: Iterable[nn.Parameter]) -> None:
        """See [Note: what FSDP2 does not see]."""
        if not self.playing or torch.compiler.is_compiling():
            return
        for weight in weights:
            number = self.of.get(id(weight))
            if number is not None:
                self._gather_all()
                if not (self.calling and self.units[number].running):
                    self._hold(number)

    def _called(self) -> bool:
        """Whether FSDP2's hooks work now, of which one asks."""
        if self.calling:
            self._gather_all()
        return self.calling

    def _gather_all(self) -> None:
        """If this is the first read in a phase for which all stay whole: gather all, in the same order on all ranks."""
        if self.at_once:
            self.at_once = False
            with private.outside_transforms():
                for unit in self.units:
                    unit.hold()
                    unit.start_unshard()

    def _fetch(self, number: int) -> None:
        """Autograd needs a weight: one that FSDP2 has gathered for this backward, or else until the phase ends."""
        if not self.units[number].unsharded:
            self._hold(number)

    def _hold(self, number: int) -> None:
        unit = self.units[number]
        unit.hold()
        if not unit.unsharded:
            with private.outside_transforms():
                unit.unshard()

    def _gathered(self, number: int) -> None:
        if self.playing and self.order is not None:
            self.order.append(number)

    # ---- whole weights ----

    def unshard(self, exact: bool = False) -> None:
        for unit in self.units:
            if not self.released and not unit.whole_in(exact):
                unit.copy_whole(exact)

    def reshard(self) -> None:
        for unit in () if self.released else self.units:
            unit.reshard()

    def shards_changed(self, others: bool = False) -> None:
        for unit in self.units:
            unit.shards_changed(unit.parts if others else unit.learning)

    def keep_writes(self) -> None:
        for part in self.parts.values():
            part.keep_writes()

    def step(self, optimizer: Optimizer, stepped: Sequence[nn.Parameter]) -> None:
        self.keep_writes()
        optimizer.step()
        self.shards_changed()

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for piece in self.owned.values():
            piece.grad = None

    def held(self) -> list[Tensor]:
        return [*super().held(), *(self.parts[name].shard for name in self.weights)]

    def shares(self) -> dict[nn.Parameter, Share | None]:
        self.keep_writes()
        return {part.author: part.share() for part in self.parts.values()}

    def share_of(self, name: str, tensor: Tensor) -> Share:
        return replace(self.parts[name].share(), tensor=tensor)

    def release(self) -> None:
        for hook in self.hooks:
            hook.remove()
        unlisten(self.readers, self._read)
        for unit in self.units:
            unit.release()
        self.released = True
        self.group, self.hooks, self.readers = None, [], ()


class FullyShardReduction(ReduceScatter):
    """FSDP2 reduces a unit when all of its gradients are there. Norms and unreached weights are as in zero3.

    Backward comes to the units in the reverse of the order in which the phase has gathered them. That is the same on
    all ranks, or an error; with `whole` it need not be, so there the order is the reverse of the network's.
    """

    def arm(self, loss: Tensor, last: bool) -> Tensor:
        places = {number: place for place, number in enumerate(dict.fromkeys(self.storage.order or ()))}
        # Units that the phase has not gathered come last: they wait for gradients until backward has ended.
        late = {turn: -places.get(unit.number, -1) for turn, unit in enumerate(self.buckets)}
        self.turns = sorted(reversed(late), key=late.__getitem__)
        return super().arm(loss, last)

    def finish(self, scale: float) -> Tensor:
        while len(self._pending) < len(self.buckets):
            self._start_next()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # FSDP2 reduces, and offloads, on streams of its own
        return super().finish(scale)


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """A row of the ranks of a group, as FSDP2 asks for it."""
    return dist.device_mesh.DeviceMesh.from_group(group, device.type)

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
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gan.files.checkpoint import Share
from strategies import private
from strategies.sharding.fsdp_units import Unit
from strategies.sharding.fsdp_wrapping import wrap
from strategies.sharding.reduce_scatter import ReduceScatter
from strategies.sharding.saved_tensors import places_in
from strategies.sharding.storage import Storage
from strategies.sharding.unshard_on_read import agree_on_gather, listen, unlisten
from strategies.sharding.versions import end_graphs


class FullyShard(Storage):
    """FSDP2 shards each weight by rows, and a phase gathers a unit when it needs it.

    [Note: what FSDP2 does not see]
    FSDP2 gathers a unit when its module is called, and frees it when the call, or its backward, has ended. Four things
    it would not notice, so they are done here:

    - A weight may be read outside of a call of its module: by a method of the network, by another module, after the
      call. Then its unit is gathered at that moment, and stays whole until the phase ends.
    - Backward may need a weight that FSDP2 has freed, or that has changed since the forward. So autograd saves the
      weight's place (see saved_tensors.py): it is gathered again, or the error is torch's.
    - If one rank has no gradient for a weight, the ranks' reductions do not match, and the run fails. FSDP2 also
      reduces a unit as often as its module was called. So each unit is reduced once in a phase, with zeros for such
      weights, in the same order on all ranks.
    - In a phase of second order FSDP2 frees weights that the second backward needs. There its hooks do nothing: a
      learner is gathered before the phase, another player when it is first read, and both stay whole until it ends.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        others: Mapping[str, nn.Parameter],
        root: nn.Module,
        blocks: Sequence[nn.Module],
        readers: Sequence[nn.Module],
        group: dist.ProcessGroup,
        policy: str,
        **settings: Any,
    ) -> None:
        """`group` has the ranks that together own the player once; `policy` is a name, for errors.

        `settings` are those of torch's `fully_shard`.
        """
        super().__init__(weights)
        self.group, self.readers, self.policy = group, readers, policy
        self.playing = False  # in a phase
        self.hooks_on = False  # FSDP2's hooks work, in a phase of first order
        self.gather_all_next = False  # the next read or call gathers everything
        self.copied: torch.dtype | None = None  # the dtype of whole copies between `unshard` and `reshard`
        self.phase = ""  # the one that is played
        self.agreed: set[str] = set()  # the phases in which ranks have agreed on the order
        self.order: list[int] | None = []  # the units that this phase has gathered; None if the order does not matter
        self.released = False
        self.units, self.hooks = wrap(
            root,
            blocks,
            {**weights, **others},
            learning=weights.keys(),
            before_call=self._before_call,
            hooks_on=lambda: self.hooks_on,
            settings=settings,
        )
        self.unit_of: dict[int, Unit] = {}  # by a parameter's id
        for number, unit in enumerate(self.units):
            unit.fetch = partial(self._fetch, unit)
            unit.on_gathered = partial(self._note, number)
            self.unit_of.update({id(weight.author): unit for weight in unit.everything.values()})
        self.everything = {name: weight for unit in self.units for name, weight in unit.everything.items()}
        self.learning = [unit for unit in self.units if unit.learning]
        pieces = {name: self.everything[name].piece for name in weights}
        self.owned = {name: piece for name, piece in pieces.items() if piece.numel()}
        listen(readers, self._read)

    @property
    def sharded(self) -> bool:
        return True

    @property
    def unsharded(self) -> bool:
        """Whether there are whole copies. What FSDP2 has gathered does not count: it may differ between ranks."""
        return self.released or self.copied is not None

    # ---- in a phase ----

    @contextmanager
    def during(self, phase: str, whole: bool, second_order: bool, at_start: bool) -> Iterator[None]:
        """A context around a phase. `whole`: the first read gathers everything, which stays until the phase ends.

        `at_start`: it is gathered at the start. After an error it waits for no rank.
        """
        self.playing, self.hooks_on, self.gather_all_next = True, not second_order, whole
        self.order, self.phase = None if whole else [], phase
        for unit in self.units:
            if unit.is_root:  # FSDP2 keeps it from forward to backward; here also from one micro-batch to the next
                unit.keep_whole()
        if at_start:
            self._gather_all()
            for unit in self.units:
                unit.unshard()
        try:
            with places_in(phase, saved=not second_order):
                yield
        finally:
            self.playing = self.hooks_on = self.gather_all_next = False
        self.agreed.add(phase)
        self.copied = None
        for unit in self.units:
            unit.end_phase()
        if second_order:
            end_graphs([weight.author for weight in self.everything.values()])

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside the `with`, also during a phase, neither reads nor calls gather or free anything."""
        before = self.playing, self.hooks_on
        self.playing = self.hooks_on = False
        try:
            yield
        finally:
            self.playing, self.hooks_on = before

    def check_code(self) -> int | None:
        """A number made from the order of this phase's gathers, to compare between ranks; None if all stay whole."""
        return None if self.order is None else zlib.crc32(repr(self.order).encode())

    def _before_call(self, module: nn.Module) -> None:
        """A module is called for which FSDP2 would gather."""
        if not self.hooks_on:
            return
        if self.gather_all_next:
            self._gather_all()
        if self.phase not in self.agreed:
            for unit in self.units:
                if unit.gathered_for(module) and not unit.unsharded:
                    self._agree(unit)

    def _read(self, weights: Iterable[nn.Parameter]) -> None:
        """See [Note: what FSDP2 does not see]."""
        if not self.playing or torch.compiler.is_compiling():
            return
        for unit in dict.fromkeys(unit for weight in weights if (unit := self.unit_of.get(id(weight))) is not None):
            if self.gather_all_next:
                self._gather_all()
            if not (self.hooks_on and unit.running):
                self._gather_and_keep(unit)

    def _gather_all(self) -> None:
        """Start to gather all units, in the same order on all ranks. They stay whole until the phase ends."""
        self.gather_all_next = False
        with private.outside_transforms():
            for unit in self.units:
                unit.keep_whole()
                unit.start_unshard()

    def _fetch(self, unit: Unit) -> None:
        """Autograd needs a weight of it. FSDP2 has gathered it for this backward, or else it is gathered here."""
        if not unit.unsharded:
            self._gather_and_keep(unit)

    def _gather_and_keep(self, unit: Unit) -> None:
        unit.keep_whole()
        if not unit.unsharded:
            with private.outside_transforms():
                self._agree(unit)
                unit.unshard()

    def _agree(self, unit: Unit) -> None:
        """Before a gather, the first time that a phase is played, where ranks may go different ways."""
        if self.order is not None and self.phase not in self.agreed:
            agree_on_gather(self.units.index(unit), self.group, unit.device, self.phase, self.policy)

    def _note(self, number: int) -> None:
        if self.playing and self.order is not None:
            self.order.append(number)

    # ---- whole weights ----

    def unshard(self, exact: bool = False) -> None:
        dtype = next(iter(self.everything.values())).dtype_in(exact) if not self.released else None
        if self.copied != dtype:
            self.reshard()
            for unit in self.units:
                unit.copy_whole(dtype)
            self.copied = dtype

    def reshard(self) -> None:
        self.copied = None
        for unit in () if self.released else self.units:
            unit.reshard()

    def shards_changed(self, others: bool = False) -> None:
        self.copied = None
        for unit in self.units:
            unit.shards_changed(unit.everything if others else unit.learning)

    def keep_writes(self) -> None:
        for weight in self.everything.values():
            weight.keep_writes()

    def step(self, optimizer: Optimizer, stepped: Sequence[nn.Parameter]) -> None:
        self.reshard()  # also what is still on its way, with the old values
        optimizer.step()
        self.shards_changed()

    def held(self) -> list[Tensor]:
        return [*super().held(), *(self.everything[name].shard for name in self.weights)]

    def all_shards(self) -> list[Tensor]:
        return [weight.shard for weight in self.everything.values()]

    def shares(self) -> dict[nn.Parameter, Share | None]:
        self.keep_writes()
        return {weight.author: weight.share() for weight in self.everything.values()}

    def share_of(self, name: str, tensor: Tensor) -> Share:
        return replace(self.everything[name].share(), tensor=tensor)

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
        numbers = {id(unit): number for number, unit in enumerate(self.storage.units)}
        # Units that were not gathered come last, so that they do not hold up the others.
        latest = {index: -places.get(numbers[id(unit)], -1) for index, unit in enumerate(self.buckets)}
        self.in_turn = sorted(reversed(latest), key=latest.__getitem__)
        return super().arm(loss, last)


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """A row of the ranks of a group, as FSDP2 asks for it."""
    return DeviceMesh.from_group(group, device.type)

"""zero3, also called fsdp: everything of the player shared out, put together where phases read it."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from gan.phase import Phase, Player
from strategies.policies.policy import World
from strategies.policies.resharded import Visiting
from strategies.policies.zero2 import Zero2
from strategies.sharding.bucket import Bucket, buckets
from strategies.sharding.reads import listen
from strategies.sharding.saved_tensors import kept_as_places

FEW = 2  # buckets for which nothing is gained by gathering one at a time


class Zero3(Visiting, Zero2):
    """Each rank keeps its own equal share of the weights too, also those of a frozen player.

    Communication, in order: when a phase's loss first reads a weight one all-gather of its bucket, the next one of
    the last time meanwhile; when the forward that read it has ended the bucket is let go, and gathered once more when
    backward asks for it, then a reduce-scatter of its gradients; after the last backward, only where buckets were
    gathered so, 16 bytes to see that all ranks did the same; norms and questions as in zero2; nothing in the update. A
    player that no phase reads moves nothing. `averaged` gathers once.

    Held on each rank between phases: everything / ranks. During a phase that reads it, of a player's weights, the
    buckets that running forwards have read and two more; and whole gradients in the buckets that backward is at.

    [Note: whole for the phase]
    A phase of second order gathers a learner before it begins and a player that does not learn when it is first read,
    and keeps them until it ends: a gradient penalty reads everything again and again, and so each weight moves
    once. (FSDP2 fails there, pytorch #172543.) The same is done for players of a few buckets, which would gain nothing,
    for compiled ones, and with the option `whole`: for networks whose samples choose which layers they pass through,
    so that ranks read different weights. Without it that is an error; if one reads fewer than another, they wait for
    each other until the process group's timeout, as under FSDP.

    [Note: who reads]
    What is gathered is decided by what is read, not by which module is called: games call networks by their own
    methods, and layers read each other's weights. `Parameters` says when a weight is read. It belongs to the
    innermost forward that runs then, because that code may still hold it; a weight read outside of any forward
    belongs to the phase. Autograd keeps, instead of weights, where they are found (`saved_tensors_hooks`), so that
    they can be let go between forward and backward, also when the backward is a later phase's. If they have changed
    meanwhile, that is the error of plain torch.
    """

    name = "zero3"
    takes = Zero2.takes | {"whole"}

    def __init__(self, player: Player, world: World, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(player, world, options)
        self.everything: list[Bucket] = []
        self.number: dict[int, int] = {}  # of its bucket, by a weight's id
        self.readers: list[int] = []
        self.idle: list[int] = []
        self.frames: list[set[int]] = []
        self.piecewise = False
        self.order: list[int] = []  # of the gathers in this phase,
        self.expected: list[int] = []  # the last time it was played,
        self.before: dict[str, list[int]] = {}  # and of each phase then

    # ---- the verbs ----

    def cut(self) -> None:
        """Also the parameters that do not learn; and be told when a weight is read."""
        super().cut()
        if self.alone:
            return
        others = {name: p for name, p in self.player.module.named_parameters() if name not in self.weights}
        self.everything = [*self.buckets, *buckets(others, self.sharing)]
        self.number = {id(w): number for number, each in enumerate(self.everything) for w in each.weights.values()}
        for number, bucket in enumerate(self.everything):
            bucket.need = partial(self.need, number)
        listen(self.player.module, self._read)
        for module in self.player.module.modules():
            self.hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self.hooks.append(module.register_forward_hook(self._leave, always_call=True))

    @contextmanager
    def hold(self, phase: Phase) -> Iterator[None]:
        """See [Note: whole for the phase] and [Note: who reads]. After an error nobody is waited for."""
        if not self.everything:
            yield
            return
        whole = len(self.everything) <= FEW or phase.second_order or self.options.keys() & {"whole", "compile"}
        self.piecewise = not whole
        self.order, self.expected = [], self.before.get(phase.name, [])
        self.frames, self.idle, self.readers = [set()], [], [0] * len(self.everything)
        if self.learning and self.weights and not self.piecewise:
            self.gather()
        try:
            with kept_as_places():
                yield
        finally:
            self.frames = []  # who reads now, gathers nothing
        self.before[phase.name] = self.order
        self.rest()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if self.frames and not torch.compiler.is_compiling():
            self.frames.append(set())
            self._read(module._parameters.quietly())

    def _leave(self, *_: Any) -> None:
        if len(self.frames) > 1 and not torch.compiler.is_compiling():
            for number in self.frames.pop():
                self.readers[number] -= 1
                if not self.readers[number]:
                    self.idle.append(number)

    def _read(self, weights: Iterable[nn.Parameter]) -> None:
        """Some weights are being read."""
        if not self.frames or torch.compiler.is_compiling():
            return
        for number in dict.fromkeys(self.number[id(weight)] for weight in weights if id(weight) in self.number):
            if number not in self.frames[-1]:
                self.frames[-1].add(number)
                self.readers[number] += 1
            self.need(number)

    def need(self, number: int) -> None:
        """A bucket, gathered; and where only some can be, those let go that nobody reads any more."""
        bucket = self.everything[number]
        if number in self.idle:
            self.idle.remove(number)
        if not bucket.gathered:
            if not self.piecewise:
                self.gather()
                return
            self._start(number)
            bucket.gather()
            self._look_ahead()
        if not self.readers[number]:
            self.idle.append(number)
        while self.piecewise and len(self.idle) > 1:
            self.everything[self.idle.pop(0)].let_go()

    def _start(self, number: int) -> None:
        if self.everything[number].work is None:
            self.order.append(number)
            self.everything[number].start()

    def _look_ahead(self) -> None:
        """While one bucket is read, the next one of the last time is on its way."""
        done = len(self.order)
        if self.order == self.expected[:done] and len(self.expected) > done:
            following = self.expected[done]
            if not self.everything[following].gathered:
                self._start(following)

    def gather(self) -> None:
        """The player's weights are whole until it rests."""
        for bucket in self.everything:
            if not bucket.gathered:
                bucket.gather()

    def agree(self) -> int | None:
        """A number for the gathers of this phase, which must be the same on all ranks; none if all were whole."""
        return zlib.crc32(repr(self.order).encode()) if self.piecewise else None

    def spread(self) -> None:
        """The shares have changed: what was gathered from the old ones is of no use."""
        for bucket in self.buckets:
            bucket.version += 1
            bucket.let_go()

    @property
    def there(self) -> bool:
        """Whether all buckets are gathered."""
        return all(bucket.gathered for bucket in self.everything)

    def rest(self) -> None:
        """Keep the shares alone."""
        for bucket in self.everything:
            bucket.let_go()

    def settle(self) -> None:
        """Gather for good."""
        for bucket in self.everything:
            bucket.gather(bucket.kind)

    def release(self) -> None:
        """Frozen parameters, too, are whole in memory of their own."""
        for bucket in self.everything[len(self.buckets) :]:
            bucket.release()
        super().release()

    @property
    def dealt(self) -> list[Bucket]:
        """Frozen parameters, too."""
        return self.everything

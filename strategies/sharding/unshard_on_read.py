"""Unshards weights when any code in a phase reads them, and reshards them after that."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gan.files.errors import UserError
from strategies import private
from strategies.sharding.saved_tensors import places_in
from strategies.sharding.storage import Storage

Read = Callable[[list[nn.Parameter]], None]


def listen(modules: Iterable[nn.Module], read: Read) -> None:
    """Call `read` from now on with every parameter of these modules that is about to be read."""
    for each in modules:
        if not isinstance(each._parameters, Parameters):
            each._parameters = Parameters(each._parameters)
        each._parameters.reads.append(read)


def unlisten(modules: Iterable[nn.Module], read: Read) -> None:
    """Undo `listen`."""
    for each in modules:
        if isinstance(each._parameters, Parameters):
            each._parameters.reads.remove(read)
            if not each._parameters.reads:
                each._parameters = each._parameters.plain()


class Parameters(dict[str, nn.Parameter | None]):
    """A module's parameters under their names. See [Note: who reads] in unshard_on_read.py."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.reads: list[Read] = []

    def quietly(self) -> list[nn.Parameter]:
        """The parameters there are, without a callback."""
        return [weight for weight in super().values() if weight is not None]

    def plain(self) -> dict[str, nn.Parameter | None]:
        """A plain dict, as torch has it."""
        return dict(super().items())

    def _tell(self, weights: list[nn.Parameter]) -> None:
        for read in self.reads:
            read(weights)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        weight = super().__getitem__(name)
        if weight is not None:
            self._tell([weight])
        return weight

    def values(self) -> Any:
        self._tell(self.quietly())
        return super().values()

    def items(self) -> Any:
        self._tell(self.quietly())
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.plain(),)  # a copy of a module has no callback


def agree_on_gather(number: int, group: Any, device: torch.device, phase: str, policy: str) -> None:
    """Raise on all ranks of the group if another one gathers another bucket than this number.

    It is asked the first time that a phase is played: one small collective for each gather.
    """
    both = torch.tensor([number, -number], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    if both[0] != -both[1]:
        raise UserError(other_order(phase, policy))


def other_order(phase: str, *policies: str) -> str:
    """What is said of ranks that read different weights under these policies."""
    choices = " or ".join(f"{policy}+whole" for policy in dict.fromkeys(policies))
    return (
        f"phase '{phase}' read weights in another order on another rank; where layers are chosen by sample, type "
        f"{choices}, which gathers a player once a phase"
    )


KEPT = 2  # how many buckets without a reader stay


class UnshardOnRead:
    """Unshards a player's buckets in a phase: one by one as they are read, or all of them at the first read.

    [Note: who reads]
    A bucket is unsharded when a weight in it is read, not when a module is called. The reason: games call the networks'
    own methods, and layers read each other's weights. `Parameters` calls us for each read. The reader of a weight is
    the innermost forward that is running, because its code may use the weight until it ends. If no forward is running,
    the reader is the phase. When all readers of a bucket have ended, it may be resharded. The newest two of these stay,
    because they are often read again: backward goes to and fro in a block, whose weights may be in two buckets.

    For such weights autograd saves a place instead of the weight (see saved_tensors.py). So they can be resharded
    between forward and backward, also if the backward comes in a later phase. If they have changed by then, the error
    is that of plain torch.

    `modules` are those through which code reads these parameters. Several players may listen to one module: each
    sees all reads, and answers those of its own parameters.

    [Note: torch.func.grad]
    torch.func.grad, vjp and jacrev cannot run where autograd saves places. So a phase of second order, in which weights
    stay whole, does without. A graph that is made there cannot be used in a later phase, which is the same error; one
    that `GanModule.shared` makes can, because places are saved for it.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], modules: Sequence[nn.Module], storage: Storage, policy: str
    ) -> None:
        """`policy` is a name, for errors."""
        self.modules, self.storage, self.buckets, self.policy = modules, storage, storage.buckets, policy
        self.phase = ""  # the one that is played
        self.own = set(map(id, parameters))
        self.number = {id(w): number for number, bucket in enumerate(self.buckets) for w in bucket.weights.values()}
        for number, bucket in enumerate(self.buckets):
            bucket.fetch = partial(self.fetch, number)
        self.playing = False
        self.piecewise = False
        self.frames: list[set[int]] = []  # the buckets that each running forward has read; the first frame is the phase
        self.readers: list[int] = []  # for each bucket, how many frames have read it
        self.idle: list[int] = []  # buckets without a reader, the oldest first
        self.order: list[int] = []  # the buckets that this phase has gathered, in order
        self.expected: list[int] = []  # the order when this phase was last played
        self.before: dict[str, list[int]] = {}  # the last order of each phase
        listen(modules, self.read)
        self.hooks = [each.register_forward_pre_hook(self._enter, prepend=True) for each in modules]
        self.hooks += [each.register_forward_hook(self._leave, always_call=True) for each in modules]

    @contextmanager
    def during(self, phase: str, piecewise: bool, now: bool, places: bool = True) -> Iterator[None]:
        """A context around a phase. `now`: unshard everything at the start. After an error it waits for no rank.

        `places`: autograd saves places. Without it, all must stay whole: see [Note: torch.func.grad].
        """
        self.piecewise, self.playing, self.phase = piecewise, True, phase
        self.order, self.expected = [], self.before.get(phase, [])
        self.frames, self.idle, self.readers = [set()], [], [0] * len(self.buckets)
        if now:
            self.storage.unshard()
        try:
            with places_in(phase, saved=places):
                yield
        finally:
            self.playing = False  # from here on a read gathers nothing
            self.frames = []
        self.before[phase] = self.order
        self.storage.reshard()
        if not places:
            for bucket in self.buckets:
                bucket.end_graphs()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside the `with`, also during a phase, reads neither unshard nor reshard anything."""
        before, self.playing = self.playing, False
        try:
            yield
        finally:
            self.playing = before

    def check_code(self) -> int | None:
        """A number made from the order of this phase's gathers, to compare between ranks; None if all came at once."""
        return zlib.crc32(repr(self.order).encode()) if self.piecewise else None

    def release(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        unlisten(self.modules, self.read)

    # ---- what is read. `gan.plan` calls these too, without modules: see strategies/cost/dry.py ----

    def enter(self, weights: Iterable[nn.Parameter]) -> None:
        """A forward begins, of a module that has these weights itself."""
        self.frames.append(set())
        self.read(weights)

    def leave(self) -> None:
        """The innermost forward ends."""
        for number in self.frames.pop():
            self.readers[number] -= 1
            if not self.readers[number]:
                self.idle.append(number)

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if self.playing and not torch.compiler.is_compiling():
            self.enter(module._parameters.quietly())

    def _leave(self, *_: Any) -> None:
        if len(self.frames) > 1 and not torch.compiler.is_compiling():
            self.leave()

    def read(self, weights: Iterable[nn.Parameter]) -> None:
        """Weights are read, of this player or of others."""
        if not self.playing or torch.compiler.is_compiling():
            return
        if not self.piecewise:
            if not self.storage.unsharded and any(id(weight) in self.own for weight in weights):
                with private.outside_transforms():
                    self.storage.unshard()
            return
        for number in dict.fromkeys(self.number[id(weight)] for weight in weights if id(weight) in self.number):
            if number not in self.frames[-1]:
                self.frames[-1].add(number)
                self.readers[number] += 1
            self.fetch(number)

    def fetch(self, number: int) -> None:
        """Unshard a bucket, and reshard those that have no reader any more. Backward calls it too."""
        bucket = self.buckets[number]
        if number in self.idle:
            self.idle.remove(number)
        if not bucket.unsharded:
            with private.outside_transforms():
                if not self.piecewise:
                    self.storage.unshard()
                    return
                self._start(number)
                bucket.unshard()
                self._look_ahead()
        if not self.piecewise:
            return
        if not self.readers[number]:
            self.idle.append(number)
        while len(self.idle) > KEPT:
            with private.outside_transforms():
                self.buckets[self.idle.pop(0)].reshard()

    def _start(self, number: int) -> None:
        if self.buckets[number].work is None:
            if self.phase not in self.before:
                agree_on_gather(number, self.storage.group, self.buckets[number].device, self.phase, self.policy)
            self.order.append(number)
            self.buckets[number].start_unshard()

    def _look_ahead(self) -> None:
        """While one bucket is used, start to gather the one that came next when this phase was last played."""
        done = len(self.order)
        if self.order == self.expected[:done] and len(self.expected) > done:
            following = self.expected[done]
            if not self.buckets[following].unsharded:
                self._start(following)

"""Unshards weights when any code in a phase reads them, and reshards them after that; autograd saves their places."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gan.files.errors import UserError, explained
from strategies import private
from strategies.sharding.bucket import SHARDED, UNSHARDED, Bucket, memory_of
from strategies.sharding.resharded_parameter import end_graphs, version_of
from strategies.sharding.storage import Storage
from strategies.world import agree

Read = Callable[[list[nn.Parameter]], None]


def listen(modules: Iterable[nn.Module], read: Read) -> None:
    """Call `read` from now on with every parameter of these modules that is about to be read."""
    for each in modules:
        if not isinstance(each._parameters, Parameters):
            each._parameters = Parameters(each._parameters)
        each._parameters.reads.append(read)


def unlisten(modules: Iterable[nn.Module], read: Read) -> None:
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
        self._tell(self.quietly())
        return dict, (self.plain(),)  # a copy of a module has no callback


class Hook:
    """A module's hook. That of a copied or pickled module does nothing, because a copy has whole weights of its own."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # whoever loads the pickle may not have this package


def other_order(phase: str, *policies: str) -> str:
    """What is said of ranks that read different weights under these policies."""
    choices = " or ".join(f"{policy}+whole" for policy in dict.fromkeys(policies))
    return (
        f"phase '{phase}' read weights in another order on another rank; where layers are chosen by sample, type "
        f"{choices}, which gathers a player once a phase"
    )


KEPT = 2  # how many buckets stay: one that is gathered, and the newest of those without a reader


class UnshardOnRead:
    """Unshards a player's buckets in a phase: one by one as they are read, or all of them at the first read.

    [Note: who reads]
    A bucket is unsharded when a weight in it is read, not when a module is called. The reason: games call the networks'
    own methods, and layers read each other's weights. `Parameters` calls us for each read. The reader of a weight is
    the innermost forward that is running, because its code may use the weight until it ends. If no forward is running,
    the reader is the phase. When all readers of a bucket have ended, it may be resharded, and is so before the next one
    is gathered. The newest stays, because backward goes to and fro in a block, whose weights may be in two buckets.

    For such weights autograd saves the parameter instead of the memory, and for views of them their place. So they can
    be resharded between forward and backward, also if the backward comes in a later phase. If they have changed by
    then, the error is that of plain torch.

    `modules` are those through which code reads the storage's weights. Several players may listen to one module: each
    sees all reads, and answers those of its own weights.

    [Note: torch.func.grad]
    torch.func.grad, vjp and jacrev cannot run where autograd saves places. So a phase of second order, in which weights
    stay whole, does without. A graph that is made there cannot be used in a later phase, which is the same error; one
    that `GanModule.shared` makes can, because places are saved for it.
    """

    def __init__(self, modules: Sequence[nn.Module], storage: Storage, policy: str, always_whole: bool = True) -> None:
        """`policy` is a name, for errors. `always_whole`: see [Note: whole for the phase] in zero3.py."""
        self.always_whole = always_whole
        self.modules, self.storage, self.buckets, self.policy = modules, storage, storage.buckets, policy
        self.phase = ""  # the one that is played
        self.parameters = [weight for bucket in self.buckets for weight in bucket.weights.values()]
        self.number = {id(w): number for number, bucket in enumerate(self.buckets) for w in bucket.weights.values()}
        for number, bucket in enumerate(self.buckets):
            bucket.fetch = partial(self.fetch, number)
        self.playing = False
        self.piecewise = False
        self.new = False  # whether the ranks agree about each gather
        self.frames: list[set[int]] = []  # the buckets that each running forward has read; the first frame is the phase
        self.readers: list[int] = []  # for each bucket, how many frames have read it
        self.idle: list[int] = []  # buckets without a reader, the oldest first
        self.order: list[int] = []  # the buckets that this phase has gathered, in order
        self.recomputing = False  # whether a block is computed again in backward
        self.again: set[int] = set()  # the buckets that the last one of these has read
        self.expected: list[int] = []  # the order when this phase was last played
        self.before: dict[str, list[int]] = {}  # the last order of each phase
        listen(modules, self._read)
        self.hooks = [each.register_forward_pre_hook(Hook(self._enter), prepend=True) for each in modules]
        self.hooks += [each.register_forward_hook(Hook(self._leave), always_call=True) for each in modules]

    @contextmanager
    def during(self, phase: str, second_order: bool, learns: bool, trying: bool = False) -> Iterator[None]:
        """A context around a phase, in which the player learns or not. After an error it waits for no rank.

        `trying`: it is played for a trial, whose samples may read other weights than a batch.
        """
        self.piecewise, self.playing, self.phase = not (self.always_whole or second_order), True, phase
        self.new = self.piecewise and (trying or phase not in self.before)
        self.order, self.expected = [], [] if trying else self.before.get(phase, [])
        self.frames, self.idle, self.readers = [set()], [], [0] * len(self.buckets)
        self.recomputing, self.again = False, set()
        if learns and not self.piecewise:
            self._unshard_all()
        transformed = explained(
            f"phase '{phase}' differentiates by torch.func, for which weights must stay whole; type "
            f"Phase('{phase}', ..., second_order=True)",
            RuntimeError,
            saying="support saved tensor hooks",
        )
        try:
            with transformed, nullcontext() if second_order else saved_by_reference():
                yield
        finally:
            self.playing = False  # from here on a read gathers nothing
            self.frames = []
        if not trying:
            self.before[phase] = self.order
        self.storage.reshard()
        if second_order:
            end_graphs(self.parameters)

    def resting(self) -> AbstractContextManager[Any]:
        """Inside the `with`, also during a phase, reads neither unshard nor reshard anything."""
        return mock.patch.object(self, "playing", False)

    def in_turn(self, number: int) -> list[int]:
        """The first so many buckets, in the order in which backward comes to them: the reverse of the gathers' order.

        Those that the phase has not read come last, so that they hold nobody up. Where all are gathered at once, ranks
        may read in different orders, so there the order is the reverse of the network's.
        """
        places = {each: place for place, each in enumerate(dict.fromkeys(self.order))} if self.piecewise else {}
        return sorted(reversed(range(number)), key=lambda each: -places.get(each, -1))

    def release(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        unlisten(self.modules, self._read)

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
            self.recomputing = self.recomputing and private.in_backward()
            parameters: Any = module._parameters  # a dict that is watched: see `listen`
            self.enter(parameters.quietly())

    def _leave(self, *_: Any) -> None:
        if len(self.frames) > 1 and not torch.compiler.is_compiling():
            self.leave()

    def _read(self, weights: Iterable[nn.Parameter]) -> None:
        if self.playing and not torch.compiler.is_compiling():
            self.recomputing = self.recomputing and private.in_backward()
            self.read(weights)

    def read(self, weights: Iterable[nn.Parameter]) -> None:
        """Weights are read, of this player or of others."""
        if not self.piecewise:
            if any(id(weight) in self.number for weight in weights):
                self._unshard_all()
            return
        for number in dict.fromkeys(self.number[id(weight)] for weight in weights if id(weight) in self.number):
            if number not in self.frames[-1]:
                self.frames[-1].add(number)
                self.readers[number] += 1
            if self.recomputing:
                self.again.add(number)
            self.fetch(number)

    def begin_again(self) -> None:
        """Backward computes a block again. torch's checkpoint keeps what that reads until backward has passed it."""
        self.recomputing, self.again = True, set()

    def fetch(self, number: int) -> None:
        """Unshard a bucket, and reshard those that have no reader any more. Backward calls it too."""
        bucket = self.buckets[number]
        if not self.piecewise:
            self._unshard_all()
            return
        if number in self.idle:
            self.idle.remove(number)
        if not bucket.unsharded:
            with private.outside_transforms():
                spare = [each for each in self.idle if each not in self.again]
                for old in spare[: max(0, len(spare) + 1 - KEPT)]:
                    self.idle.remove(old)
                    self.buckets[old].reshard()
                self._start(number)
                bucket.unshard()
                self._look_ahead()
        if not self.readers[number]:
            self.idle.append(number)

    def _unshard_all(self) -> None:
        if not self.storage.unsharded:
            with private.outside_transforms():
                for bucket in self.buckets:
                    if not bucket.unsharded:
                        bucket.unshard()

    def _start(self, number: int) -> None:
        if self.buckets[number].work is None:
            self.agree(number)
            self.order.append(number)
            self.buckets[number].start_unshard()

    def _look_ahead(self) -> None:
        """While one bucket is used, start to gather the one that came next when this phase was last played."""
        done = len(self.order)
        if self.order == self.expected[:done] and len(self.expected) > done:
            following = self.expected[done]
            if not self.buckets[following].unsharded:
                self._start(following)

    def agree(self, what: object) -> None:
        """In trials, and a phase's first time, raise on all ranks if one gathers or reduces another bucket."""
        if self.new and not agree(what, self.buckets[0].device, self.storage.group):
            raise UserError(other_order(self.phase, self.policy))


# ---- what autograd saves for backward: of a weight that will be resharded its place ----


def saved_by_reference() -> saved_tensors_hooks:
    """A context around a phase. torch uses only the innermost hooks of this kind, so all policies use these."""
    return saved_tensors_hooks(_pack, lambda find: find())


def _pack(tensor: Tensor) -> Callable[[], Tensor]:
    """What finds a tensor again in backward, and refuses one that was written since the forward."""
    if isinstance(tensor, nn.Parameter):
        bucket = SHARDED.get(id(tensor))
        return partial(_weight, tensor, bucket, _version(tensor, bucket))
    bucket = UNSHARDED.get(memory_of(tensor))
    if bucket is None or bucket.whole is None or tensor.dtype != bucket.whole.dtype:
        return partial(_other, tensor, version_of(tensor))
    offset = int(tensor.storage_offset())
    return partial(_view, bucket, tensor.size(), tensor.stride(), offset, bucket.version_at(offset))


def _weight(weight: nn.Parameter, bucket: Bucket | None, version: int) -> Tensor:
    """A weight, whose values are gathered in this bucket.

    Plain torch saves the parameter, and not its memory: after `weight.data = ...` backward takes the new values.
    """
    _check(weight.shape, _version(weight, bucket), version)
    if bucket is not None:
        bucket.fetch()
    return weight.detach()


def _version(weight: nn.Parameter, bucket: Bucket | None) -> int:
    return version_of(weight) + (0 if bucket is None else bucket.version)


def _view(bucket: Bucket, size: torch.Size, stride: tuple[int, ...], offset: int, version: int) -> Tensor:
    """A view of a weight in this bucket, of which only the place was saved."""
    _check(size, bucket.version_at(offset), version)
    bucket.fetch()
    assert bucket.whole is not None
    return bucket.whole.as_strided(size, stride, offset)


def _other(tensor: Tensor, version: int) -> Tensor:
    _check(tensor.shape, version_of(tensor), version)
    return tensor


def _check(shape: torch.Size, now: int, then: int) -> None:
    """Refuse, in the words of plain torch, what was written since the forward."""
    if now != then:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {list(shape)} is at version {now}; expected version {then} instead"
        )

"""Sharded weights are unsharded when a phase reads them, whatever code reads them, and resharded after that."""

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from strategies.sharding.parameters import listen, unlisten
from strategies.sharding.saved_tensors import kept_as_places
from strategies.sharding.storage import Storage


class UnshardOnRead:
    """Unshards a player's buckets in a phase: one by one as they are read, or all of them at the first read.

    [Note: who reads]
    What decides is which weight is read, not which module is called: games call networks by their own methods, and
    layers read each other's weights. `Parameters` tells when a weight is read. The innermost forward that runs then is
    its reader, because that code may still use it later; a weight that is read outside of any forward has the phase
    for its reader. When its last reader has ended, a bucket may be resharded. The newest such bucket stays, because
    it is often read again.

    Autograd keeps the places of such weights instead of the weights (saved_tensors.py), so that they can be resharded
    between forward and backward, also when the backward comes in a later phase. If they have changed by then, that is
    the same error as in plain torch.
    """

    def __init__(self, module: nn.Module, storage: Storage) -> None:
        self.module, self.storage, self.buckets = module, storage, storage.buckets
        self.number = {id(w): number for number, bucket in enumerate(self.buckets) for w in bucket.weights.values()}
        for number, bucket in enumerate(self.buckets):
            bucket.fetch = partial(self._fetch, number)
        self.playing = False
        self.piecewise = False
        self.frames: list[set[int]] = []  # what each running forward reads; the first frame is the phase's
        self.readers: list[int] = []  # of each bucket, how many frames read it
        self.idle: list[int] = []  # buckets without a reader, the oldest first
        self.order: list[int] = []  # of the gathers in this phase
        self.expected: list[int] = []  # the same, when this phase was played last
        self.before: dict[str, list[int]] = {}  # the same, of each phase
        listen(module, self._read)
        self.hooks = [each.register_forward_pre_hook(self._enter, prepend=True) for each in module.modules()]
        self.hooks += [each.register_forward_hook(self._leave, always_call=True) for each in module.modules()]

    @contextmanager
    def during(self, phase: str, piecewise: bool, now: bool) -> Iterator[None]:
        """Around a phase; `now`: unshard everything at once. After an error no rank is waited for."""
        self.piecewise, self.playing = piecewise, True
        self.order, self.expected = [], self.before.get(phase, [])
        self.frames, self.idle, self.readers = [set()], [], [0] * len(self.buckets)
        if now:
            self.storage.unshard()
        try:
            with kept_as_places():
                yield
        finally:
            self.playing = False  # from here on a read gathers nothing
            self.frames = []
        self.before[phase] = self.order
        self.storage.reshard()

    def check_code(self) -> int | None:
        """A number for the gathers of this phase, which must be the same on all ranks; None if all came at once."""
        return zlib.crc32(repr(self.order).encode()) if self.piecewise else None

    def release(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        unlisten(self.module)

    # ---- what is read ----

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if self.playing and not torch.compiler.is_compiling():
            self.frames.append(set())
            self._read(module._parameters.quietly())

    def _leave(self, *_: Any) -> None:
        if len(self.frames) > 1 and not torch.compiler.is_compiling():
            for number in self.frames.pop():
                self.readers[number] -= 1
                if not self.readers[number]:
                    self.idle.append(number)

    def _read(self, weights: Iterable[nn.Parameter]) -> None:
        if not self.playing or torch.compiler.is_compiling():
            return
        if not self.piecewise:
            if not self.storage.unsharded:
                self.storage.unshard()
            return
        for number in dict.fromkeys(self.number[id(weight)] for weight in weights if id(weight) in self.number):
            if number not in self.frames[-1]:
                self.frames[-1].add(number)
                self.readers[number] += 1
            self._fetch(number)

    def _fetch(self, number: int) -> None:
        """Have a bucket unsharded, and reshard those that nobody reads any more. Also called by autograd."""
        bucket = self.buckets[number]
        if number in self.idle:
            self.idle.remove(number)
        if not bucket.unsharded:
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
        while len(self.idle) > 1:
            self.buckets[self.idle.pop(0)].reshard()

    def _start(self, number: int) -> None:
        if self.buckets[number].work is None:
            self.order.append(number)
            self.buckets[number].start_unshard()

    def _look_ahead(self) -> None:
        """While one bucket is read, gather the one that came next when the phase was played last."""
        done = len(self.order)
        if self.order == self.expected[:done] and len(self.expected) > done:
            following = self.expected[done]
            if not self.buckets[following].unsharded:
                self._start(following)

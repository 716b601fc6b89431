"""What a forward writes into buffers and attributes, chunk by chunk."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gan.files.errors import UserError
from strategies.advice import type_instead
from strategies.objects.content import PLAIN, Attributed, same
from strategies.pipelining.pipe import Pipe, another_way
from strategies.sharding.resharded_parameter import version_of

SMALL = 1024  # numbers in an attribute that is told to the other ranks
SMALL_WEIGHT = 2**16  # numbers, so that comparing them takes no time


class Buffers:
    """What a forward writes into buffers, chunk by chunk.

    Every chunk begins with the values from before the call. So a spectral norm, which one device moves once in a call,
    moves once here. Each chunk has copies of its own, because a graph may have saved them. A chunk of another stage of
    this rank has written other buffers.

    The same holds for attributes, such as a count of calls: the author's Python runs for each chunk, and in the end an
    attribute is as after one forward. Those of a unit are told to the other ranks, unless they are large: a cache.
    """

    def __init__(self, pipe: Pipe, names: Collection[str]) -> None:
        self.pipe, self.modules = pipe, dict(pipe.network.named_modules())
        mine = pipe.mine()
        self.of_units = {m for unit in pipe.units if unit.stage in mine for m in unit.module.modules()}
        self.weights = list(dict.fromkeys(weight for module in self.of_units for weight in module.parameters(False)))
        self.chunks, self.before = 0, self._written()
        buffers = {
            f"{path}.{name}".lstrip("."): (module, name, buffer)
            for path, module in self.modules.items()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self.slots = {name: slot for name, slot in buffers.items() if name in names}
        self.unplanned = {name: (*slot, version_of(slot[2])) for name, slot in buffers.items() if name not in names}
        self.written: dict[str, Tensor] = {}  # buffers that were written in place, or that differ from before
        self.attributes = Attributed(self.modules.values())
        self.changed: dict[str, dict[str, Any]] = {}  # by module, the attributes that units of this rank have assigned

    def _written(self) -> tuple[list[Any], list[float]]:
        """What changes when a weight is written. Of small ones also the norm: no version counts what `.data` writes."""
        small: list[Tensor] = [
            each for each in self.weights if each.is_floating_point() and each.numel() <= SMALL_WEIGHT
        ]
        norms = (
            torch.stack([each.double() for each in torch._foreach_norm(small)]).nan_to_num().tolist() if small else []
        )
        return [(version_of(each), each.data_ptr()) for each in self.weights], norms

    @contextmanager
    def chunk(self) -> Iterator[None]:
        self.chunks += 1
        self.attributes.put_back()
        for module, name, buffer in self.slots.values():
            module._buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for path, scope, before in zip(self.modules, self.attributes.scopes, self.attributes.before, strict=True):
                if scope.owner in self.of_units:
                    now = scope.read().items()
                    changed = {name: each for name, each in now if not same(before.get(name, self), each)}
                    self.changed |= {path: changed} if changed else {}
            for key, (module, name, buffer) in self.slots.items():
                now, module._buffers[name] = module._buffers[name], buffer
                if now is None or now is buffer:
                    continue
                if version_of(now) or not torch.equal(now, buffer):
                    self.written[key] = now
        if (found := self.attributes.written()) is not None:
            raise UserError(
                f"player '{self.pipe.player}': its forward changes {found} in place, which a pipeline would do once "
                f"for each chunk; assign a new one (self.x = [*self.x, new]), keep it in a buffer, or do it in the loss"
            )

    @torch.no_grad()
    def keep(self) -> None:
        """After the last chunk: let the buffers have what the chunks have written."""
        if self.chunks > 1 and self._written() != self.before:
            raise UserError(
                f"player '{self.pipe.player}': its forward writes its own weights, which a pipeline would do once for "
                f"each chunk; type +chunks:1, as in pipeline+chunks:1, or keep what it writes in a buffer"
            )
        for key, (module, name, buffer, version) in self.unplanned.items():
            if module._buffers.get(name) is not buffer or version_of(buffer) != version:
                why = f"writes the buffer '{key}', which it did not in its first call with such arguments and flags"
                raise another_way(self.pipe.player, why)
        for key, now in self.written.items():
            self.slots[key][2].copy_(now)
        for path, changed in self.changed.items():
            for name, each in changed.items():
                vars(self.modules[path])[name] = pytree.tree_map_only(Tensor, partial(self._left, path, name), each)

    def _left(self, path: str, name: str, tensor: Tensor) -> Tensor:
        """A tensor that a unit has left in an attribute. Its gradient would reach one rank, in the midst of a graph."""
        if tensor.is_leaf:
            return tensor

        def refuse(_: Tensor) -> None:
            player = self.pipe.player
            raise UserError(
                f"player '{player}': a loss learns from what '{path}' leaves in its attribute '{name}', which a "
                f"pipeline has on the rank of the layer only; let the network's forward return that, or type "
                f"{type_instead(player, 'zero3')}"
            )

        with torch.enable_grad():
            found = tensor.view_as(tensor)
        found.register_hook(refuse)
        return found

    def assigned(self) -> dict[str, dict[str, Any]]:
        """Those of the changed attributes that are small, and have no graph."""
        found = {
            path: {
                name: each for name, each in changed.items() if sum(map(_numbers, pytree.tree_leaves(each))) <= SMALL
            }
            for path, changed in self.changed.items()
        }
        return pytree.tree_map_only(Tensor, Tensor.cpu, {path: each for path, each in found.items() if each})

    def hear(self, told: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
        for path, changed in pytree.tree_map_only(Tensor, lambda each: each.to(device), told).items():
            vars(self.modules[path]).update(changed)


def _numbers(value: Any) -> float:
    """How many numbers there are in a part of an attribute. What cannot be told has too many."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return float("inf") if getattr(value, "requires_grad", False) else np.prod(value.shape)
    return 1 if isinstance(value, PLAIN) else float("inf")

"""The option recompute (activation checkpointing): backward runs the forwards of a player's blocks again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, compress
from types import MethodType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from gan import noise, ranks
from gan.files.errors import UserError
from gan.phase import Player
from nets.norm import torchs_own
from strategies import private
from strategies.batches import random_state
from strategies.objects.content import PLAIN, Attributed
from strategies.options.blocks import Block, LayerGroups, find_blocks
from strategies.sharding.resharded_parameter import resharded, version_of

NO_OBJECTS = (*PLAIN, Tensor)
FEATURES = 1000  # the most items of a list around a block that a hook in the block may fill


class Recompute:
    """Runs a player's blocks under torch's checkpoint, in place: the same modules, weights and state-dict keys.

    Between forward and backward a block keeps only its inputs and its weights. Backward runs its forward again to get
    the rest. See [Note: what is a block] in blocks.py. A block recomputes wherever its forward is called, also from a
    network's own method. What such a method computes itself is kept as usual. Without gradients nothing changes, nor
    inside torch.func and forward-mode derivatives, of which torch's checkpoint knows nothing: there all is kept.

    Communicates nothing: in the second forward a synchronised batch norm uses the sums of the first.

    [Note: the second forward]
    The second forward must have the same state as the first one, and must not change any state. torch's checkpoint
    restores only the arguments, torch's random numbers and autocast. This class also restores:

        buffers      copies from before the forward: u and v of spectral norms, running statistics
        weights      the tensors that the modules had, which torch.func.functional_call puts there for one call
        noise        losses draw for the same place and call again, also in a thread of autograd
        dice         NumPy and Python's random draw again what they drew
        attributes   of modules, such as a counter, and lists, dicts and sets in them; of the modules that the block is
                     in; of objects in these attributes; of objects that the block is given
        arguments    lists and dicts that the block is given, and may change
        ranks        sums over ranks are recorded, so ranks need not recompute their blocks in the same order; what is
                     added up for gradients is so among the same ranks, also in a thread of autograd
        flags        training mode, requires_grad (a fake of `GanModule.shared` outlives its phase), default dtype

    The values of weights are not restored. If they have changed since, the error is that of plain torch.

    It cannot restore what a block writes into a tensor of its own, its generators, or globals. A block that does the
    first or second, changes a buffer outside itself, writes its own weights, or overwrites its input, is
    refused when it does so. On CPUs a trial finds most of the rest, for one device computes without this option there.

    A backward that is itself differentiated is exact too; each of the two backwards runs the forward again.
    """

    latest: ClassVar[tuple[str, str]] = "", ""  # the player and the block that has run again last, in this process

    def __init__(
        self,
        player: Player,
        blocks: Sequence[Block] | None = None,
        begin_again: Callable[[], None] | None = None,
        readers: Sequence[nn.Module] = (),
    ) -> None:
        """`blocks` are those that recompute. Without them they are found. Before one does, `begin_again` is called.

        `readers` are all modules of the game that have weights of the player, the game among them.
        """
        self.player, self.begin_again = player, begin_again
        self.on = True
        self.updates = 0  # how often the player's weights were updated
        self.looked: set[str] = set()  # blocks of which the values of weights were compared around their first forward
        self.patches: list[AbstractContextManager[Any]] = []  # which put forwards in place of the modules' own
        # torch's SyncBatchNorm communicates inside torch, where the sums of the first forward cannot be recorded.
        if ranks.more_than_one() and torchs_own(player.module):
            raise UserError(
                f"player '{player.name}': recompute cannot run torch's SyncBatchNorm again; type "
                f"Trainer(sync_batchnorm=True), under which it can"
            )
        if any(isinstance(module, torch.jit.ScriptModule) for module in player.module.modules()):
            raise UserError(
                f"player '{player.name}': recompute cannot run again what torch.jit.script has compiled; leave "
                f"torch.jit.script out of the game, or the option for this player"
            )
        self.blocks: list[str] = []  # their names
        found = find_blocks(player) if blocks is None else blocks
        of_blocks = (block.sequential if isinstance(block, LayerGroups) else [block] for _, block in found)
        inside = set(chain.from_iterable(of_blocks))
        # Modules that blocks are in, where hooks keep features, say.
        self.around = [each for each in readers if each not in inside and not inside.isdisjoint(each.modules())]
        for name, block in found:
            if isinstance(block, LayerGroups):
                self.blocks += block.names
                module, forward = block.sequential, partial(self._run_in_groups, block)
            else:
                self.blocks.append(name)
                module, forward = block, partial(self._run_whole, name)
            # A bound method, so that a deep copy of the module has a forward with its own weights.
            self.patches.append(mock.patch.object(module, "forward", MethodType(forward, module)))
            self.patches[-1].__enter__()

    def _run_whole(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.run(name, [module], MethodType(type(module).forward, module), *args, **kwargs)

    def _run_in_groups(self, groups: LayerGroups, module: nn.Sequential, x: Any) -> Any:
        layers, done = list(module), 0
        for name, (begin, end) in zip(groups.names, groups.ranges, strict=True):
            x = _in_turn(layers[done:begin], x)
            x = self.run(name, layers[begin:end], partial(_in_turn, layers[begin:end]), x)
            done = end
        return _in_turn(layers[done:], x)

    def run(self, name: str, parts: Sequence[nn.Module], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, which uses these parts of the player, and keep only its arguments for backward."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        modules = list(dict.fromkeys(module for part in parts for module in part.modules()))
        # `dict.values`, because zero3 replaces `_parameters` by a dict that gathers the weights when they are read.
        weights = [w for module in modules for w in dict.values(module._parameters) if w is not None]
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *weights))
        if not learns or not self.on or private.in_transform():
            return forward(*args, **kwargs)
        what = f"block '{name}' of player '{self.player.name}'"
        if any(isinstance(leaf, Iterator) for leaf in leaves):
            raise UserError(f"{what} gets an iterator, and recompute calls the block twice; give it a list")
        state = ForwardState(what, self, modules, weights, _objects(leaves))
        # What is given twice is kept once. Of two copies attention would not know that `query is key`.
        numbers = {key: number for number, key in enumerate(dict.fromkeys(map(id, leaves)))}
        places = [numbers[id(leaf)] for leaf in leaves]
        given = [(args, kwargs)]  # the first forward may change its lists; the second one gets lists of its own

        def once(*kept: Any) -> Any:
            if given:
                args, kwargs = given.pop()
                with state.recorded(tensors):
                    return forward(*args, **kwargs)
            Recompute.latest = self.player.name, what
            args, kwargs = pytree.tree_unflatten([kept[number] for number in places], form)
            if self.begin_again is not None:
                self.begin_again()
            with state.restored():
                return forward(*args, **kwargs)

        # torch stops the second forward at the last tensor that backward needs, and RReLU has not filled its own then.
        whole = any(isinstance(module, nn.RReLU) for module in modules)
        distinct = dict(zip(places, leaves, strict=True)).values()
        return checkpoint(once, *distinct, use_reentrant=False, early_stop=not whole)

    def release(self) -> None:
        for patch in reversed(self.patches):
            with suppress(AttributeError):  # the author's code has deleted the forward
                patch.__exit__(None, None, None)
        self.patches.clear()
        self.begin_again, Recompute.latest = None, ("", "")


class ForwardState:
    """The state that a forward depends on, in addition to its arguments. See [Note: the second forward]."""

    def __init__(
        self, what: str, owner: Recompute, modules: list[nn.Module], weights: list[nn.Parameter], objects: list[Any]
    ) -> None:
        """`objects` are arguments that may have attributes."""
        self.what, self.owner, self.modules, self.weights = what, owner, modules, weights
        self.attributes = Attributed([*modules, *objects], lists=True)
        kept = chain.from_iterable(values.values() for values in self.attributes.before)
        self.attributes.add(own := _objects(kept))
        self.attributes.add(owner.around, FEATURES)
        self.attributed = [*modules, *objects, *own]
        place = noise.here()
        self.place = None if place is None else replace(place)
        self.world = ranks.here()
        self.dice: Any = random_state.dice()  # None after a forward that has drawn nothing from them
        self.dtype = torch.get_default_dtype()
        self.requires_grad = [weight.requires_grad for weight in weights]
        self.buffers = {id(b): b.detach().clone() for _, _, b in self._buffers(modules)}
        self.slots = [(module, name, id(buffer)) for module, name, buffer in self._buffers(modules)]
        self.weights_there = [(each, name, w) for each in modules for name, w in dict.items(each._parameters)]
        self.sums: list[Tensor] = []
        self.stamp: Any = None

    @staticmethod
    def _buffers(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
        return [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]

    @contextmanager
    def recorded(self, inputs: list[Tensor]) -> Iterator[None]:
        """Around the first forward: record what becomes known only during it, and refuse what cannot be restored."""
        own = set(self.modules)
        others = self._buffers([module for module in self.owner.player.module.modules() if module not in own])
        watched = [*inputs, *self.weights, *(buffer for _, _, buffer in others)]
        before = [version_of(tensor) for tensor in watched]
        # What is written through `.data` does not raise a version.
        looks = self.what not in self.owner.looked and not any(each.is_meta for each in self.weights)
        for module in self.modules if looks else ():
            module._parameters.values()  # gathers sharded ones
        values = [each.detach().clone() if looks and not resharded(each) else None for each in self.weights]
        self.owner.looked.add(self.what)
        with ranks.recording(self.sums):
            yield
        written = [version_of(tensor) != version for tensor, version in zip(watched, before, strict=True)]
        of_weights = len(inputs) + len(self.weights)
        if any(written[: len(inputs)]):
            raise UserError(
                f"{self.what} overwrites its input, from which recompute would start again; build its first layer "
                f"without inplace=True, or name the blocks: Player(..., blocks=[...])"
            )
        for weight, value, wrote in zip(self.weights, values, written[len(inputs) : of_weights], strict=True):
            if not wrote and (value is None or resharded(weight) or torch.equal(weight, value)):
                continue
            raise UserError(
                f"{self.what} writes its weight of shape {tuple(weight.shape)} in forward, and recompute would write "
                f"it again in backward; leave recompute out for this player, or write the weight between phases, "
                f"inside trainer.strategy.gathered(write=True)"
            )
        if (found := self.attributes.written()) is not None:
            raise UserError(
                f"{self.what} changes {found} in forward, and recompute would change it again in backward; keep it in "
                f"a buffer, draw without a generator, or do it in the loss"
            )
        for module, name, _ in compress(others, written[of_weights:]):
            raise UserError(
                f"{self.what} changes buffer '{name}' of a {type(module).__name__} that is not part of it, so "
                f"recompute would change it twice; name the blocks that hold both: Player(..., blocks=[...])"
            )
        if self.dice == random_state.dice():  # setting them takes longer than a small block
            self.dice = None
        self.stamp = self._stamp()

    def _stamp(self) -> Any:
        return self.owner.updates, [version_of(weight) for weight in self.weights]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Around the second forward: restore the state of the first, and afterwards put the present state back."""
        if self.stamp is not None and self.stamp != self._stamp():
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"weights of {self.what} were updated after the forward that is to be differentiated"
            )
        requires_grad = [weight.requires_grad for weight in self.weights]
        buffers = [(module, name, module._buffers[name]) for module, name, _ in self.slots]
        dtype = torch.get_default_dtype()
        copies = {key: buffer.clone() for key, buffer in self.buffers.items()}
        places = [(module, name, dict.get(module._parameters, name)) for module, name, _ in self.weights_there]
        place = None if self.place is None else replace(self.place)
        dice, attributes = self.dice and random_state.dice(), Attributed(self.attributed, lists=True)
        attributes.add(self.owner.around, FEATURES)
        try:
            if self.dice:
                random_state.set_dice(self.dice)
            self.attributes.put_back()
            torch.set_default_dtype(self.dtype)
            _put_weights(self.weights_there)
            self._set(self.requires_grad, [(module, name, copies[key]) for module, name, key in self.slots])
            with noise.at(place), ranks.at(self.world), ranks.replaying(self.sums):
                yield
        finally:
            self._set(requires_grad, buffers)
            _put_weights(places)
            torch.set_default_dtype(dtype)
            if dice:
                random_state.set_dice(dice)
            attributes.put_back()

    def _set(self, requires_grad: list[bool], buffers: Sequence[tuple[nn.Module, str, Tensor | None]]) -> None:
        for weight, value in zip(self.weights, requires_grad, strict=True):
            if weight.requires_grad != value:
                weight.requires_grad_(value)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def _objects(values: Iterable[Any]) -> list[Any]:
    """Those whose attributes a block may set."""
    others = (each for each in values if not isinstance(each, NO_OBJECTS) and not callable(each))
    return [each for each in others if hasattr(each, "__dict__") or hasattr(each, "__slots__")]


def _put_weights(weights: Sequence[tuple[nn.Module, str, nn.Parameter | None]]) -> None:
    for module, name, weight in weights:
        if dict.get(module._parameters, name) is not weight:
            dict.__setitem__(module._parameters, name, weight)


def _in_turn(layers: Sequence[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x

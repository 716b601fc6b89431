"""The option recompute (activation checkpointing): a player keeps the inputs of its blocks and makes the rest anew."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from gan import noise
from gan.errors import UserError
from gan.phase import Player
from gan.ranks import recording, replaying

LONG = 4  # layers with weights from which on a Sequential is cut


class Recompute:
    """Runs a player's blocks under torch's checkpoint, in place: the same modules, weights and state-dict keys.

    Of a block backward finds its input and weights only, and runs its forward again for the rest. Where `blocks` of
    the player do not say what is a block, see `cut`. The forward of a module runs so wherever it is called, also from
    a network's own method; an own method itself does not. Where no gradient is asked for nothing is different.

    Communicates nothing: what a synchronised batch norm was told in the forward it is told again.

    [Note: a forward seen again]
    torch's checkpoint brings back the arguments, torch's random numbers and autocast, and no more. The second run
    must meet all that the first one met and leave no trace, so besides:

        weights      must be those of the forward, else it is the error that plain torch has for it
        buffers      copies from before the forward stand in for them: u and v of spectral norms, running statistics
        noise        `gan.noise` draws for the same place and call again, also in a thread of autograd's
        ranks        sums over ranks come from memory, so ranks need not run blocks again in one order
        flags        training or not, who requires gradients (`GanModule.shared` outlives the phase's), default dtype

    Random numbers of Python and numpy, and a module's state that is no buffer, it cannot bring back. What a block
    changes outside of itself, and an input that it overwrites, are refused when they happen.

    A backward that is differentiated in its turn is exact too; each of the two backwards runs the forward again.
    """

    def __init__(self, player: Player) -> None:
        self.player = player
        self.updates = 0  # of the player's weights, so far
        self.undo: list[Callable[[], None]] = []
        # It asks the other ranks by itself, and what they said cannot be had.
        if any(isinstance(module, nn.SyncBatchNorm) for module in player.module.modules()):
            raise UserError(
                f"player '{player.name}': recompute cannot run torch's SyncBatchNorm again; type "
                f"Trainer(sync_batchnorm=True), which makes of every batch norm one that it can"
            )
        blocks = cut(player)
        names = ", ".join(part.names() if isinstance(part, Runs) else name for name, part in blocks)
        rank_zero_info(f"player '{player.name}' recomputes {names or 'its network as a whole'}")
        for name, part in blocks:
            if isinstance(part, Runs):
                self._give_forward(part.whole, part.forward(self))
            else:
                self._give_forward(part, self._forward(name))

    def _give_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        before = vars(module).get("forward")
        # Bound, so that a deep copy of the module has a forward of its own weights.
        module.forward = MethodType(forward, module)
        self.undo.append(lambda: delattr(module, "forward") if before is None else setattr(module, "forward", before))

    def _forward(self, name: str) -> Callable[..., Any]:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.run(name, [module], _plain_forward(module), *args, **kwargs)

        return forward

    def run(self, name: str, parts: Sequence[nn.Module], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A forward of these parts of the player, of which backward keeps the arguments alone."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        modules = list(dict.fromkeys(module for part in parts for module in part.modules()))
        # `dict.values`, because zero3 would take a look for reading.
        weights = [w for module in modules for w in dict.values(module._parameters) if w is not None]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (*tensors, *weights)):
            return forward(*args, **kwargs)
        seen = Seen(f"block '{name}' of player '{self.player.name}'", self, modules, weights)

        def once(*leaves: Any) -> Any:
            args, kwargs = pytree.tree_unflatten(leaves, form)
            with seen.first(tensors) if seen.fresh else seen.again():
                return forward(*args, **kwargs)

        return checkpoint(once, *leaves, use_reentrant=False)

    def release(self) -> None:
        """Every module has the forward that its author gave it."""
        for undo in reversed(self.undo):
            undo()
        self.undo = []


class Seen:
    """What a forward meets besides its arguments. See [Note: a forward seen again]."""

    def __init__(self, what: str, owner: Recompute, modules: list[nn.Module], weights: list[nn.Parameter]) -> None:
        self.what, self.owner, self.modules, self.weights = what, owner, modules, weights
        self.fresh = True
        place = noise.here()
        self.place = None if place is None else replace(place)
        self.dtype = torch.get_default_dtype()
        self.modes = [module.training for module in modules]
        self.asking = [weight.requires_grad for weight in weights]
        self.buffers = {id(b): b.detach().clone() for _, _, b in self._buffers(modules)}
        self.slots = [(module, name, id(buffer)) for module, name, buffer in self._buffers(modules)]
        self.sums: list[Tensor] = []
        self.stamp: Any = None

    @staticmethod
    def _buffers(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
        return [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]

    @contextmanager
    def first(self, inputs: list[Tensor]) -> Iterator[None]:
        """Note what is only known in the forward; refuse what could not be brought back."""
        self.fresh = False
        mine = set(self.modules)
        others = self._buffers([module for module in self.owner.player.module.modules() if module not in mine])
        before = [_version(tensor) for tensor in inputs], [_version(buffer) for _, _, buffer in others]
        with recording(self.sums):
            yield
        if before[0] != [_version(tensor) for tensor in inputs]:
            raise UserError(
                f"{self.what} overwrites its input, from which recompute would start again; build what it begins with "
                f"without inplace=True, or name the blocks: Player(..., blocks=[...])"
            )
        for (module, name, buffer), version in zip(others, before[1], strict=True):
            if _version(buffer) != version:
                raise UserError(
                    f"{self.what} changes buffer '{name}' of a {type(module).__name__} that is not part of it, so "
                    f"recompute would change it twice; name the blocks that hold both: Player(..., blocks=[...])"
                )
        self.stamp = self._stamp()

    def _stamp(self) -> Any:
        return self.owner.updates, [_version(weight) for weight in self.weights]

    @contextmanager
    def again(self) -> Iterator[None]:
        """As it was then; afterwards as it is now."""
        if self.stamp is not None and self.stamp != self._stamp():
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"weights of {self.what} are newer than the forward that is to be differentiated"
            )
        modes = [module.training for module in self.modules]
        asking = [weight.requires_grad for weight in self.weights]
        buffers = [(module, name, module._buffers[name]) for module, name, _ in self.slots]
        dtype = torch.get_default_dtype()
        copies = {key: buffer.clone() for key, buffer in self.buffers.items()}
        place = None if self.place is None else replace(self.place)
        try:
            torch.set_default_dtype(self.dtype)
            self._set(self.modes, self.asking, [(module, name, copies[key]) for module, name, key in self.slots])
            with noise.at(place), replaying(self.sums):
                yield
        finally:
            self._set(modes, asking, buffers)
            torch.set_default_dtype(dtype)

    def _set(self, modes: list[bool], asking: list[bool], buffers: list[tuple[nn.Module, str, Tensor]]) -> None:
        for module, mode in zip(self.modules, modes, strict=True):
            module.training = mode
        for weight, asks in zip(self.weights, asking, strict=True):
            if weight.requires_grad != asks:
                weight.requires_grad_(asks)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


class Runs:
    """A Sequential whose own layers run in groups, each of them a block; what is a block by itself stays so."""

    def __init__(self, name: str, whole: nn.Sequential, groups: list[tuple[int, int]]) -> None:
        self.name, self.whole, self.groups = name, whole, groups

    def names(self) -> str:
        """The groups as one would write them in Python."""
        return ", ".join(self._name(*group) for group in self.groups)

    def _name(self, begin: int, end: int) -> str:
        return f"{self.name}[{begin}:{end}]"

    def forward(self, owner: Recompute) -> Callable[..., Any]:
        """Sequential's forward, group by group."""

        def forward(module: nn.Sequential, input: Any) -> Any:
            layers, at = list(module), 0
            for begin, end in (*self.groups, (len(layers), len(layers))):
                for layer in layers[at:begin]:
                    input = layer(input)
                if begin < end:
                    part = layers[begin:end]
                    input = owner.run(self._name(begin, end), part, _chain(part), input)
                at = end
            return input

        return forward


def _chain(layers: Sequence[nn.Module]) -> Callable[[Any], Any]:
    def run(input: Any) -> Any:
        for layer in layers:
            input = layer(input)
        return input

    return run


def _plain_forward(module: nn.Module) -> Callable[..., Any]:
    return MethodType(type(module).forward, module)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# ---- where to cut ----


def cut(player: Player) -> list[tuple[str, nn.Module | Runs]]:
    """The player's blocks by name: those that it names, else as its author has built it.

    The network itself is cut into its parts, and each of them further as long as it holds lists of parts that have
    parts; what holds no such list is a block, for example a residual block. Layers that stand one by one in a
    Sequential are cut into groups of about sqrt(n) of its n layers with weights: groups begin with one of those. A
    layer alone is no block: its input is all that backward needs.
    """
    root = player.module
    if player.blocks is not None:
        found: list[tuple[str, nn.Module | Runs]] = _named(player)
    else:
        found = _network("", root)
    if not found:
        raise UserError(
            f"player '{player.name}': recompute finds no block of several layers in its {type(root).__name__}; leave "
            f"the option out for it, e.g. --strategy {player.name}=ddp,*=ddp+recompute, or name modules that have a "
            f"forward: Player(..., blocks=[...])"
        )
    return found


def _named(player: Player) -> list[tuple[str, nn.Module | Runs]]:
    modules = dict(player.module.named_modules())
    inner = {
        id(module): name for name in player.blocks for module in modules[name].modules() if module is not modules[name]
    }
    for name in player.blocks:
        if not _has_forward(modules[name]):
            raise UserError(
                f"player '{player.name}': block '{name}' is a {type(modules[name]).__name__}, which has no forward to "
                f"recompute; name its elements"
            )
        if id(modules[name]) in inner:
            raise UserError(f"player '{player.name}': block '{name}' is inside block '{inner[id(modules[name])]}'")
    return [(name, modules[name]) for name in dict.fromkeys(player.blocks)]


def _network(name: str, module: nn.Module) -> list[tuple[str, nn.Module | Runs]]:
    parts = [(inner, child) for inner, child in _children(name, module) if _has_parts(child)]
    if _is_cut(module) or not parts:
        return _pieces(name, module)
    if len(parts) == 1:  # a network around a network
        return _network(*parts[0])
    return [piece for part in parts for piece in _pieces(*part)]


def _pieces(name: str, module: nn.Module) -> list[tuple[str, nn.Module | Runs]]:
    if not _is_cut(module):
        return _whole(name, module)
    return [p for inner, child in _children(name, module) for p in _pieces(inner, child)] + _groups(name, module)


def _whole(name: str, module: nn.Module) -> list[tuple[str, nn.Module | Runs]]:
    if _is_sequential(module):
        return _groups(name, module)
    return [(name, module)] if _has_parts(module) and _has_forward(module) else []


def _groups(name: str, module: nn.Module) -> list[tuple[str, Runs]]:
    """The groups of a Sequential's own layers, one beginning with every so manyth that has weights."""
    if not _is_sequential(module):
        return []
    heavy = [number for number, layer in enumerate(module) if not _has_parts(layer) and _is_heavy(layer)]
    each = math.ceil(math.sqrt(len(heavy))) if len(heavy) >= LONG else max(1, len(heavy))
    groups: list[tuple[int, int]] = []
    count = 0
    for number, layer in enumerate(module):
        if _has_parts(layer):
            count = 0
            continue
        count += _is_heavy(layer)
        if count == 1 + each or (count == 1 and _is_heavy(layer)):
            groups.append((number, number + 1))
            count = 1
        elif count:
            groups[-1] = groups[-1][0], number + 1
    groups = [(begin, end) for begin, end in groups if end - begin > 1]
    return [(name, Runs(name, module, groups))] if groups else []


def _children(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    inside = [(n, child) for n, child in module.named_children() if not _is_parametrization(child)]
    return [(f"{name}.{n}".lstrip("."), child) for n, child in inside]


def _is_cut(module: nn.Module) -> bool:
    """Whether a module is descended into: it is, or holds, a list of parts that have parts, or a long Sequential."""
    children = [child for _, child in _children("", module)]
    if _is_list(module) and any(_has_parts(child) for child in children):
        return True
    if _is_sequential(module) and sum(map(_is_heavy, children)) >= LONG:
        return True
    return any(_is_cut(child) for child in children)


def _has_parts(module: nn.Module) -> bool:
    """Whether some of a module's work is done by modules inside it, as opposed to a layer alone."""
    children = [child for _, child in _children("", module)]
    return len(children) > 1 if _is_sequential(module) else any(True for c in children for _ in c.parameters())


def _is_heavy(layer: nn.Module) -> bool:
    """Whether a layer has weights, more than a norm's."""
    return any(weight.dim() > 1 for weight in layer.parameters())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _is_sequential(module: nn.Module) -> bool:
    """Whether it does what Sequential does, and no more."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_parametrization(module: nn.Module) -> bool:
    return isinstance(module, parametrize.ParametrizationList) or (
        isinstance(module, nn.ModuleDict)
        and len(module) > 0
        and all(isinstance(child, parametrize.ParametrizationList) for child in module.values())
    )

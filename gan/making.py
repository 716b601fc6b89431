"""Makes the first values of networks that were made on `torch.device("meta")`, one module at a time.

[Note: first values]
On the meta device a tensor has a shape and no values. They are made later, by the `reset_parameters()` of its module,
as torch's guides to sharding do it. Every module is made under a seed of its own, from the run's seed, the player and
the module's name. So the values do not depend on how many ranks there are, or which part of a tensor a rank keeps: a
rank makes a module, keeps its part of it, and frees the rest before the next module.

Sub-modules are made before the module that has them, as constructors do. A `reset_parameters()` gets memory for the
tensors of its own module. If it reaches into sub-modules (as that of nn.MultiheadAttention, which makes a bias zero),
it is called again with memory for all of them, in which they are made first. A tensor that several modules have is
made by the first of them.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gan.files.checkpoint import Share, aside
from gan.files.errors import UserError
from gan.noise import at, seed_for
from gan.phase import Player
from gan.pretrained import check_files, open_files

CPU = torch.device("cpu")


def on_meta(game: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a game that are on the meta device, each once."""
    return list({id(each): each for module in game.modules() for each in _own(module).values()}.values())


def give_memory(tensor: Tensor, values: Tensor) -> None:
    """Let a tensor on the meta device have these values. It stays the same object, which others may have too."""
    made = values
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(values, requires_grad=tensor.requires_grad)
        made.__class__ = type(tensor)
    vars(made).update(vars(tensor))
    torch.utils.swap_tensors(tensor, made)


@dataclass(frozen=True)
class _Maker:
    """A module that has tensors on the meta device, under its name in a player, and these tensors."""

    player: str
    name: str
    module: nn.Module
    tensors: dict[str, Tensor]

    def called(self, attribute: str) -> str:
        name = f"'{self.name}.{attribute}'" if self.name else f"'{attribute}'"
        return f"player '{self.player}': {name}" if self.player else name


class Making:
    """What is on the meta device in a game, and how it is made. See [Note: first values]."""

    def __init__(self, game: nn.Module, players: Iterable[Player]) -> None:
        """Find it. Later the tensors may get memory: they are still the same objects."""
        self.makers: dict[nn.Module, _Maker] = {}
        self.tensors = {id(each): each for each in on_meta(game)}
        seen: set[nn.Module] = set()
        for player, network in (*((each.name, each.module) for each in players), ("", game)):
            for name, module in _children_first(network, "", seen):
                if own := _own(module):
                    _forget_graphs(module)
                    self.makers[module] = _Maker(player, name, module, own)
        first = reversed(self.makers.values())  # the last one that is put here counts
        self.maker_of = {id(tensor): maker for maker in first for tensor in maker.tensors.values()}

    def make(self, shares: Mapping[Tensor, Share | None], seed: int, device: torch.device) -> None:
        """Fill these shares of tensors. A rank that keeps nothing of a module without sub-modules does not make it."""
        kept = {id(tensor): share for tensor, share in shares.items() if id(tensor) in self.tensors}
        for maker in self.makers.values():
            below = [self.makers[each] for each in maker.module.modules() if each in self.makers]
            wanted = {id(each) for other in below for each in other.tensors.values()} & kept.keys()
            if len(below) == 1 and next(maker.module.children(), None) is None:
                wanted = {key for key in wanted if (share := kept[key]) is not None and share.tensor.numel()}
            if wanted:
                self._make(maker, {key: kept[key] for key in wanted}, seed, device)

    @torch.no_grad()
    def _make(self, maker: _Maker, wanted: Mapping[int, Share | None], seed: int, device: torch.device) -> None:
        """Call its `reset_parameters`, and copy what it makes into the shares."""
        if not self._can_make(maker, wanted):
            return
        try:
            with _scratch([maker.module], self.tensors, device), _closed(maker.module):
                self._reset(maker, seed, device)
                self._keep([maker], wanted)
        except _Reached:
            below = [self.makers[each] for _, each in _children_first(maker.module, "", set()) if each in self.makers]
            with _scratch(maker.module.modules(), self.tensors, device):
                for each in below:
                    if self._can_make(each, wanted):
                        self._reset(each, seed, device)
                self._keep(below, wanted)

    def _can_make(self, maker: _Maker, wanted: Collection[int]) -> bool:
        """Whether it can be made. Raise if it cannot, and one of its tensors is wanted of it."""
        if _method(maker.module) is not None:
            return True
        for attribute, tensor in maker.tensors.items():
            if id(tensor) in wanted and self.maker_of[id(tensor)] is maker:
                kind = type(maker.module).__name__
                files = f"type Player('{maker.player}', ..., weights=PATH), " if maker.player else ""
                raise UserError(
                    f"{maker.called(attribute)} is on torch.device('meta'), and its module ({kind}) has no "
                    f"reset_parameters() that makes it; give the class this method, {files}or make the module "
                    f"outside of torch.device('meta')"
                )
        return False

    def _reset(self, maker: _Maker, seed: int, device: torch.device) -> None:
        """Call it in scratch memory, under its own seed. Raise if it leaves a tensor as it was."""
        tensors = {key: _there(maker.module, key) for key in maker.tensors}
        versions = {key: tensor._version for key, tensor in tensors.items()}
        with drawing_from(seed_for(seed, maker.player, maker.name), device):
            _method(maker.module)()
        for key, tensor in maker.tensors.items():
            value = _there(maker.module, key)
            if self.maker_of[id(tensor)] is not maker:
                continue
            made = isinstance(value, Tensor) and value.shape == tensor.shape
            if made and (value.is_floating_point() or value.is_complex()):
                made = not value.isnan().any()
            elif made:
                made = value is not tensors[key] or value._version != versions[key]
            if not made:
                raise UserError(
                    f"{maker.called(key)} is on torch.device('meta'), and reset_parameters() of its module "
                    f"({type(maker.module).__name__}) does not make it, in the shape {tuple(tensor.shape)}; let it "
                    f"make all parameters and buffers of the module"
                )

    def _keep(self, makers: Iterable[_Maker], wanted: Mapping[int, Share | None]) -> None:
        for maker in makers:
            for key, tensor in maker.tensors.items():
                share = wanted.get(id(tensor))
                if share is not None and self.maker_of[id(tensor)] is maker:
                    own = _there(maker.module, key).reshape(-1)[share.start : share.stop]
                    share.tensor.detach().copy_(own.view(share.tensor.shape))


def reopened(game: nn.Module, players: Iterable[Player], saved: Mapping[str, Any], strict: bool = True) -> set[str]:
    """Prepare a game for a checkpoint's values, on the CPU: give it memory, and make and read what is not saved.

    Returns the names of parameters that it leaves to files of `Player(weights=...)`. `strict`: these may not change.
    """
    noted = saved.get("files", {})
    files = open_files(player for player in players if player.name in noted)
    if strict:
        check_files(noted, files, {name: each.digest() for name, each in files.items()})
    making = Making(game, players)
    with aside(game, lambda tensor: tensor.is_meta):
        game.cpu()  # torch's RNNs have weak references to their weights, which cannot get memory then; this drops them
    for tensor in making.tensors.values():
        give_memory(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))
    state = game.state_dict(keep_vars=True)
    there = {id(state[name]) for name in state.keys() & saved["state_dict"].keys()}
    for each in files.values():
        for name, tensor in each.tensors().items():
            each.read(name, Share.whole(tensor))
            there.add(id(tensor))
    rest = {each: Share.whole(each) for each in making.tensors.values() if id(each) not in there}
    making.make(rest, saved.get("seed", 0), torch.device("cpu"))
    return {name for note in noted.values() for name in note["names"]}


# ---- modules in scratch memory ----


class _Reached(Exception):
    """A `reset_parameters` has reached into a sub-module."""


class _Closed(dict[str, Any]):
    """A module's tensors, which may not be read now."""

    def _raise(self, *_: Any) -> Any:
        raise _Reached

    __getitem__ = __setitem__ = get = values = items = _raise


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The tensors on the meta device that a module has itself, by their attributes."""
    own = {**module._parameters, **module._buffers}
    return {key: each for key, each in own.items() if each is not None and each.is_meta}


def _forget_graphs(module: nn.Module) -> None:
    """What torch's older norms make of weights, and make anew in each forward, may not hold these."""
    for key, each in vars(module).items():
        if isinstance(each, Tensor) and each.is_meta:
            vars(module)[key] = each.detach()


def _there(module: nn.Module, attribute: str) -> Any:
    """A parameter or buffer, or what code has put in its place."""
    return module._parameters.get(attribute, module._buffers.get(attribute))


def _children_first(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a network with their names, like `named_modules`, but sub-modules before what has them."""
    if module in seen:
        return
    seen.add(module)
    for key, child in module.named_children():
        yield from _children_first(child, f"{name}.{key}" if name else key, seen)
    yield name, module


def _method(module: nn.Module) -> Any:
    """What makes the module's tensors. Some of torch's modules, as nn.MultiheadAttention, have it as a private one."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _scratch(modules: Iterable[nn.Module], new: Collection[int], device: torch.device) -> AbstractContextManager[None]:
    """Inside the `with`, these modules have other tensors: those to be made have NaN, the others are copies."""
    made: dict[int, Tensor] = {}

    def scratch(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in made:
            if id(tensor) in new:
                unset = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
                values = torch.full(tensor.shape, unset, dtype=tensor.dtype, device=device)
            else:
                values = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
        return made[id(tensor)]

    return _exchanged(modules, lambda own: {key: scratch(each) for key, each in own.items()})


def _closed(module: nn.Module) -> AbstractContextManager[None]:
    """Inside the `with`, reading a tensor of a sub-module raises `_Reached`."""
    return _exchanged((each for each in module.modules() if each is not module), _Closed)


@contextmanager
def _exchanged(modules: Iterable[nn.Module], other: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Inside the `with`, these modules have other tensors, made of their own."""
    before = [(module, module._parameters, module._buffers) for module in modules]
    try:
        for module, parameters, buffers in before:
            module._parameters, module._buffers = other(parameters), other(buffers)
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters, module._buffers = parameters, buffers


def seed_generators(seed: int) -> None:
    """Those of torch, NumPy and Python, on the CPU. For one sample after the other, inside of `drawing_from`."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def drawing_from(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Inside the `with`, torch, NumPy and Python draw from this seed. Afterwards they draw on as if nothing was."""
    before = random.getstate(), np.random.get_state()
    own = [device] if device.type not in ("cpu", "meta") else []
    with torch.random.fork_rng(own, device_type=device.type if own else "cpu"), at(None):
        if own:
            with torch.accelerator.device_index(device.index):  # else the current device would be seeded
                torch.get_device_module(device).manual_seed(seed)
        seed_generators(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])

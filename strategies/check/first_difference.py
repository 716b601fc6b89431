"""Where the ranks together begin to differ from one device: the first call of a network with other values."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from gan import noise
from gan.module import GanModule
from strategies import private
from strategies.world import World

EQUAL = {torch.float64: 1e-9, torch.float32: 1e-4}  # by this part of a row's size
COARSE = 5e-2


class Moment(NamedTuple):
    """What a module is given or returns. `sums` has two sums of each row of each tensor; rows may fill the memory."""

    name: str
    returns: bool
    shapes: list[torch.Size]  # of a row
    sums: list[Tensor]
    equal: float
    drawn: int  # how often the phase has drawn before


class Begin(NamedTuple):
    """The first difference of a phase: in this moment of it, or in its formula. `drew`: by something drawn before."""

    phase: str
    at: int
    text: str
    drew: bool = False
    inside: bool = False  # a module
    formula: bool = False


class Calls:
    """Notes what the game's modules are given and return, by phase, in order."""

    def __init__(self, game: GanModule) -> None:
        self.names = {module: f"'{name}' ({type(module).__name__})" for name, module in game.named_modules() if name}
        self.seen: defaultdict[str, list[Moment]] = defaultdict(list)

    @contextmanager
    def noted(self) -> Iterator[None]:
        before = register_module_forward_pre_hook(lambda module, given: self._note(module, False, given))
        after = register_module_forward_hook(lambda module, _, made: self._note(module, True, made))
        with before, after:
            yield

    def _note(self, module: nn.Module, returns: bool, values: Any) -> None:
        place = noise.here()
        if place is None or module not in self.names or private.in_backward() or private.in_transform():
            return
        tensors = [each.detach() for each in tree_leaves(values) if isinstance(each, Tensor)]
        tensors = [each for each in tensors if each.is_floating_point() and each.numel() and not each.is_meta]
        equal = max((EQUAL.get(each.dtype, COARSE) for each in tensors), default=0.0)
        shapes, sums = [each.shape[1:] for each in tensors], [_sums(each) for each in tensors]
        self.seen[str(place.key[-1])].append(Moment(self.names[module], returns, shapes, sums, equal, place.calls))

    def first_unlike(self, alone: "Calls", phase: str, world: World, rows: int, drawn: int) -> Begin | None:
        """Where this rank's rows begin to differ from what one device has, if that can be told.

        `rows` are computed at a time, and the phase draws `drawn` times.
        """
        moments, of_one = self.seen[phase], alone.seen[phase]
        given: list[int] = []  # how often the phase had drawn when the modules were called that run now
        for at, (one, other) in enumerate(zip(moments, of_one, strict=False)):
            if one[:3] != other[:3]:  # other samples in it, or the samples are not in front
                return None
            before = given.pop() if one.returns and given else 0
            if not all(_alike(*both, world, rows, one.equal) for both in zip(one.sums, other.sums, strict=True)):
                what = "returns other values for the same input" if one.returns else "is given other values"
                return Begin(phase, at, f"it begins where {one.name} {what}", one.drawn > before, one.returns)
            if not one.returns:
                given.append(one.drawn)
        same = "networks are given and return what they do on one device: look at the formula of the loss"
        if not 0 < len(moments) == len(of_one):
            return None
        return Begin(phase, len(moments), same, drawn > moments[-1].drawn, formula=True)


def _sums(x: Tensor) -> Tensor:
    rows = x.reshape(len(x) if x.ndim else 1, -1).to("cpu", torch.float64)
    factors = torch.cos(torch.arange(rows.shape[1], dtype=torch.float64))
    return torch.stack([rows @ factors, rows.abs().sum(1)], 1)


def _alike(one: Tensor, other: Tensor, world: World, rows: int, equal: float) -> bool:
    """Whether the rows of `one` are this rank's of `other`. What has another layout is taken for alike."""
    if len(other) not in (len(one), world.size * len(one)):
        return True
    room = equal * other[:, 1].nan_to_num().max().item()
    # Blocks of samples, as of fakes and reals, or several rows of a sample side by side; or the same on all ranks.
    blocks = {each for each in (rows, len(one)) if len(one) % each == 0 and len(one) != len(other)}
    own = [other.view(-1, world.size, block, 2)[:, world.rank].reshape(-1, 2) for block in blocks] or [other]
    return any(torch.allclose(one, each, rtol=0.0, atol=room, equal_nan=True) for each in own)

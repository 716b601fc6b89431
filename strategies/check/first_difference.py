"""Where the ranks together begin to differ from one device: the first call of a network with other values."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gan import noise
from gan.module import GanModule
from gan.noise import Drawn
from strategies import private
from strategies.batches.draws import BY_GENERATOR
from strategies.batches.micro_batches import Batches
from strategies.world import World

EQUAL = {torch.float64: 1e-9, torch.float32: 1e-4}  # by this part of a row's size
COARSE = 5e-2
EXACT = 1e-12  # what has no rounding is summed for each row, in an order that depends on the number of rows
MOST = 4096  # rows that are looked for among all others


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

    def __init__(self, game: GanModule, batches: Batches) -> None:
        self.batches = batches
        self.names = {module: f"'{name}' ({type(module).__name__})" for name, module in game.named_modules() if name}
        self.seen: defaultdict[str, list[Moment]] = defaultdict(list)

    @contextmanager
    def noted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.names:
                stack.enter_context(module.register_forward_pre_hook(self._given, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(lambda each, _, made: self._note(each, True, made)))
            yield

    def _given(self, module: nn.Module, values: Any, named: Any) -> None:
        self._note(module, False, (values, named))

    def _note(self, module: nn.Module, returns: bool, values: Any) -> None:
        place = noise.here()
        if place is None or private.in_backward() or private.in_transform():
            return
        tensors = [each.detach().as_subclass(Tensor) for each in tree_leaves(values) if isinstance(each, Tensor)]
        # A number, as a criterion returns it, is a mean over a rank's own samples.
        tensors = [each for each in tensors if each.ndim and each.numel() and not each.is_meta]
        tensors = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in tensors]
        equal = max((EQUAL.get(each.dtype, COARSE) for each in tensors if each.is_floating_point()), default=EXACT)
        shapes, sums = [each.shape[1:] for each in tensors], [_sums(each) for each in tensors]
        self.seen[str(place.key[-1])].append(Moment(self.names[module], returns, shapes, sums, equal, place.calls))

    def first_unlike(
        self, alone: "Calls", phase: str, world: World, rows: int, drawn: Mapping[int, Drawn]
    ) -> Begin | None:
        """Where this rank's rows begin to differ from what one device has, if that can be told.

        `rows` are computed at a time, and `drawn` is what the phase draws. All ranks must call it.
        """
        moments, of_one = self.seen[phase], alone.seen[phase]
        of_first = world.broadcast([moment.sums for moment in of_one])
        if not 0 < len(moments) == len(of_one) == len(of_first):
            return None
        inside: list[str] = []  # modules that run now
        for at, (one, other) in enumerate(zip(moments, of_one, strict=True)):
            # Other shapes: other samples are in it, or the samples are not in front.
            comparable = [mine == its for mine, its in zip(one.shapes, other.shapes, strict=False)]
            enough = all(comparable) or (one.returns and any(comparable))
            if one[:2] != other[:2] or len(one.shapes) != len(other.shapes) or not enough:
                return None
            pairs = [*compress(zip(one.sums, other.sums, strict=True), comparable)]
            each = [self._alike(*both, world, rows, one.equal) for both in pairs]
            if one.returns and all(
                _among(*both, one.equal) for both, alike in zip(pairs, each, strict=True) if not alike
            ):
                each = [True for _ in pairs]
            if None in each:
                return None
            if one.returns and inside:
                inside.pop()
            by_rank = not all(_equal(*both, one.equal) for both in zip(other.sums, of_first[at], strict=False))
            if by_rank or not all(each):
                within = f"within {inside[-1]}, " if inside and not one.returns else ""
                what = "returns other values for the same input" if one.returns else "is given other values"
                what += " on another rank, for the samples of all" * by_rank
                text = f"it begins {within}where {one.name} {what}"
                return Begin(phase, at, text, _suspects(drawn, one.drawn), one.returns or bool(inside))
            if not one.returns:
                inside.append(one.name)
        same = "every module that is called gets and returns the same as on one device: look at the loss's own formula"
        return Begin(phase, len(moments), same, _suspects(drawn, len(drawn)), formula=True)

    def _alike(self, one: Tensor, other: Tensor, world: World, rows: int, equal: float) -> bool | None:
        """Whether the rows of `one` are this rank's of `other`. None if they are dealt out in another way."""
        if len(one) == len(other):  # the same on all ranks
            own = [other]
        elif len(other) == world.size * len(one) and (len(one) % rows == 0 or self.batches.fits(len(one), rows)):
            # Blocks of samples, as of fakes and reals, or several rows of a sample side by side.
            own = [
                other.view(-1, world.size, block, 2)[:, world.rank].reshape(-1, 2)
                for block in {rows, len(one)}
                if len(one) % block == 0
            ]
        else:
            return None
        return any(_equal(one, each, equal) for each in own)


def _suspects(drawn: Mapping[int, Drawn], last: int) -> bool:
    """Whether one of the draws until then may have made the difference: one without a single row for each sample."""
    before = (draw for call, draw in drawn.items() if call < last)
    return any(
        draw.name.endswith(BY_GENERATOR) or (not draw.whole and (draw.dim is None or draw.shape[draw.dim] != draw.rows))
        for draw in before
    )


def _sums(x: Tensor) -> Tensor:
    rows = x.reshape(len(x), -1).to("cpu", torch.float64)
    factors = torch.cos(torch.arange(rows.shape[1], dtype=torch.float64))
    return torch.stack([rows @ factors, rows.abs().sum(1)], 1)


def _among(one: Tensor, other: Tensor, equal: float) -> bool:
    """Whether each row is one of the others, as where a network returns rows in an order of its own.

    Not where rows are alike, as those of labels.
    """
    if len(one) > MOST or len(other.unique(dim=0)) < len(other):
        return False
    return torch.cdist(one, other, p=torch.inf).amin(1).max().item() <= equal * other[:, 1].nan_to_num().max().item()


def _equal(one: Tensor, other: Tensor, equal: float) -> bool:
    room = equal * other[:, 1].nan_to_num().max().item()
    return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=room, equal_nan=True)

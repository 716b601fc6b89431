"""The first step is tried twice: by all ranks together, and by each rank as if it were one device. Both must agree.

[Note: the law checks itself]
Any number of ranks must give the training of one device. That is a law for the code of a game too, and a game can
break it: by a statistic of the rank's own samples, a loss that is no mean over samples, a buffer that learns from the
rank's own samples. So, before the first step of a fit, the step is tried on a few samples of each rank. First each
rank plays it with its own samples, as it will in training. Then each rank plays it with the samples of all ranks, as
one device would. Gradients are reduced as in training, because then no weight must be whole anywhere, but nothing is
updated. Losses, the norm of each weight's gradient, buffers and weights must be equal. Then all is put back: buffers,
weights, random states, attributes of modules.
"""

import copy
import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from gan import ranks
from gan.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from nets.norm import unsynchronised
from strategies import random_state
from strategies.micro_batches import rows
from strategies.policies.policy import Policy
from strategies.turn import PhaseContext, gradients

SAMPLES = 2  # of each rank, at least
ROOM = 4  # one device may get so many times its own batch
SHOWN = 6  # differences in the error

# Two numbers are equal if they differ by less than this part of their size: sums in another order are rounded anew.
ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-3}
COARSE = 5e-2  # for bfloat16 and float16
SMALL_NORM, SMALL_BUFFER = 1e-2, 1e-2  # smaller ones are compared as if they had this size: they may be noise


class Different(UserError):
    """The ranks together would not train as one device does. Every rank raises this together."""

    agreed = True


@dataclass
class Tried:
    """What a trial of one step gave on this rank."""

    losses: dict[tuple[str, str], float] = field(default_factory=dict)  # by phase and name
    norms: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)  # of gradients, by phase and player
    state: dict[str, Tensor] = field(default_factory=dict)  # buffers, and weights that were written
    drew: list[str] = field(default_factory=list)  # phases that drew from the global random generators


class Trial:
    """Plays the phases of a step without an update, and notes what they give.

    `alone`: as one device does, with the samples of all ranks. `gather` returns the values of all ranks.
    """

    def __init__(self, gather: Callable[[Any], list[Any]], alone: bool = False) -> None:
        self.gather, self.alone, self.tried = gather, alone, Tried()

    def play(self, phase: Phase, batch: Any, context: PhaseContext) -> None:
        """What `turn.play` does, but without the update, without torch.compile and in full precision."""
        self.meet(f"plays phase '{phase.name}'")
        context = replace(context, precision=_exact(context))
        if any(policy.compiled for policy in context.policies.values()):
            phase = replace(phase, second_order=True)  # then all play eagerly: nothing is compiled for a few samples
        before = random_state.capture()
        with ExitStack() as held:
            if self.alone:
                context = replace(context, number=0, size=1)
                held.enter_context(ranks.alone())
            losses = held.enter_context(gradients(phase, batch, context))
            for learner in (context.policies[name] for name in phase.learners):
                self.tried.norms[phase.name, learner.player.name] = _norms(learner)
                learner.drop_gradients()
        self.tried.losses |= {(phase.name, name): loss.item() for name, loss in losses.items()}
        if not _equal(before, random_state.capture()):
            self.tried.drew.append(phase.name)

    def meet(self, what: str) -> None:
        """Raise if another rank does something else now. In training the ranks would wait for each other."""
        everyone = self.gather(what)
        if len(set(everyone)) > 1:
            parts = "; ".join(f"rank {rank} {each}" for rank, each in enumerate(everyone))
            raise Different(
                f"in the first step the ranks go different ways: {parts}. Which phases are due must not depend on a "
                f"rank's own samples; decide by what all ranks know, e.g. Phase(every=...) or gan.ranks.mean(...)"
            )


def _norms(learner: Policy) -> dict[str, float]:
    norms = learner.finish(1.0).tolist()
    names = list(learner.weights)
    if len(names) != len(norms):
        names = [name for name, weight in learner.weights.items() if weight.grad is not None]
    return dict(zip(names, norms, strict=True))


def _exact(context: PhaseContext) -> Precision:
    """Mixed precision is left out, because it rounds; but weights in bfloat16 (the option bf16) need it."""
    mixed = isinstance(context.precision, MixedPrecision)
    halves = any("bf16" in policy.options for policy in context.policies.values())
    return Precision() if mixed and not halves else context.precision


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return all(map(_equal, one, other))
    return one == other


class Kept:
    """The state of a game, to be put back after a trial."""

    def __init__(self, game: GanModule, policies: Mapping[str, Policy]) -> None:
        self.modules = list(game.modules())
        self.attributes = [dict(vars(module)) for module in self.modules]
        self.buffers = [dict(module._buffers) for module in self.modules]
        self.names = {buffer: f"buffer '{name}'" for name, buffer in game.named_buffers()}
        self.names |= {weight: f"weight '{name}'" for name, weight in game.named_parameters()}
        held = [tensor for policy in policies.values() for tensor in policy.storage.held()]
        everything = [*game.buffers(), *held]
        self.values = {tensor: (tensor.detach().clone(), tensor._version) for tensor in everything}
        self.random = random_state.capture()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside the `with`, modules have copies of their plain attributes. What changes is put back afterwards."""
        known = {id(each): each for module in self.modules for each in (module, *module.parameters(recurse=False))}
        for module, attributes in zip(self.modules, self.attributes, strict=True):
            own = {name: value for name, value in attributes.items() if name not in _LIGHTNINGS and _is_data(value)}
            vars(module).update({name: _copied(value, known) for name, value in own.items()})
        try:
            yield
        finally:
            self._put_back()

    def written(self) -> dict[str, Tensor]:
        """The buffers and weights that were written to since the last `aside` began, by their names."""
        return {
            self.names.get(tensor, "a shard of the weights"): tensor.detach().clone()
            for tensor, (_, version) in self.values.items()
            if tensor._version != version
        }

    @torch.no_grad()
    def _put_back(self) -> None:
        for module, attributes, buffers in zip(self.modules, self.attributes, self.buffers, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, (value, version) in self.values.items():
            if tensor._version != version:
                tensor.copy_(value)
                self.values[tensor] = value, tensor._version
        random_state.restore(self.random)


_LIGHTNINGS = frozenset(vars(GanModule()))  # attributes that every game has
_SAFE = (int, float, str, bytes, type, types.ModuleType, types.FunctionType, types.MethodType)
_LARGE = (nn.Module, nn.Parameter, Dataset, DataLoader)


def _is_data(value: Any) -> bool:
    """Whether a loss may change this object in place, so that the trial must have a copy of it."""
    return value is not None and not isinstance(value, _SAFE + _LARGE)


def _copied(value: Any, known: Mapping[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    try:
        return copy.deepcopy(value, dict(known))
    except Exception:  # noqa: BLE001, an object that cannot be copied stays as it is
        return value


def check_step(
    game: GanModule,
    context: PhaseContext,
    batch: Any,
    trying: Callable[[Trial, Any], None],
    gather: Callable[[Any], list[Any]],
) -> None:
    """Raise if the ranks together would not train as one device does.

    `trying(trial, batch)` plays the step for a trial. `gather` returns the values of all ranks.
    """
    own_rows, everyones = rows(batch), context.size
    few = math.lcm(*(phase.micro_batches for phase in game.phases))
    few *= max(1, min(SAMPLES, own_rows // everyones) // few)
    if few * everyones > ROOM * own_rows:
        rank_zero_warn(
            f"the first step is not checked against one device, which could not hold {few} samples of each of "
            f"{everyones} ranks; check the game once on fewer ranks"
        )
        return
    own = first_rows(batch, few)
    together, alone = Trial(gather), Trial(gather, alone=True)
    kept = Kept(game, context.policies)
    for trial, samples in ((together, own), (alone, joined(gather(own)))):
        with kept.aside():
            vars(game)["log"] = lambda *_, **__: None
            try:
                trying(trial, samples)
            except Exception as error:
                where = f"while the first step was tried on {rows(samples)} samples"
                error.add_note(f"{where}; PhaseStrategy(check=False) leaves that out")
                raise
            trial.meet("has ended the step")
            trial.tried.state = kept.written()

    drew = sorted({name for tried in gather(together.tried.drew) for name in tried})
    if drew:
        rank_zero_warn(
            f"phase {', '.join(map(repr, drew))}: draws from torch's own random generators, other numbers on each "
            f"rank, so it cannot be compared with one device; gan.noise draws the same on any number of ranks"
        )
    rounding = max(
        _rounding(weight) for policy in context.policies.values() for weight in policy.requiring_grad.values()
    )
    found = differences(gather(together.tried.losses), together.tried, alone.tried, rounding, set(drew))
    found = list(dict.fromkeys(text for texts in gather(found) for text in texts))
    if found:
        raise Different(_said(found, few, context))


def differences(
    losses: list[dict[tuple[str, str], float]], together: Tried, alone: Tried, rounding: float, drew: set[str]
) -> list[str]:
    """What is not equal, in words. `losses` are those of each rank, when they played together."""
    found = []
    for (phase, name), one in alone.losses.items():
        each = [rank[phase, name] for rank in losses if (phase, name) in rank]
        if phase in drew or not each:
            continue
        mean, size = sum(each) / len(each), sum(map(abs, each)) / len(each)
        if _apart(mean, one, size, rounding):
            found.append(
                f"phase '{phase}': loss '{name}' is {mean:.6g} on the ranks together, and {one:.6g} on one device"
            )
    for (phase, player), one in alone.norms.items():
        many = together.norms[phase, player]
        size = SMALL_NORM * max([*one.values(), *many.values()], default=0.0)
        for weight in one.keys() | many.keys() if phase not in drew else ():
            norms = many.get(weight, 0.0), one.get(weight, 0.0)
            if _apart(*norms, size, rounding):
                found.append(
                    f"phase '{phase}': the gradient of weight '{weight}' of player '{player}' has norm "
                    f"{norms[0]:.6g} on the ranks together, and {norms[1]:.6g} on one device"
                )
    for name in sorted(together.state.keys() | alone.state.keys()) if not drew else ():
        many, one = together.state.get(name), alone.state.get(name)
        if many is None or one is None:
            found.append(f"{name} is written {'on one device only' if many is None else 'by the ranks together only'}")
        elif (gap := _gap(many, one, rounding)) is not None:
            found.append(f"{name}, which the losses write, differs by {gap:.3g} from that of one device")
    return found


def _gap(many: Tensor, one: Tensor, rounding: float) -> float | None:
    """The largest difference of two tensors, if it is more than rounding."""
    if many.shape != one.shape:
        return math.inf
    if not many.numel() or torch.equal(many, one):
        return None
    many, one = many.double(), one.double()
    gap = (many - one).abs().max().item()
    size = max(many.abs().max().item(), one.abs().max().item(), SMALL_BUFFER)
    return None if gap <= rounding * size else gap


def _apart(many: float, one: float, size: float, rounding: float) -> bool:
    """Whether two numbers differ by more than rounding. Two that are not finite are equal: the guard sees to them."""
    if not (math.isfinite(many) or math.isfinite(one)):
        return False
    return not abs(many - one) <= rounding * max(abs(many), abs(one), size)


def _rounding(weight: Tensor) -> float:
    return ROUNDING.get(weight.dtype, COARSE)


def _said(found: list[str], few: int, context: PhaseContext) -> str:
    """The error: what differs, and what to type."""
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    lines = "".join(f"\n  - {text}" for text in [*found[:SHOWN], *more])
    advice = []
    if any(unsynchronised(policy.player.module) for policy in context.policies.values()):
        advice.append("Synchronise batch norms: Trainer(sync_batchnorm=True).")
    if any(text.startswith("phase") for text in found):
        advice.append(
            "A loss must be a mean over samples. Where it needs a statistic of the batch, take that over all ranks: "
            "gan.ranks.mean(...), gan.ranks.sum(...) or gan.ranks.gather(...)."
        )
    if any(text.startswith(("buffer", "weight", "a shard")) for text in found):
        advice.append("What a forward writes must be the same on all ranks: write gan.ranks.mean(...) of it.")
    return (
        f"tried on {few} samples of each of {context.size} ranks, the first step is not that of one device:{lines}\n"
        f"{' '.join(advice)} To train so all the same, type PhaseStrategy(check=False), or --no-check under gan.fit"
    )


# ---- batches ----


def _has_rows(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size


def first_rows(batch: Any, count: int) -> Any:
    """The first samples of a batch, on the CPU."""
    size = rows(batch)
    return pytree.tree_map(lambda leaf: leaf[:count].cpu() if _has_rows(leaf, size) else leaf, batch)


def joined(batches: list[Any]) -> Any:
    """One batch of the samples of several, in their order."""
    size = rows(batches[0])
    leaves = [pytree.tree_leaves(batch) for batch in batches]
    whole = [
        torch.cat([part[number] for part in leaves]) if _has_rows(leaf, size) else leaf
        for number, leaf in enumerate(leaves[0])
    ]
    return pytree.tree_unflatten(whole, pytree.tree_structure(batches[0]))

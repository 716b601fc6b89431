"""What updates a player's weights: what its functions have made is checked and tried, and its loss may have a scale."""

import copy
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter as Argument
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves, tree_map_only

from gan.files.errors import UserError, explained
from gan.files.values import encode
from gan.phase import MakeOptimizer, Player
from strategies import private
from strategies.advice import type_instead
from strategies.batches.random_state import untouched
from strategies.observers import OwnCollectives
from strategies.sharding.resharded_parameter import resharded
from strategies.sharding.storage import SCALARS, Storage

# Optimizers that treat each element by itself. For them, a step on pieces of weights equals a step on the weights.
ELEMENTWISE = {
    getattr(optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adagrad", "Rprop")
}

STEPS = 20  # some, such as those that warm up, look at other weights after a few steps only
ROUNDING = 1e-6  # of what a weight moves; in float64, so it is far above what another order of sums gives


@dataclass
class Updater:
    """An optimizer of a player's weights. `groups` are the names of the weights in each of its groups."""

    optimizer: Optimizer
    groups: list[list[str]]
    schedule: LRScheduler | None = None
    elementwise: bool = field(init=False)  # whether it can step pieces of weights in place of the weights
    members: list[list[int]] = field(init=False)  # the ids of the weights in each group
    attributes: dict[str, Any] = field(init=False)  # what the optimizer's attributes had when it was made
    made: dict[str, Any] = field(init=False)  # what the player's functions have made: see [Note: made otherwise]
    owned: list[dict[str, list[Any]]] = field(default_factory=list)  # what each group has inside `owning`
    foreign: list[nn.Parameter] = field(default_factory=list)  # weights of which other ranks own all

    def __post_init__(self) -> None:
        self.elementwise = elementwise(self.optimizer) and self.cuttable()
        self.members, self.attributes = self.members_now(), _attributes(self.optimizer)
        groups = [plain_items(group) for group in self.optimizer.param_groups]
        self.made = {"optimizer": _kind(self.optimizer), "groups": groups, "schedule": None, "state": {}}

    def make_schedule(self, player: Player) -> None:
        """Make the player's schedule, if it has one. Refuse what is none, or needs more than the count of updates."""
        if player.schedule is None:
            return
        schedule: Any = player.schedule(self.optimizer)  # an author's function may return anything
        if isinstance(schedule, ReduceLROnPlateau) or not isinstance(schedule, LRScheduler):
            why = "which needs a score" if isinstance(schedule, ReduceLROnPlateau) else "which is no LRScheduler"
            raise UserError(
                f"player '{player.name}': its function for the schedule returned {_kind(schedule)}, {why}; a "
                f"schedule counts updates, e.g. schedule=partial(CosineAnnealingLR, T_max=10_000)"
            )
        self.schedule, per = schedule, player.schedule_per
        kind = _kind(schedule) if per == "update" else f"{_kind(schedule)} per {per}"
        self.made |= {"schedule": kind, "state": plain_items(schedule.state_dict())}

    def cuttable(self) -> bool:
        """Whether each state is of a weight, with tensors of its shape and numbers: as of a training before."""
        members = {id(weight) for group in self.optimizer.param_groups for weight in group["params"]}
        return all(
            id(weight) in members
            and all(
                key in SCALARS or value is None or getattr(value, "shape", None) == weight.shape
                for key, value in values.items()
            )
            for weight, values in self.optimizer.state.items()
        )

    def members_now(self) -> list[list[int]]:
        return [[id(weight) for weight in group["params"]] for group in self.optimizer.param_groups]

    def step_owned(self, storage: Storage) -> None:
        """From now on the optimizer steps what this rank owns of the weights.

        [Note: an author sees whole weights]
        Code of an author reads and writes `optimizer.param_groups` in hooks and between steps, as on one device. So
        they have the author's weights, and what a rank owns only inside `owning`.
        """
        for group, members in zip(self.optimizer.param_groups, self.groups, strict=True):
            own = {key: group[key] for key in ("params", "param_names") if key in group}
            there = [number for number, name in enumerate(members) if name in storage.owned]
            self.owned.append({key: [each[number] for number in there] for key, each in own.items()})
            self.owned[-1]["params"] = [storage.owned[members[number]] for number in there]
        self.foreign = [storage.weights[name] for name in storage.weights.keys() - storage.owned.keys()]
        if storage.owns_pieces:
            self._cut_state(storage)
            self.optimizer.register_state_dict_pre_hook(self._refuse_pieces)
            self.optimizer.register_load_state_dict_post_hook(partial(self._loaded, storage))

    def _cut_state(self, storage: Storage) -> None:
        """Keep this rank's pieces of a state that the author's code has loaded, in which tensors are whole."""
        state = PiecesOfState(dict)
        for name, piece in storage.owned.items():
            weight, start = storage.weights[name], storage.share_of(name, piece.detach()).start
            for key, value in self.optimizer.state.get(weight, {}).items():
                if isinstance(value, Tensor) and key not in SCALARS:
                    value = value.reshape(-1)[start : start + piece.numel()].to(piece.device, copy=True)
                elif isinstance(value, Tensor) and value.device == weight.device:  # torch keeps some on the CPU
                    value = value.to(piece.device)
                state[piece][key] = value
        state.wholes = {id(each): (name, storage.owned.get(name)) for name, each in storage.weights.items()}
        self.optimizer.state = state

    def _loaded(self, storage: Storage, *_: Any) -> None:
        """After load_state_dict: by code between steps, which has whole tensors, or inside `owning` of a checkpoint."""
        if self._has_pieces():
            return
        kind = _kind(self.optimizer)
        if not self.cuttable():
            raise UserError(
                f"load_state_dict() of this {kind} got tensors that do not have the shapes of its weights; give it "
                f"what state_dict() has saved of an optimizer of the same weights"
            )
        if any(piece.dtype != storage.weights[name].dtype for name, piece in storage.owned.items()):
            raise UserError(
                f"load_state_dict() of this {kind} would round its state to the type in which phases compute; call it "
                f"in the function that makes the player's optimizer"
            )
        self._cut_state(storage)

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Inside the `with`, the groups have what this rank owns. See [Note: an author sees whole weights]."""
        state = self.optimizer.state
        for weight in self.foreign:  # code may have touched the states of all weights
            state.pop(weight, None)
        groups = zip(self.optimizer.param_groups, self.owned, strict=False)
        whole = [{key: group[key] for key in own} for group, own in groups]
        try:
            self._fill(self.owned)
            yield
        finally:
            self._fill(whole)
            if isinstance(state, PiecesOfState) and self.optimizer.state is not state:  # a checkpoint was loaded
                state.clear()
                state.update(self.optimizer.state)
                self.optimizer.state = state

    def _has_pieces(self) -> bool:
        """Whether the groups have what this rank owns, inside `owning`."""
        return self.optimizer.param_groups[0]["params"] is self.owned[0]["params"]

    def _refuse_pieces(self, *_: Any) -> None:
        if not self._has_pieces():
            raise UserError(
                f"state_dict() of this {_kind(self.optimizer)} has a rank's pieces of weights; to save them, type "
                f"trainer.save_checkpoint(path) and fit(..., ckpt_path=path); to give an optimizer the moments of "
                f"another one, update each dict of optimizer.state.values(); or type ddp for this player"
            )

    def _fill(self, members: list[dict[str, list[Any]]]) -> None:
        for group, own in zip(self.optimizer.param_groups, members, strict=False):
            group.update(own)

    def check_members(self, player: Player) -> None:
        """Refuse groups that a hook has changed, perhaps by replacing weights."""
        if self.members != self.members_now():
            raise UserError(
                f"player '{player.name}': a hook has changed which weights are in optimizer.param_groups, by which "
                f"ranks and checkpoints know them; make the groups in the player's function for the optimizer, or type "
                f"Player(freeze=...)"
            )


class PiecesOfState(defaultdict):
    """An optimizer's state by this rank's pieces of weights. To ask it for a weight itself is an error.

    Without that, code of an author would find nothing, and pass on without a word. A weight's state may be dropped:
    each rank drops that of its piece.
    """

    wholes: Mapping[int, tuple[str, nn.Parameter | None]] = {}  # the name and the piece of each weight, by its id

    def _checked(self, weight: Any) -> Any:
        if id(weight) not in self.wholes:
            return weight
        name, _ = self.wholes[id(weight)]
        raise UserError(
            f"code uses optimizer.state of weight '{name}', of which this rank's optimizer has a piece; "
            f"optimizer.state.pop(weight, None), optimizer.state.clear(), and what is done to all of "
            f"optimizer.state.values() alike, are right; else type ddp for this player"
        )

    def __getitem__(self, weight: Any) -> Any:
        return super().__getitem__(self._checked(weight))

    def __setitem__(self, weight: Any, value: Any) -> None:
        if id(weight) in self.wholes and not value:
            self.pop(weight)
        else:
            super().__setitem__(self._checked(weight), value)

    def __delitem__(self, weight: Any) -> None:
        self.pop(weight)

    def __contains__(self, weight: object) -> bool:
        return super().__contains__(self._checked(weight))

    def get(self, weight: Any, default: Any = None) -> Any:
        return super().get(self._checked(weight), default)

    def pop(self, weight: Any, default: Any = None) -> Any:
        _, piece = self.wholes.get(id(weight), ("", weight))
        return super().pop(piece, default)


def elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer treats each element by itself. Hooks, and a `step` put in place of its own, may not."""
    return type(optimizer) in ELEMENTWISE and not private.altered(optimizer)


def check_optimizer(player: Player, optimizer: Any, weights: Mapping[str, nn.Parameter], phase: str) -> None:
    """Refuse what is no optimizer of these weights, and what a phase cannot step."""
    what = f"player '{player.name}': its function for the optimizer" + (f" of phase '{phase}'" if phase else "")
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"{what} returned {_kind(optimizer)}; it must return one torch.optim.Optimizer, e.g. "
            f"optimizer=partial(Adam, lr=1e-4), and the schedule is a function of its own: Player(..., schedule=...)"
        )
    own = {id(weight) for weight in weights.values()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        names = {id(p): name for name, p in player.module.named_parameters()}
        name = names.get(id(foreign[0]))
        which = "a parameter that is not the player's" if name is None else f"'{name}', which requires no gradient"
        raise UserError(
            f"{what} took {which} (shape {tuple(foreign[0].shape)}); let it use only the parameters that it is given: "
            f"lambda weights: Adam(weights, lr=1e-4)"
        )
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Argument.empty:
        raise _needs_closure(player, optimizer)
    if isinstance(optimizer, Modes) and player.ema is not None:
        raise UserError(
            f"player '{player.name}': {_kind(optimizer)} keeps an average itself, which its eval() shows; leave ema out"
        )


def _needs_closure(player: Player, optimizer: Any) -> UserError:
    return UserError(
        f"player '{player.name}': {_kind(optimizer)} computes the loss several times in a step, by a closure, and "
        f"a phase computes it once; take an optimizer that needs no closure, e.g. Adam"
    )


@contextmanager
def without_closure(player: Player, optimizer: Any) -> Iterator[None]:
    """Around steps: only there an optimizer shows that it needs a closure, if `step` has a default for it, as SAM's."""
    try:
        yield
    except Exception as error:
        if not _for_want_of_closure(error):
            raise
        raise _needs_closure(player, optimizer) from error


def _for_want_of_closure(error: Exception) -> bool:
    return "closure" in str(error) or "'NoneType' object is not callable" in str(error)


def check_pieces(player: Player, updater: Updater, policy: str) -> None:
    """Refuse an optimizer whose step on pieces of weights may differ from its step on the weights."""
    if not updater.elementwise:
        known, kind = sorted(kind.__name__ for kind in ELEMENTWISE), _kind(updater.optimizer)
        advice = f"use one of {', '.join(known)}"
        if type(updater.optimizer) in ELEMENTWISE:
            kind, advice = f"{kind} with hooks, a `step` or a state of your own", "leave these out"
        elif kind in known:
            kind, advice = f"the {kind} of {type(updater.optimizer).__module__}", f"use torch.optim.{kind}"
        raise UserError(
            f"player '{player.name}': policy '{policy}' cuts weights into pieces, and {kind} may not give "
            f"the same result on pieces as on whole weights; type {type_instead(player.name, 'zero1')}, or {advice}"
        )


def check_unaltered(player: Player, updaters: Iterable[Updater], policy: str) -> None:
    """Refuse what was changed of an optimizer of pieces after `check_pieces`."""
    for updater in updaters:
        if updater.elementwise and not elementwise(updater.optimizer):
            raise UserError(
                f"player '{player.name}': its {_kind(updater.optimizer)} has got a hook or another `step` since it was "
                f"made, and policy '{policy}' cuts weights into pieces; do that in the function that makes it"
            )


def check_saved(player: Player, updaters: Iterable[Updater]) -> None:
    """Refuse, after its first step, an optimizer with a state that a checkpoint would not have."""
    for updater in updaters:
        optimizer = updater.optimizer
        parts = [(name, part) for name, each in vars(optimizer).items() for part in tree_leaves(each)]
        apart = [name for name, part in parts if isinstance(part, Optimizer) and part.state is not optimizer.state]
        saved: Mapping[str, Any] = {}
        # One that has not called super().__init__ lacks what state_dict() reads.
        with updater.owning(), suppress(AttributeError):
            saved = optimizer.state_dict()
        if apart or not {"state", "param_groups"} <= saved.keys():
            what = f"in '{apart[0]}', which has a state of its own" if apart else "in the form of its own state_dict()"
            raise UserError(
                f"player '{player.name}': a checkpoint would not have what {_kind(optimizer)} keeps {what}. If it "
                f"averages weights, give the player the optimizer inside of it, and Player(ema=...), or where the "
                f"weights get it too, as by Lookahead, on_train_batch_end with gathered(write=True); else call "
                f"super().__init__(groups, {{}}) in it, keep what belongs to a weight in self.state[weight], give "
                f"optimizers inside of it the same state (inner.state = self.state), and leave state_dict() as it is"
            )
        beside = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        for kept in (beside, *(each for key, each in optimizer.state.items() if isinstance(key, Tensor))):
            with explained(
                f"player '{player.name}': a checkpoint could not have the state of {_kind(optimizer)}: {{why}}; "
                f"keep an object's tensors and numbers in self.state[weight] themselves",
                UserError,
            ):
                encode(tree_map_only(Tensor, lambda _: None, kept), lambda *_: None)
        now = _attributes(optimizer)
        for name, began in updater.attributes.items():
            if repr(now.get(name, began)) == repr(began):  # nan is not equal to itself
                continue
            what, begins = f"its attribute '{name}', which is", f"with {began} again"
            where = f"self.state['{name}'], read by self.state.get('{name}', {began})"
            if isinstance(began, list):
                what, begins, where = f"tensors in its '{name}', which are", "without them", "self.state[weight]"
            rank_zero_warn(
                f"player '{player.name}': a step of {_kind(optimizer)} changes {what} not in a checkpoint, so a "
                f"resumed run begins {begins}; keep what its steps depend on in {where}"
            )


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Its attributes that are numbers, and no flags; and of others which tensors are in them, written how often."""
    known, found = {id(weight) for group in optimizer.param_groups for weight in group["params"]}, dict[str, Any]()
    for name, value in vars(optimizer).items():
        value = value.item() if type(value) is Tensor and value.numel() == 1 and not value.is_meta else value
        if type(value) in (int, float):
            found[name] = value
        elif isinstance(value, list | dict | Tensor) and name not in ("state", "param_groups", "defaults"):
            tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor) and id(each) not in known]
            found[name] = [(id(each), each._version) for each in tensors]
    return found


def updaters_of(
    player: Player, makers: Mapping[str, MakeOptimizer], weights: Mapping[str, nn.Parameter]
) -> dict[str, Updater]:
    """The optimizers for a player's whole weights. `makers` are its functions by phase, and "" for its own."""
    names, found = {id(weight): name for name, weight in weights.items()}, {}
    for phase, make in makers.items():
        optimizer = make(list(weights.values()))
        check_optimizer(player, optimizer, weights, phase)
        groups = [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]
        found[phase] = Updater(optimizer, groups)
        if len(makers) > 1 and isinstance(optimizer, Modes):
            raise UserError(
                f"player '{player.name}': {_kind(optimizer)} keeps an average itself, and so it must be the only "
                f"optimizer of the player; leave Phase(optimizer=...) out"
            )
    return found


@runtime_checkable
class Modes(Protocol):
    """What the schedule-free optimizers are too. See [Note: two modes] in averages.py."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def _kind(value: Any) -> str:
    return type(value).__name__


def plain_items(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and text of a group or a state, without its weights."""
    others = ((name, value) for name, value in values.items() if name not in ("params", "param_names"))
    numbers = {n: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for n, v in others}  # a rate may be one
    return {name: copy.deepcopy(value) for name, value in numbers.items() if _plain(value)}


def _plain(value: Any) -> bool:
    """Whether it is numbers and text, also in lists and dicts: what a checkpoint can have, and compare."""
    if isinstance(value, list | tuple | dict):
        return all(map(_plain, value.values() if isinstance(value, dict) else value))
    return type(value) in (bool, int, float, str, type(None))


def why_not_apart(make: MakeOptimizer, weights: Mapping[str, nn.Parameter]) -> str | None:
    """Why the weights cannot be stepped apart from each other, on several ranks; None if they can.

    [Note: a trial of the optimizer]
    zero1 may give each rank some of the weights, whole, and a pipeline does. That is exact only if the step on a weight
    does not depend on the other weights, as it would by a norm over all of them. Its class does not say so. So a few of
    the weights are stepped together, and then each of them alone, with the same gradients. The result must be the same.
    Gradients of different sizes make a dependence show. The weights get their values back. Where they have none yet,
    others take their place.
    """
    weights = {
        name: nn.Parameter(torch.ones(weight.shape, dtype=weight.dtype)) if resharded(weight) else weight
        for name, weight in weights.items()
    }
    made = [make(list(weights.values())) for _ in range(2)]
    if made[0] is made[1]:
        return "its function returns the same optimizer twice, and must make a new one each time"
    few: dict[str, nn.Parameter] = {}  # the two smallest weights of each number of dimensions
    for name, weight in sorted(weights.items(), key=lambda pair: pair[1].numel()):
        if weight.numel() and sum(weight.ndim == other.ndim for other in few.values()) < 2:
            few[name] = weight
    before = {name: weight.detach().to(torch.float64, copy=True) for name, weight in few.items()}
    try:
        together = _stepped(make, weights, few, few.keys())
        for name in few:
            for other, value in _stepped(make, weights, few, {name}).items():
                expected = together[name] if other == name else before[other]
                moved = (expected - before[other]).abs().max()
                if not (value - expected).abs().max() <= ROUNDING * moved:
                    return f"its step on weight '{name}' depends on other weights, or on random numbers"
    except _Communicates as error:
        return f"its step calls torch.distributed ({error}), where ranks would meet with different weights"
    except Exception as error:
        if _for_want_of_closure(error):
            raise
        return f"it fails if it has only some of the weights ({type(error).__name__}: {error})"
    return None


class _Communicates(Exception):
    """In a trial all ranks have the same weights, and a collective would tell nothing."""


def _refuse_collective(where: str) -> None:
    raise _Communicates(where)


def _stepped(
    make: MakeOptimizer, weights: Mapping[str, nn.Parameter], few: Mapping[str, nn.Parameter], chosen: Collection[str]
) -> dict[str, Tensor]:
    """The few weights after some steps of an optimizer that has only the chosen ones."""
    before = {weight: weight.data for weight in few.values()}
    kept = {few[name] for name in chosen}
    generator = torch.Generator().manual_seed(0)
    try:
        for weight, value in before.items():
            weight.data = value.to(torch.float64, copy=True)
        # Where collectives are looked for, what is compiled with fullgraph=True fails.
        with untouched(), torch.compiler.set_stance("force_eager"), OwnCollectives(_refuse_collective):
            optimizer = make(list(weights.values()))
            for group in optimizer.param_groups:
                group["params"] = [weight for weight in group["params"] if weight in kept]
            if isinstance(optimizer, Modes):
                optimizer.train()
            for _ in range(STEPS):
                for number, weight in enumerate(few.values()):
                    gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                    weight.grad = gradient.to(weight.device).mul_(10.0**number)
                optimizer.step()
        return {name: weight.detach().clone() for name, weight in few.items()}
    finally:
        for weight, value in before.items():
            weight.data, weight.grad = value, None


@dataclass
class LossScale:
    """The loss scale of one player, for the precision 16-mixed.

    It doubles after `growth_interval` good updates in a row, and halves after a bad one: the constants of torch's
    GradScaler. That belongs to one backward, and here one backward can serve several players, each with a scale of its
    own. `turn.play` looks for gradients that are not finite, because every precision needs that.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    good: int = 0

    def update(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good == self.growth_interval:
            self.scale, self.good = self.scale * 2, 0

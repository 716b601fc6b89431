"""Makes a player's optimizers by its functions, and refuses what cannot be stepped, or saved in a checkpoint."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import Parameter as Argument
from inspect import signature
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from gan.files.errors import UserError, explained
from gan.files.values import encode
from gan.phase import MakeOptimizer, Player
from strategies.advice import type_instead
from strategies.optimizers.updater import ELEMENTWISE, Modes, Updater, attributes_of, elementwise, kind_of


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
                f"player '{player.name}': {kind_of(optimizer)} keeps an average itself, and so it must be the only "
                f"optimizer of the player; leave Phase(optimizer=...) out"
            )
    return found


def check_optimizer(player: Player, optimizer: Any, weights: Mapping[str, nn.Parameter], phase: str) -> None:
    """Refuse what is no optimizer of these weights, and what a phase cannot step."""
    what = f"player '{player.name}': its function for the optimizer" + (f" of phase '{phase}'" if phase else "")
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"{what} returned {kind_of(optimizer)}; it must return one torch.optim.Optimizer, e.g. "
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
            f"player '{player.name}': {kind_of(optimizer)} keeps an average itself, which its eval() shows; leave ema "
            f"out"
        )


def _needs_closure(player: Player, optimizer: Any) -> UserError:
    return UserError(
        f"player '{player.name}': {kind_of(optimizer)} computes the loss several times in a step, by a closure, and "
        f"a phase computes it once; take an optimizer that needs no closure, e.g. Adam"
    )


@contextmanager
def without_closure(player: Player, optimizer: Any) -> Iterator[None]:
    """Around steps: only there an optimizer shows that it needs a closure, if `step` has a default for it, as SAM's."""
    try:
        yield
    except Exception as error:
        if not for_want_of_closure(error):
            raise
        raise _needs_closure(player, optimizer) from error


def for_want_of_closure(error: Exception) -> bool:
    return "closure" in str(error) or "'NoneType' object is not callable" in str(error)


def check_pieces(player: Player, updater: Updater, policy: str) -> None:
    """Refuse an optimizer whose step on pieces of weights may differ from its step on the weights."""
    if not updater.elementwise:
        known, kind = sorted(kind.__name__ for kind in ELEMENTWISE), kind_of(updater.optimizer)
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
                f"player '{player.name}': its {kind_of(updater.optimizer)} has got a hook or another `step` since it "
                f"was made, and policy '{policy}' cuts weights into pieces; do that in the function that makes it"
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
                f"player '{player.name}': a checkpoint would not have what {kind_of(optimizer)} keeps {what}. If it "
                f"averages weights, give the player the optimizer inside of it, and Player(ema=...), or where the "
                f"weights get it too, as by Lookahead, on_train_batch_end with gathered(write=True); else call "
                f"super().__init__(groups, {{}}) in it, keep what belongs to a weight in self.state[weight], give "
                f"optimizers inside of it the same state (inner.state = self.state), and leave state_dict() as it is"
            )
        beside = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        for kept in (beside, *(each for key, each in optimizer.state.items() if isinstance(key, Tensor))):
            with explained(
                f"player '{player.name}': a checkpoint could not have the state of {kind_of(optimizer)}: {{why}}; "
                f"keep an object's tensors and numbers in self.state[weight] themselves",
                UserError,
            ):
                encode(tree_map_only(Tensor, lambda _: None, kept), lambda *_: None)
        now = attributes_of(optimizer)
        for name, began in updater.attributes.items():
            if repr(now.get(name, began)) == repr(began):  # nan is not equal to itself
                continue
            what, begins = f"its attribute '{name}', which is", f"with {began} again"
            where = f"self.state['{name}'], read by self.state.get('{name}', {began})"
            if isinstance(began, list):
                what, begins, where = f"tensors in its '{name}', which are", "without them", "self.state[weight]"
            rank_zero_warn(
                f"player '{player.name}': a step of {kind_of(optimizer)} changes {what} not in a checkpoint, so a "
                f"resumed run begins {begins}; keep what its steps depend on in {where}"
            )

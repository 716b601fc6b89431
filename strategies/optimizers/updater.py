"""An optimizer of a player's weights, whole or in pieces, and the scale of its loss."""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from gan.files.errors import UserError
from gan.phase import Player
from strategies import private
from strategies.sharding.storage import SCALARS, Storage

# Optimizers that treat each element by itself. For them, a step on pieces of weights equals a step on the weights.
ELEMENTWISE = {
    getattr(optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adagrad", "Rprop")
}


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
        self.members, self.attributes = self.members_now(), attributes_of(self.optimizer)
        groups = [plain_items(group) for group in self.optimizer.param_groups]
        self.made = {"optimizer": kind_of(self.optimizer), "groups": groups, "schedule": None, "state": {}}

    def make_schedule(self, player: Player) -> None:
        """Make the player's schedule, if it has one. Refuse what is none, or needs more than the count of updates."""
        if player.schedule is None:
            return
        schedule: Any = player.schedule(self.optimizer)  # an author's function may return anything
        if isinstance(schedule, ReduceLROnPlateau) or not isinstance(schedule, LRScheduler):
            why = "which needs a score" if isinstance(schedule, ReduceLROnPlateau) else "which is no LRScheduler"
            raise UserError(
                f"player '{player.name}': its function for the schedule returned {kind_of(schedule)}, {why}; a "
                f"schedule counts updates, e.g. schedule=partial(CosineAnnealingLR, T_max=10_000)"
            )
        self.schedule, per = schedule, player.schedule_per
        kind = kind_of(schedule) if per == "update" else f"{kind_of(schedule)} per {per}"
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
        kind = kind_of(self.optimizer)
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
                f"state_dict() of this {kind_of(self.optimizer)} has a rank's pieces of weights; to save them, type "
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


@runtime_checkable
class Modes(Protocol):
    """What the schedule-free optimizers are too. See [Note: two modes] in averages.py."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer treats each element by itself. Hooks, and a `step` put in place of its own, may not."""
    return type(optimizer) in ELEMENTWISE and not private.altered(optimizer)


def kind_of(value: Any) -> str:
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


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
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

"""What a game is made of, as plain data: players and phases."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gan.errors import UserError

Losses = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Player:
    """A network, and how it is trained.

    - `optimizer`: a function that makes the optimizer from parameters, e.g. `partial(Adam, lr=2e-4)`. It is a
      function, because only the strategy knows which tensors a rank owns. A player without an optimizer is frozen.
    - `schedule`: a function that makes a learning rate schedule from the optimizer. It counts updates of the player.
    - `ema`: the decay of a moving average of the weights. Validation and samples use the averaged weights.
    - `clip`: the largest norm of the player's whole gradient.
    - `blocks`: names of sub-modules, as in `named_modules()`, that the option `recompute` computes again one by one.
      Without them it chooses blocks itself.
    """

    name: str
    module: nn.Module
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    ema: float | None = None
    clip: float | None = None
    blocks: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise UserError(f"player '{self.name}': expected a torch.nn.Module, got {type(self.module).__name__}")
        if self.frozen and (self.schedule or self.ema is not None or self.clip is not None):
            raise UserError(
                f"player '{self.name}' has no optimizer, so it is frozen and takes no schedule, ema or clip; "
                f"give it one, e.g. optimizer=partial(Adam, lr=1e-4)"
            )
        if self.ema is not None and not 0 <= self.ema < 1:
            raise UserError(f"player '{self.name}': ema={self.ema} is not in [0, 1); try ema=0.999")
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"player '{self.name}': clip={self.clip} is not above 0; try clip=1.0")
        known = [name for name, _ in self.module.named_modules()]
        unknown = [name for name in self.blocks or () if name not in known]
        if unknown:
            raise UserError(
                f"player '{self.name}': its {type(self.module).__name__} has no module '{unknown[0]}' to be a block; "
                f"known are {', '.join(filter(None, known))}"
            )

    @property
    def frozen(self) -> bool:
        return self.optimizer is None


@dataclass(frozen=True)
class Phase:
    """One turn of the game: who learns, from which loss, and how often.

    - `loss`: takes a batch and returns a scalar, or a dict of named scalars, which are summed and logged by name.
    - `learners`: the names of the players that learn. Each one makes one update at the end of the phase.
    - `every`: play the phase in the steps that are divisible by this number.
    - `micro_batches`: split each rank's batch into this many equal parts, and average their gradients. Of M parts, part
      k has the rows k, k + M, k + 2 M and so on.
    - `second_order`: say True if the loss differentiates a gradient (R1, WGAN-GP). A policy that shards weights then
      keeps them gathered for the second backward.
    """

    name: str
    loss: Callable[[Any], Losses]
    learners: str | Sequence[str]
    every: int = 1
    micro_batches: int = 1
    second_order: bool = False

    def __post_init__(self) -> None:
        learners = (self.learners,) if isinstance(self.learners, str) else tuple(self.learners)
        object.__setattr__(self, "learners", learners)
        for field in ("every", "micro_batches"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"phase '{self.name}': {field}={value!r} must be a whole number, 1 or more")

    def due(self, step: int) -> bool:
        return step % self.every == 0


def check_game(players: Sequence[Player], phases: Sequence[Phase]) -> None:
    """Refuse a game whose players and phases do not fit together, before anything is trained."""
    known = [player.name for player in players]
    for kind, names in (("player", known), ("phase", [phase.name for phase in phases])):
        if not names:
            raise UserError(f"the game has no {kind}; yield one from configure_{kind}s()")
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two {kind}s are called '{name}'; give each a name of its own")

    # A parameter belongs to one player at most.
    owner: dict[int, tuple[str, str]] = {}
    for player in players:
        for name, parameter in player.module.named_parameters():
            other, other_name = owner.setdefault(id(parameter), (player.name, name))
            if other != player.name:
                raise UserError(
                    f"parameter '{name}' of player '{player.name}' is also '{other_name}' of player '{other}'; "
                    f"a parameter belongs to one player: make one player of both networks, or share no layer"
                )
        trainable = any(parameter.requires_grad for parameter in player.module.parameters())
        if not player.frozen and not trainable:
            raise UserError(
                f"player '{player.name}' has an optimizer but no parameter that requires a gradient; "
                f"leave optimizer out to freeze it"
            )

    # A phase's learners are players that can learn.
    frozen = {player.name for player in players if player.frozen}
    for phase in phases:
        if not phase.learners:
            raise UserError(f"phase '{phase.name}' has no learners; name one of: {', '.join(known)}")
        for name in phase.learners:
            if name not in known:
                raise UserError(f"phase '{phase.name}': unknown learner '{name}'; known: {', '.join(known)}")
            if name in frozen:
                raise UserError(f"phase '{phase.name}': learner '{name}' is frozen; give it an optimizer")
            if phase.learners.count(name) > 1:
                raise UserError(f"phase '{phase.name}' names learner '{name}' twice")

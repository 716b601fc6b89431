"""What a game is made of, as plain data: players and phases. Nothing here knows of devices."""

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
    """A sub-network and the recipe of its training.

    `optimizer` and `schedule` are recipes, called with the parameters and with the optimizer, because only
    the strategy knows which tensors a rank owns. A player without an optimizer is frozen. `schedule` counts
    updates of its player; `ema` is the decay of an average of the weights, used for samples and validation;
    `clip` bounds the norm of the player's whole gradient. `blocks` names sub-modules, as named_modules() does, that a
    strategy may treat one by one where it would otherwise cut the network itself: with the option `recompute`.
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
        """Whether the player never learns."""
        return self.optimizer is None


@dataclass(frozen=True)
class Phase:
    """One turn of the game: who learns, from which loss, how often.

    `loss` takes a batch and returns a scalar, or named scalars that are summed. The phase is due when
    `step % every == 0`. The rank's batch is cut into `micro_batches` equal chunks whose gradients are
    averaged. `second_order` says that the loss differentiates a gradient, so that a policy which shards
    weights keeps them together for the second pass. A phase ends with one update of each learner.
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
        """Whether this phase is played in the given step; every phase is due at step 0."""
        return step % self.every == 0


def check_game(players: Sequence[Player], phases: Sequence[Phase]) -> None:
    """Refuse, before anything is trained, a game that does not hold together; the error names the culprit."""
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

    # A phase teaches players who can learn.
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

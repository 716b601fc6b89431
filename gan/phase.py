"""What a game is made of, as plain data: players and phases."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gan.files.errors import UserError

Losses = Tensor | Mapping[str, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Player:
    """A network, and how it is trained.

    - `optimizer`: a function that makes the optimizer from parameters, e.g. `partial(Adam, lr=2e-4)`. It is a
      function, because only the strategy knows which tensors a rank owns. A player without an optimizer is frozen.
    - `schedule`: a function that makes a learning rate schedule from the optimizer. It counts updates of the player, or
      with `schedule_per="step"` or `"epoch"` steps of the game or epochs.
    - `ema`: the decay of a moving average of the weights, or a function that returns the decay and gets how often the
      average was updated before, e.g. `lambda n: min(0.999, (1 + n) / (10 + n))`. Validation and samples use the
      averaged weights. The average is updated after each update of the player, or with `ema_per="step"` after each
      step of the game, also if the player has not learned in it. With `ema_buffers="averaged"` buffers of
      floating-point numbers, such as running statistics, are averaged too; else averaged weights are used with the
      buffers of training, "copied".
    - `clip`: the largest norm of the player's whole gradient.
    - `blocks`: names of sub-modules, as in `named_modules()`. The option `recompute` computes them again one by one,
      `fsdp` gathers them one by one, and `pipeline` cuts between them. Without `blocks` they are found.
    - `after`: a function that gets the module after each update, e.g. to clip weights or to give them a norm. All
      weights are whole then, under every policy, and what it writes to them is kept. It is called without gradients, on
      every rank, and must write the same on all of them. Averages see what it has written.
    - `follows`: the name of another player, whose moving average this one is, with the decay `ema`. It has the same
      network and `blocks`, and no optimizer, and losses may use it. When training begins it is a copy of the other
      player, and so are its buffers after each update of the average, unless they are averaged. Its `ema_per` counts
      the updates of the other player.
    - `freeze`: a function that gets the step and returns the names of sub-modules, as in `named_modules()`, that do not
      learn in this step, e.g. `lambda step: ["encoder"] if step < 1000 else []`. Their optimizer state stays as it is.
    - `saved`: False leaves the weights of a frozen player out of checkpoints. The game's constructor must make the same
      weights again, e.g. load them from a file; a resumed run checks that. Its buffers are saved.
    - `weights`: a safetensors file from which the player begins, or an index of several (`*.safetensors.index.json`),
      or a folder that has one of them. Its names are those of the module's `state_dict()`. Each rank reads only what it
      keeps. A learner's file is read once: what it has learned stays, and a checkpoint's values come before it. The
      weights of a frozen player are left out of checkpoints: these have the path, and a digest of the file, and a
      resumed run checks that it has not changed.

    A network that is too large for one device is made on `torch.device("meta")`, where weights need no memory. They
    come from `weights`, or each module's `reset_parameters()` makes them (see gan/making.py). Under `zero3`, `fsdp` and
    `pipeline` no rank has all of them at once.

    The module may be a part of a network, or some parameters of one: `nn.ParameterList(adapters)`. A parameter learns
    in one player only. One that does not learn may belong to several players (see `parameters_of`).
    """

    name: str
    module: nn.Module
    optimizer: MakeOptimizer | None = None
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    ema: float | Callable[[int], float] | None = None
    clip: float | None = None
    blocks: Sequence[str] | None = None
    freeze: Callable[[int], str | Iterable[str]] | None = None
    ema_per: str = "update"
    schedule_per: str = "update"
    after: Callable[[nn.Module], object] | None = None
    follows: str | None = None
    saved: bool = True
    weights: str | PathLike[str] | None = None
    ema_buffers: str = "copied"

    def __post_init__(self) -> None:
        _check("player", self, OF_PLAYERS)
        words = {"ema_per": "update step", "ema_buffers": "copied averaged", "schedule_per": "update step epoch"}
        for field, known in ((field, each.split()) for field, each in words.items()):
            own, of = getattr(self, field), field.partition("_")[0]
            if own not in known:
                raise UserError(
                    f"player '{self.name}': {field}={own!r} is not known; type one of {', '.join(map(repr, known))}"
                )
            if own != known[0] and getattr(self, of) is None:
                raise UserError(f"player '{self.name}' has {field}={own!r} and no {of}; add {of}=..., or leave it out")
        known = [name for name, _ in self.module.named_modules()]
        for name in self.blocks or ():
            if name not in known:
                raise UserError(
                    f"player '{self.name}': its {type(self.module).__name__} has no module '{name}' to be a block; "
                    f"known are {', '.join(filter(None, known))}"
                )

    @property
    def frozen(self) -> bool:
        return self.optimizer is None

    def decay(self, updates: int) -> float:
        """The decay of the average's next update, after so many."""
        assert self.ema is not None
        if not callable(self.ema):
            return self.ema
        decay = float(self.ema(updates))
        if not 0 <= decay <= 1:
            raise UserError(f"player '{self.name}': ema({updates}) returned {decay}, which is not in [0, 1]")
        return decay


@dataclass(frozen=True)
class Phase:
    """One turn of the game: who learns, from which loss, and how often.

    - `loss`: takes a batch and returns a scalar, or a dict of named scalars, which are summed and logged by name.
    - `learners`: the names of the players that learn. Each one makes one update at the end of the phase.
    - `every`: play the phase once in so many steps, counted from `start`.
    - `start`, `until`: play it from step `start` on, and before step `until`.
    - `when`: a function without arguments that says whether to play it, e.g. `lambda: self.strength > 0`. It is asked
      only in steps in which the phase is due otherwise. All ranks are asked, so it may call `gan.ranks`; all do what
      the first rank says.
    - `update`: the same, asked after the losses and on_before_optimizer_step. It says whether the learners take the
      update, e.g. `lambda: self.accuracy < 0.8`, where published code calls `optimizer.step()` inside an `if`.
    - `micro_batches`: split each rank's batch into this many equal parts, and average their gradients. Of M parts, part
      k has the rows k, k + M, k + 2 M and so on. What the loss keeps for a hook, `when`, `update` or a later phase,
      such as gradients or a mean, is that of the last part: add it up.
    - `second_order`: say True if the loss differentiates a gradient (R1, WGAN-GP, torch.func.grad). A policy that
      shards weights then keeps them gathered for the second backward.
    - `draws`: "samples" lets what torch draws in the loss (torch.randn, nn.Dropout) follow the sample, as gan.noise
      does. With "torch" each rank draws other numbers from torch's own generator.
    - `optimizer`: a function as a player's has. In this phase each learner is updated by an optimizer of its own that
      the function makes, as by InfoGAN's `optimizer_info`. The learner's `schedule` makes a schedule for it too.
    """

    name: str
    loss: Callable[[Any], Losses]
    learners: str | Sequence[str]
    every: int = 1
    micro_batches: int = 1
    second_order: bool = False
    start: int = 0
    until: int | None = None
    when: Callable[[], bool] | None = None
    update: Callable[[], bool] | None = None
    draws: Literal["samples", "torch"] = "samples"
    optimizer: MakeOptimizer | None = None

    def __post_init__(self) -> None:
        learners = (self.learners,) if isinstance(self.learners, str | nn.Module) else tuple(self.learners)
        object.__setattr__(self, "learners", learners)
        _check("phase", self, OF_PHASES)

    def due(self, step: int, ask: "Callable[[Phase], bool] | None" = None) -> bool:
        """Whether the phase is played in this step. `ask` calls `when`: a strategy asks the first rank for all."""
        if step < self.start or (self.until is not None and step >= self.until) or (step - self.start) % self.every:
            return False
        return self.when is None or bool(self.when() if ask is None else ask(self))


# What may be wrong with a setting: the words after the name, and when they are said.
OF_PLAYERS = {
    ": expected a torch.nn.Module, got {p.module.__class__.__name__}": lambda p: not isinstance(p.module, nn.Module),
    ": its network is wrapped in {p.module.__class__.__name__}; leave that out, because strategies do its "
    "work": lambda p: isinstance(p.module, nn.DataParallel | DistributedDataParallel),
    ": optimizer={p.optimizer.__class__.__name__}(...) is made already; give what makes it: "
    "optimizer=partial({p.optimizer.__class__.__name__}, lr=1e-4)": lambda p: (
        not (p.optimizer is None or callable(p.optimizer))
    ),
    ": schedule={p.schedule.__class__.__name__}(...) is made already; give what makes it: "
    "schedule=partial({p.schedule.__class__.__name__}, ...)": lambda p: (
        not (p.schedule is None or callable(p.schedule))
    ),
    " follows '{p.follows}', so it has a decay and no optimizer; type Player('{p.name}', ..., follows='{p.follows}', "
    "ema=0.99)": lambda p: p.follows is not None and (p.optimizer is not None or p.ema is None),
    " has no optimizer, so it is frozen and takes no schedule, ema, clip, after or freeze; give it one, e.g. "
    "optimizer=partial(Adam, lr=1e-4)": lambda p: (
        p.frozen and [p.schedule, p.clip, p.after, p.freeze, None if p.follows else p.ema] != [None] * 5
    ),
    " changes in training, so its weights must be in checkpoints; leave saved=False out, which is for frozen "
    "players": lambda p: not p.saved and not (p.frozen and p.follows is None),
    ": weights={p.weights.__class__.__name__} must be the path of a safetensors file; type "
    "weights='model.safetensors'": lambda p: not isinstance(p.weights, str | PathLike | None),
    " begins as a copy of '{p.follows}', which it follows; give the weights to that one: Player('{p.follows}', ..., "
    "weights='{p.weights}')": lambda p: p.weights is not None and p.follows is not None,
    ": ema={p.ema} is not in [0, 1); try ema=0.999": lambda p: not (p.ema is None or callable(p.ema) or 0 <= p.ema < 1),
    ": clip={p.clip} is not above 0; try clip=1.0": lambda p: p.clip is not None and not p.clip > 0,
    ": freeze={p.freeze!r} must be a function of the step; type freeze=lambda step: {p.freeze!r}": lambda p: (
        not (p.freeze is None or callable(p.freeze))
    ),
}
OF_PHASES = {
    ": its learners are names of players; type learners='generator', and no network": lambda p: (
        not all(isinstance(each, str) for each in p.learners)
    ),
    ": its loss is a {p.loss.__class__.__name__} and no function of the batch; give the method and do not call it, "
    "such as self.judge": lambda p: not callable(p.loss),
    ": every={p.every!r} must be a whole number, 1 or more": lambda p: not _whole(p.every, 1),
    ": micro_batches={p.micro_batches!r} must be a whole number, 1 or more": lambda p: not _whole(p.micro_batches, 1),
    ": start={p.start!r} must be a whole number, 0 or more": lambda p: not _whole(p.start, 0),
    ": until={p.until!r} must be a whole number above start={p.start}, or the phase is never played": lambda p: (
        not (p.until is None or _whole(p.until, p.start + 1))
    ),
    ": draws={p.draws!r} is not known; type draws='samples' or 'torch'": lambda p: p.draws not in ("samples", "torch"),
    ": optimizer={p.optimizer!r} must be a function of weights; type optimizer=partial(Adam, lr=1e-4)": lambda p: (
        not (p.optimizer is None or callable(p.optimizer))
    ),
    ": when={p.when!r} must be a function without arguments; type when=lambda: {p.when!r}": lambda p: (
        not (p.when is None or callable(p.when))
    ),
    ": update={p.update!r} must be a function without arguments; type update=lambda: {p.update!r}": lambda p: (
        not (p.update is None or callable(p.update))
    ),
}


def _check(kind: str, one: Player | Phase, mistakes: Mapping[str, Callable[[Any], bool]]) -> None:
    if not isinstance(one.name, str):
        raise UserError(f"a {kind}'s name comes first: type {kind.title()}('generator', ...)")
    for words, made in mistakes.items():
        if made(one):
            raise UserError(f"{kind} '{one.name}'{words.format(p=one)}")


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and value >= least


def check_game(players: Sequence[Player], phases: Sequence[Phase]) -> None:
    """Refuse a game whose players and phases do not fit together, before anything is trained."""
    for kind, found, wanted in (("player", players, Player), ("phase", phases, Phase)):
        for one in found:
            if not isinstance(one, wanted):
                raise UserError(f"configure_{kind}s() gives a {type(one).__name__}; yield {wanted.__name__}(...)s")
        names = [one.name for one in found]
        if not names:
            raise UserError(
                f"the game has no {kind}; yield one from configure_{kind}s(), which reads no attribute "
                f"called {kind}s: that is the game's own"
            )
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two {kind}s are called '{name}'; give each a name of its own")

    for player in players:
        if not player.frozen and not any(parameter.requires_grad for parameter in player.module.parameters()):
            raise UserError(
                f"player '{player.name}' has an optimizer but no parameter that requires a gradient; "
                f"leave optimizer out to freeze it"
            )

    # A player follows one that can learn and has the same network.
    known, named = [player.name for player in players], {player.name: player for player in players}
    followers: list[tuple[Player, Player]] = []
    for player in players:
        if player.follows is None:
            continue
        followed = named.get(player.follows)
        if followed is None or followed.frozen:
            learning = [name for name, each in named.items() if not each.frozen]
            raise UserError(
                f"player '{player.name}' follows '{player.follows}', which is no player with an optimizer; known are "
                f"{', '.join(learning)}"
            )
        _check_alike(player, followed)
        followers.append((player, followed))
    own = parameters_of(players)
    for player, followed in followers:
        _check_shared(player, followed, own)

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


def parameters_of(players: Sequence[Player]) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters that each player stores, by their names. Each parameter of the game is stored by one player.

    It is the player that changes it, by learning or by following. If no player changes it, then it is the first player
    that has it, whoever else reads it.
    """
    named = {player.name: player for player in players}
    changing: dict[int, tuple[str, str]] = {}  # by parameter: the player that changes it, and its name there
    for player in players:
        followed = named[player.follows].module.parameters() if player.follows is not None else ()
        still = {id(parameter) for parameter in followed}  # what both have is not averaged
        for name, parameter in player.module.named_parameters():
            learns = parameter.requires_grad and not player.frozen
            if not learns and (player.follows is None or id(parameter) in still):
                continue
            other, other_name = changing.setdefault(id(parameter), (player.name, name))
            if other != player.name:
                raise UserError(
                    f"parameter '{name}' of player '{player.name}' is also '{other_name}' of player '{other}', and a "
                    f"parameter learns in one player only; make one player of both networks, share no layer, or "
                    f"freeze what they share in the game's __init__, by requires_grad_(False)"
                )

    owner = {key: name for key, (name, _) in changing.items()}
    for player in sorted(players, key=lambda player: player.follows is not None):
        for parameter in player.module.parameters():
            owner.setdefault(id(parameter), player.name)
    return {one.name: {n: p for n, p in one.module.named_parameters() if owner[id(p)] == one.name} for one in players}


def _check_shared(player: Player, followed: Player, own: Mapping[str, Mapping[str, nn.Parameter]]) -> None:
    """Raise if a player cannot follow another one, because of what the two share with each other or with a third."""
    others = dict(followed.module.named_parameters())
    shared = {name for name, parameter in player.module.named_parameters() if parameter is others[name]}
    who = f"player '{player.name}' follows '{followed.name}'"
    for name, other in others.items():
        if name in shared and other.requires_grad:
            raise UserError(f"{who}, and both have the same parameter '{name}', which learns; copy it for one of them")
        if name not in shared and not other.requires_grad and (shared or name not in own[followed.name]):
            raise UserError(
                f"{who}, which shares frozen parameters, and '{name}' is a copy in '{player.name}'; let both have all "
                f"the same ones: copy.deepcopy(network, {{id(p): p for p in frozen}})"
            )


def _check_alike(player: Player, followed: Player) -> None:
    """Raise if two networks differ in the names or shapes of their parameters or buffers."""
    for kind in ("parameter", "buffer"):
        own, other = (dict(getattr(each.module, f"named_{kind}s")()) for each in (player, followed))
        for name in {**own, **other}:
            there = [f"of shape {tuple(each[name].shape)}" if name in each else "none" for each in (own, other)]
            if there[0] != there[1]:
                raise UserError(
                    f"player '{player.name}' follows '{followed.name}', and {kind} '{name}' is {there[0]} in "
                    f"'{player.name}' and {there[1]} in '{followed.name}'; give both the same network, e.g. "
                    f"copy.deepcopy(...)"
                )

"""The state of a game in a checkpoint. Each rank saves and loads the part that it owns."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from lightning import Trainer
from torch import Tensor, nn

from gan.files.checkpoint import Share, averages_of, load_module_state
from gan.files.contents import KINDS, alike, need
from gan.files.errors import UserError
from gan.files.finite import Bad, NotFinite, as_made, named, not_finite
from gan.files.tensors import Damaged
from gan.module import GanModule
from gan.phase import Player
from gan.pool import ImagePool
from strategies.checkpoint.left_out import LeftOut
from strategies.checkpoint.player_state import (
    average_state,
    load_average,
    load_optimizer_state,
    load_training_state,
    training_state,
)
from strategies.checkpoint.writing import SavingRanks
from strategies.policies.policy import Policy


class FiniteWeights:
    """Made while buffers are as the constructor made them."""

    def __init__(self, game: GanModule, players: Mapping[str, Player]) -> None:
        self.game, self.players = game, players
        self.meant = as_made(game)

    def bad(self, state: Mapping[str, Any], averages: Mapping[str, Mapping[str, Share] | None]) -> list[Bad]:
        """What is not finite in this rank's shares of the weights and the averages."""
        owners: dict[int, tuple[str, str]] = {}
        for player in self.players.values():
            for name, value in player.module.state_dict(keep_vars=True).items():
                owners.setdefault(id(value), (player.name, name))
        places: dict[str, tuple[str, str]] = {}
        shares: dict[str, Tensor] = {}
        for name, value in self.game.state_dict(keep_vars=True).items():
            if id(value) in owners and name not in self.meant and isinstance(state.get(name), Share):
                places[name], shares[name] = owners[id(value)], state[name].tensor
        for player, average in averages.items():
            for name, share in (average or {}).items():
                key = f"average/{player}/{name}"
                places[key], shares[key] = (player, f"{name} (its moving average)"), share.tensor
        return [(*places[key], what) for key, what in not_finite(shares).items()]


Policies = Mapping[str, Policy]


def networks_state(
    game: GanModule,
    policies: Policies,
    first: bool,
    left_out: LeftOut,
) -> dict[str, Any]:
    """This rank's shares of the weights, and the other state of the modules."""
    return module_state(game, _shares(policies), first, left_out.parameters.values())


def game_state(game: GanModule, policies: Policies, left_out: LeftOut) -> dict[str, Any]:
    """What a checkpoint holds in addition to weights and optimizers."""
    return {
        "game": type(game).__name__,
        "left_out": left_out.checksums,
        "files": left_out.files,
        "players": {name: training_state(policy) for name, policy in policies.items()},
    }


def load_networks(
    game: GanModule,
    policies: Policies,
    checkpoint: Mapping[str, Any],
    strict: bool,
    ranks: SavingRanks,
    left_out: LeftOut,
    finite: FiniteWeights,
) -> None:
    """Check that the checkpoint is of this game, then load weights and averages. Each rank reads what it owns.

    Weights that are not finite are refused: no optimizer can mend them.
    """
    name, saved = type(game).__name__, list(checkpoint.get("players", ()))
    if checkpoint.get("game") != name or saved != list(policies):
        raise UserError(
            f"the checkpoint is of {checkpoint.get('game', 'another program')} with players "
            f"{', '.join(saved) or 'unknown'}; this game is {name} with players {', '.join(policies)}"
        )

    if strict:
        left_out.check(game, checkpoint, _shares(policies), ranks)
    state = {key: value for key, value in checkpoint["state_dict"].items() if key not in left_out.parameters}

    def load_weights() -> None:
        try:
            load_module_state(game, state, _shares(policies), strict, left_out.parameters)
        except RuntimeError as error:
            raise UserError(
                f"the checkpoint's networks are of other sizes than this run's; resume with the settings it was "
                f"trained with. {error}"
            ) from error

    def load_averages() -> None:
        for name, policy in policies.items():
            load_average(policy, averages_of(checkpoint, name))

    ranks.each(load_weights)
    for policy in policies.values():
        policy.storage.shards_changed()
        policy.storage.reshard()

    def not_finite() -> list[Bad]:
        loaded = module_state(game, _shares(policies), True, left_out.parameters.values())
        return finite.bad(loaded, {name: _average(policy) for name, policy in policies.items()})

    ranks.each(load_averages)
    if found := list(dict.fromkeys(each for bad in ranks.each(not_finite) for each in bad)):
        raise NotFinite(f"the checkpoint cannot be used: {named(found)}; take an earlier one")


def load_training(policies: Policies, checkpoint: Mapping[str, Any], ranks: SavingRanks) -> None:
    """Load optimizers, loss scales and counts of updates."""
    learners = [policy for policy in policies.values() if policy.optimizer is not None]

    def load_optimizers() -> None:
        if len(learners) != len(checkpoint["optimizer_states"]):
            raise UserError(
                f"the checkpoint has {len(checkpoint['optimizer_states'])} optimizers, and this run {len(learners)}; "
                f"resume with the settings it was trained with"
            )
        for policy, state in zip(learners, checkpoint["optimizer_states"], strict=True):
            load_optimizer_state(policy, state)

    ranks.each(load_optimizers)
    for name, policy in policies.items():
        load_training_state(policy, checkpoint["players"][name])


def _average(policy: Policy) -> dict[str, Share] | None:
    return None if policy.ema is None else average_state(policy)


def _shares(policies: Policies) -> dict[nn.Parameter, Share | None]:
    return {weight: share for policy in policies.values() for weight, share in policy.storage.shares().items()}


def module_state(
    module: nn.Module,
    shares: Mapping[Tensor, Share | None],
    first: bool,
    left_out: Collection[nn.Parameter] = (),
) -> dict[str, Any]:
    """This rank's part of a module's state dict. A tensor that has two names is saved under the first.

    `shares` has this rank's share of each sharded parameter. Buffers, such as running statistics, are saved by the
    first rank only. Parameters in `left_out` are not saved. Image pools differ between ranks, so each rank saves its
    own images.
    """
    state: dict[str, Any] = {}
    parameters, seen = set(module.parameters()), set(map(id, left_out))
    for key, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            state[key] = value
        elif id(value) not in seen and (first or value in parameters):
            share = shares[value] if value in shares else Share.whole(value)
            if share is not None:
                state[key] = share
        seen.add(id(value))
    for name, pool in module.named_modules():
        if isinstance(pool, ImagePool):
            state[f"{name}._extra_state" if name else "_extra_state"] = {
                place: {number: Share.whole(image) for number, image in images.items()}
                for place, images in pool.get_extra_state().items()
            }
    return state


NEEDED = ("state_dict", "players", "loops", "callbacks", "lr_schedulers", "random_states", "seed", "global_step")
PROGRESS = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.manual_optimization.optim_step_progress")


def check_training(tree: Mapping[str, Any], trainer: Trainer) -> None:
    """Raise if it is not so. Otherwise a training would begin at step 0 in silence, or end somewhere in Lightning."""
    if "state_dict" in tree and "optimizer_states" not in tree:
        raise UserError("it has weights only, with which no training goes on; give one that has all")
    for name in NEEDED:
        need(tree, name, KINDS[name])
    loop, own = need(tree["loops"], "fit_loop", dict, "loops/"), trainer.fit_loop.state_dict()
    alike(own, loop, "loops/fit_loop")
    for name in PROGRESS:
        alike(own[name], need(loop, name, dict, "loops/fit_loop/"), f"loops/fit_loop/{name}", whole=True)
    loaders = need(loop, "state_dict", dict, "loops/fit_loop/").get("combined_loader", [])
    alike([], loaders, "loops/fit_loop/state_dict/combined_loader")
    _check_all((state for state in loaders if state is not None), "loops/fit_loop/state_dict/combined_loader")
    for number, state in enumerate(tree["optimizer_states"]):
        _check_optimizer(state, f"optimizer_states/{number}/")
    for number, (config, state) in enumerate(zip(trainer.lr_scheduler_configs, tree["lr_schedulers"], strict=False)):
        alike(config.scheduler.state_dict(), state, f"lr_schedulers/{number}")
    _check_all(tree["random_states"], "random_states")


def _check_optimizer(state: Any, where: str) -> None:
    _check_all([state], where)
    _check_all(need(state, "state", dict, where).values(), f"{where}state")
    groups = need(state, "param_groups", list, where)
    _check_all(groups, f"{where}param_groups")
    for group in groups:
        need(group, "params", list, f"{where}param_groups/")


def _check_all(states: Iterable[Any], where: str) -> None:
    if not all(isinstance(state, dict) for state in states):
        raise Damaged(f"values.pt is damaged: '{where.removesuffix('/')}' has what is not a dict")

"""The state of a game in a checkpoint. Each rank saves and loads the part that it owns."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from gan.checkpoint import Share, averages_of, load_module_state
from gan.errors import UserError
from gan.finite import Bad, NotFinite, named
from gan.module import GanModule
from gan.pool import ImagePool
from strategies.checkpoint.finite import FiniteWeights
from strategies.checkpoint.left_out import LeftOut
from strategies.checkpoint.module_state import module_state
from strategies.checkpoint.player_state import (
    average_state,
    load_average,
    load_optimizer_state,
    load_training_state,
    training_state,
)
from strategies.checkpoint.ranks import SavingRanks
from strategies.policies.policy import Policy

Policies = Mapping[str, Policy]


def networks_state(
    game: GanModule,
    policies: Policies,
    first: bool,
    slots: Callable[[ImagePool], dict[int, dict[int, Tensor]]],
    left_out: LeftOut,
) -> dict[str, Any]:
    """This rank's shares of the weights, and the other state of the modules."""
    return module_state(game, _shares(policies), first, slots, left_out.parameters.values())


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
        loaded = module_state(game, _shares(policies), True, left_out=left_out.parameters.values())
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

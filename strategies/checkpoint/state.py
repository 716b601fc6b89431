"""The state of a training in a checkpoint, and how a resumed training gets all of it back.

docs/how/checkpoints.md has each key, with who writes and who reads it.
Each rank saves and loads what it owns: its shares of the weights, averages and optimizers, and its random states.
"""

import copy
import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from gan import noise
from gan.files.checkpoint import failing, load_module_state
from gan.files.errors import UserError, reason
from gan.files.finite import Bad, NotFinite, as_made, names_of, not_finite
from gan.files.tensors import Share
from gan.noise import Drawn
from gan.pool import ImagePool
from strategies import private
from strategies.batches import random_state
from strategies.batches.draws import Draws
from strategies.checkpoint import player_state
from strategies.checkpoint.attributes import Attributes
from strategies.checkpoint.first_weights import FirstWeights
from strategies.checkpoint.player_state import LeftOut
from strategies.objects.content import alike
from strategies.optimizers.updater import Updater
from strategies.policies.policy import Policy


class State:
    """The whole state of a training on this rank: of the players, the game, and random numbers.

    Made in set-up, while weights and buffers are as the constructor made them. `attributes` are those of a game that
    trains.
    """

    def __init__(self, first: FirstWeights, policies: Mapping[str, Policy], attributes: Attributes | None) -> None:
        self.game, self.world, self.seed, self.policies = first.game, first.world, first.seed, policies
        self.left_out, self.attributes = LeftOut(first, policies), attributes
        self._loops: dict[str, Any] | None = None  # where the ranks of dp have ended, in the process that started them
        self._meant = as_made(self.game)  # the buffers that may be infinite
        self._resumed: Mapping[str, Any] = {}  # what a checkpoint has for the start of the training
        self._set_aside: dict[str, Any] | None = None  # training's random states during a validation
        self.draws = Draws()

    # ---- save ----

    def networks(self) -> dict[str, Any]:
        """This rank's shares of the weights, and the other state of the modules.

        Buffers, such as running statistics, are saved by the first rank only. Image pools differ between ranks, so each
        rank saves its own images.
        """
        self.world.owed.catch_up()
        for policy in self.policies.values():
            policy.check_parameters()
        state = self._weights(buffers=self.world.rank == 0)
        for name, pool in self.game.named_modules():
            if isinstance(pool, ImagePool):
                state[f"{name}._extra_state" if name else "_extra_state"] = {
                    place: {number: Share.whole(image) for number, image in images.items()}
                    for place, images in pool.get_extra_state().items()
                }
        return state

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        return player_state.optimizer_state(*next(pair for pair in self._updaters() if pair[1].optimizer is optimizer))

    def _updaters(self) -> list[tuple[Policy, Updater]]:
        return [(policy, each) for policy in self.policies.values() for each in policy.updaters.values()]

    def _weights(self, buffers: bool) -> dict[str, Any]:
        """A tensor that has two names is saved under the first. What checkpoints leave out is not in it."""
        state: dict[str, Any] = {}
        shares, parameters = self._shares(), set(self.game.parameters())
        seen = set(map(id, self.left_out.parameters.values()))
        for key, value in self.game.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                state[key] = value
            elif id(value) not in seen and (buffers or value in parameters):
                share = shares[value] if value in shares else Share.whole(value)
                if share is not None:
                    state[key] = share
            seen.add(id(value))
        return state

    def _shares(self) -> dict[Tensor, Share | None]:
        return {weight: share for policy in self.policies.values() for weight, share in policy.storage.shares().items()}

    def complete(self, checkpoint: dict[str, Any], path: Any) -> tuple[str, str]:
        """Add what Lightning's checkpoint lacks: averages, scales, what games remember, every rank's random states.

        Every rank must call it. Returns the first rank's path, and a name for this save.
        """
        if not any(policy.updaters for policy in self.policies.values()) and self.game.step:
            rank_zero_warn(
                f"{path} has no optimizers, because a validation, test or prediction came after the training; no "
                f"training can go on from it: save before, or let ModelCheckpoint save"
            )
        if self._loops is not None:
            checkpoint["loops"]["fit_loop"] = copy.deepcopy(self._loops)
        ended = _back_into_the_epoch(checkpoint.get("loops", {}).get("fit_loop", {}))
        remembered = {} if self.attributes is None else self.attributes.state()
        own = self._set_aside or random_state.capture(), os.path.abspath(path), secrets.token_hex(8)
        bad = self._not_finite(checkpoint["state_dict"])
        states, paths, names, found, all_remembered = zip(*self.world.gather((*own, bad, remembered)), strict=True)
        everywhere = all(alike(all_remembered[0], each) for each in all_remembered)
        known = self.draws.known
        checkpoint |= {
            "game": type(self.game).__name__,
            "left_out": self.left_out.checksums,
            "files": self.left_out.files,
            "players": {name: player_state.rest_of_state(policy) for name, policy in self.policies.items()},
            "seed": self.seed,
            "epoch_ended": ended,
            "attributes": [all_remembered[0]] if everywhere else list(all_remembered),
            "random_states": list(states),
            "draws": [(phase, call, (*draw,)) for phase, each in known.items() for (call, _), draw in each.items()],
        }
        if bad := list(dict.fromkeys(each for of_rank in found for each in of_rank)):
            rank_zero_warn(
                f"{paths[0]} has weights that are not finite: {names_of(bad)}; it will not be resumed or opened. Stop "
                f"this run, and go on from an earlier checkpoint"
            )
        return paths[0], names[0]

    def _not_finite(self, weights: Mapping[str, Any]) -> list[Bad]:
        """What is not finite in this rank's shares of the weights and the averages."""
        owners: dict[int, tuple[str, str]] = {}
        for player in self.game.players.values():
            for name, value in player.module.state_dict(keep_vars=True).items():
                owners.setdefault(id(value), (player.name, name))
        places: dict[str, tuple[str, str]] = {}
        tensors: dict[str, Tensor] = {}
        for name, value in self.game.state_dict(keep_vars=True).items():
            if id(value) in owners and name not in self._meant and isinstance(weights.get(name), Share):
                places[name], tensors[name] = owners[id(value)], weights[name].tensor
        for player, policy in self.policies.items():
            for name, share in (player_state.average_state(policy) or {}).items():
                key = f"average/{player}/{name}"
                places[key], tensors[key] = (player, f"{name} (its moving average)"), share.tensor
        return [(*places[key], what) for key, what in not_finite(tensors).items()]

    # ---- load ----

    def load_networks(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Check that the checkpoint is of this game, then load weights and averages. Refuse what is not finite."""
        name, saved = type(self.game).__name__, list(checkpoint.get("players", ()))
        if checkpoint.get("game") != name or saved != list(self.policies):
            raise UserError(
                f"the checkpoint is of {checkpoint.get('game', 'another program')} with players "
                f"{', '.join(saved) or 'unknown'}; this game is {name} with players {', '.join(self.policies)}. "
                f"Let its configure_players yield the same ones in the same order; a network that never learns may be "
                f"an attribute without a Player"
            )
        if strict:
            self.left_out.check(checkpoint)

        def load_weights() -> None:
            unsaved = self.left_out.parameters
            state = {key: value for key, value in checkpoint["state_dict"].items() if key not in unsaved}
            try:
                load_module_state(self.game, state, self._shares(), strict, unsaved)
            except RuntimeError as error:
                raise UserError(
                    f"the checkpoint's networks are not this run's, as __init__ makes them ({reason(error)}); make all "
                    f"weights and buffers in __init__, with the settings that the checkpoint was trained with"
                ) from error

        def load_averages() -> None:
            for name, policy in self.policies.items():
                player_state.load_average(policy, checkpoint["players"][name]["ema"])

        self.world.each(load_weights)
        for policy in self.policies.values():
            policy.storage.shards_changed()
            policy.storage.reshard()
        self.world.each(load_averages)
        found = self.world.each(lambda: self._not_finite(self._weights(buffers=True)))
        if bad := list(dict.fromkeys(each for of_rank in found for each in of_rank)):
            raise NotFinite(f"the checkpoint cannot be used: {names_of(bad)}; take an earlier one")

    def load_training(self, checkpoint: Mapping[str, Any]) -> None:
        """Everything else that training needs to resume: optimizers, loss scales, counts."""
        updaters = self._updaters()
        states = checkpoint["optimizer_states"]

        def load_optimizers() -> None:
            if len(updaters) != len(states):
                raise UserError(
                    f"the checkpoint has {len(states)} optimizers, and this run {len(updaters)}; resume with the "
                    f"settings it was trained with"
                )
            for pair, state in zip(updaters, states, strict=True):
                player_state.load_optimizer_state(*pair, state)

        self.world.each(load_optimizers)
        for name, policy in self.policies.items():
            player_state.load_rest(policy, checkpoint["players"][name])
        self.seed, self._resumed = checkpoint["seed"], checkpoint

    def resume(self, trainer: Trainer) -> None:
        """At the start of a training: where its epoch goes on, what its game remembers, random states, new numbers.

        Only here, because set-up draws random numbers too, and first weights must be the same on all ranks.
        """
        resumed, self._resumed = self._resumed, {}
        at_its_end = _go_on_in_the_epoch(trainer)
        number, size, states = self.world.rank, self.world.size, resumed.get("random_states")
        for phase, call, content in resumed.get("draws", ()):
            draw = Drawn(*content)
            self.draws.known.setdefault(phase, {})[call, draw.site] = draw
        if states and self.attributes is not None:
            with failing(Path(trainer.ckpt_path or "")):
                self.attributes.load_of_ranks(resumed["attributes"], len(states), number, size)
        # A training that begins goes on as if one device had saved it now: where the first rank is, so that others may
        # take what that draws. Else ranks would draw alike: seed_everything, or manual_seed in __init__, seeds all.
        states = states or [self.world.broadcast(random_state.capture())]
        if len(states) == size or number == 0:
            random_state.restore(states[number])
        else:
            torch.manual_seed(noise.seed_for(self.seed, self.game.step, number))
            random_state.restore_alike(states[0])
        for (policy, updater), saved in zip(self._updaters(), resumed.get("optimizer_states", ()), strict=False):
            # Only here, because a schedule may ask the game.
            if "made" in saved and (said := player_state.go_on(policy.player, updater, saved["made"])):
                private.say(said)
        if at_its_end and not resumed.get("epoch_ended", True):
            # The game's hook came after the save, and Lightning has counted the epoch as complete. Callbacks are left
            # out: what they have heard of the epoch, such as its metrics, is gone.
            current = trainer.fit_loop.epoch_progress.current
            current.completed -= 1
            private.call_module(trainer, "on_train_epoch_end")
            current.completed += 1
        if resumed and (at_its_end or not trainer.fit_loop.restarted_mid_epoch) and _without_position(trainer):
            private.begin_epoch_again(trainer)  # it was begun before the random states were restored

    def take_back(self, loops: dict[str, Any]) -> None:
        """In the process that has started its ranks: what they remember, and where they have ended."""
        if self.attributes is not None:
            self.attributes.load_of_ranks(self._resumed["attributes"], len(self._resumed["random_states"]), 0, 1)
        random_state.restore(self._resumed["random_states"][0])
        self._resumed, self._loops = {}, loops

    # ---- a validation disturbs no training ----

    def set_random_states_aside(self) -> None:
        self._set_aside = self._set_aside or random_state.capture()

    def restore_random_states(self) -> None:
        if self._set_aside is not None:
            random_state.restore(self._set_aside)
        self._set_aside = None


def _go_on_in_the_epoch(trainer: Trainer) -> bool:
    """Whether the checkpoint is of the epoch's last step. Then the next epoch begins, with the hooks of its start."""
    loop = trainer.fit_loop
    epochs = loop.epoch_progress
    if not loop.restarted_mid_epoch:
        return False
    if epochs.current.ready == epochs.current.completed:
        loop.reset_restart_stage()  # else Lightning would go on as inside of an epoch
        return True
    if forgetful := _without_position(trainer):
        rank_zero_warn(
            f"a {forgetful} keeps no position, so the epoch that was begun before the checkpoint begins anew in it; a "
            f"GlobalLoader of `datasets` goes on inside"
        )
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
    return False


def _without_position(trainer: Trainer) -> str:
    """The kinds of loaders that begin an epoch anew."""
    loaders = tree_leaves(trainer.train_dataloader)
    return ", a ".join(dict.fromkeys(type(each).__name__ for each in loaders if not hasattr(each, "state_dict")))


def _back_into_the_epoch(loops: dict[str, Any]) -> bool:
    """Let a checkpoint that is saved after training, or between epochs, say what one after the last step says.

    Returns whether the hooks of the epoch's end were called. When training stops inside an epoch, Lightning counts the
    epoch as complete, and a resumed run would leave out the rest of it. With max_steps, a checkpoint from between two
    epochs would leave out nearly all of the next one, or count it twice.
    """
    epoch, batch = loops.get("epoch_progress"), loops.get("epoch_loop.batch_progress")
    if not epoch or not batch:
        return False
    now = epoch["current"]
    starts = now["ready"] == now["started"] + 1 > 1
    ended = starts or 0 < now["ready"] == now["processed"]
    if ended:
        for part in ("current", "total"):
            epoch[part]["ready"] = epoch[part]["started"]
            epoch[part]["processed"] = epoch[part]["completed"] = epoch[part]["ready"] - 1
            batch[part]["completed"] = batch[part]["processed"] - 1
    return ended

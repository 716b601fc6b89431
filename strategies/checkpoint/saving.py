"""What a training saves beside weights and optimizers, and how a resumed training gets all of it back."""

import copy
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils._pytree import tree_leaves

from gan import noise
from gan.files.checkpoint import load
from gan.files.errors import UserError
from gan.files.finite import named
from gan.module import GanModule
from strategies import random_state
from strategies.checkpoint.attributes import Attributes, alike
from strategies.checkpoint.folders import remove
from strategies.checkpoint.game_state import FiniteWeights, game_state, load_networks, load_training, networks_state
from strategies.checkpoint.left_out import LeftOut
from strategies.checkpoint.writing import ALONE, DiskError, SavingRanks, save
from strategies.policies.policy import Policy
from strategies.ranks import Ranks


class WholeCheckpointIO(CheckpointIO):
    """All ranks write a checkpoint together. It appears completely or not at all. Loading runs no code."""

    def __init__(self, ranks: SavingRanks = ALONE) -> None:
        self.ranks = ranks

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Every rank must call it, with its own shares in the checkpoint."""
        if storage_options is not None:
            raise UserError("checkpoints are written to a local or mounted disk; leave storage_options out")
        save(path, checkpoint, self.ranks)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """A checkpoint's tree. The tensors in it are read later, when they are needed."""
        return load(path, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        remove(path)


def refuse_other(io: Any) -> None:
    """Refuse a CheckpointIO that is not ours."""
    if io is not None and not isinstance(io, WholeCheckpointIO):
        raise UserError(
            f"{type(io).__name__} cannot write what ranks hold in shares, and PhaseStrategy writes its checkpoints "
            f"itself; leave {type(io).__name__} out (strategy.save_in_background(path) saves while training goes on)"
        )


@dataclass(frozen=True)
class InBackground:
    """How a checkpoint is saved, passed through Lightning as its storage options."""

    excuse: Callable[[DiskError], None] | None = None


class Saving:
    """The whole state of a training on this rank: of the players, the game, and random numbers.

    Made in set-up, while buffers are as the constructor made them. `attributes` are those of a game that trains.
    """

    def __init__(
        self,
        game: GanModule,
        policies: Mapping[str, Policy],
        ranks: Ranks,
        seed: int,
        left_out: LeftOut,
        attributes: Attributes | None,
    ) -> None:
        self.game, self.policies, self.ranks, self.seed = game, policies, ranks, seed
        self.left_out, self.attributes = left_out, attributes
        self.writers = SavingRanks(ranks.rank, ranks.size)
        self.finite = FiniteWeights(game, game.players)
        self.loops: dict[str, Any] | None = None  # where the ranks of dp have ended, in the process that started them
        self._resumed_attributes: list[dict[str, Any]] = []  # of the checkpoint, to be filled in
        self._resumed_states: list[dict[str, Any]] | None = None  # random states of the checkpoint, to be restored
        self._set_aside: dict[str, Any] | None = None  # training's random states during a validation

    # ---- save ----

    def networks(self) -> dict[str, Any]:
        """This rank's shares of the weights, and the other state of the modules."""
        return networks_state(self.game, self.policies, self.ranks.rank == 0, self.left_out)

    def complete(self, checkpoint: dict[str, Any], path: Any) -> tuple[str, str]:
        """Add what Lightning's checkpoint lacks: averages, scales, what games remember, every rank's random states.

        Every rank must call it. Returns the first rank's path, and a name for this save.
        """
        if self.loops is not None:
            checkpoint["loops"]["fit_loop"] = copy.deepcopy(self.loops)
        _back_into_the_epoch(checkpoint.get("loops", {}).get("fit_loop", {}))
        checkpoint |= game_state(self.game, self.policies, self.left_out)
        checkpoint["seed"] = self.seed
        averages = {name: player["ema"] for name, player in checkpoint["players"].items()}
        bad = self.finite.bad(checkpoint["state_dict"], averages)
        remembered = {} if self.attributes is None else self.attributes.state()
        own = self._set_aside or random_state.capture(), os.path.abspath(path), secrets.token_hex(8), bad
        states, paths, names, bad, remembered = zip(*self.ranks.gather((*own, remembered)), strict=True)
        everywhere = all(alike(remembered[0], each) for each in remembered)
        checkpoint["attributes"] = [remembered[0]] if everywhere else list(remembered)
        checkpoint["random_states"] = list(states)
        if found := list(dict.fromkeys(each for of_rank in bad for each in of_rank)):
            rank_zero_warn(
                f"{paths[0]} has weights that are not finite: {named(found)}; it will not be resumed or opened. Stop "
                f"this run, and go on from an earlier checkpoint"
            )
        return paths[0], names[0]

    # ---- load ----

    def load_networks(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Weights and averages."""
        load_networks(self.game, self.policies, checkpoint, strict, self.writers, self.left_out, self.finite)

    def load_training(self, checkpoint: Mapping[str, Any]) -> None:
        """Everything else that training needs to resume."""
        load_training(self.policies, checkpoint, self.writers)
        self.seed = checkpoint["seed"]
        self._resumed_attributes = checkpoint.get("attributes", [])
        self._resumed_states = checkpoint["random_states"]

    def resume(self, trainer: Trainer) -> None:
        """At the start of a training: where its epoch goes on, what its game remembers, and its random states.

        Only here, because set-up draws random numbers too, and first weights must be the same on all ranks.
        """
        _go_on_in_the_epoch(trainer)
        number, size = self.ranks.rank, self.ranks.size
        if (saved := self._resumed_attributes) and self.attributes is not None:
            self.attributes.load(saved[number] if len(saved) == size else saved[0])
        self._resumed_attributes = []
        states, self._resumed_states = self._resumed_states, None
        same = states is not None and len(states) == size
        if not same and (states is not None or size > 1):
            # Else ranks would draw alike: seed_everything, or manual_seed in __init__, seeds all of them alike.
            torch.manual_seed(noise.seed_for(self.seed, self.game.step, number))
        try:
            if same:
                random_state.restore(states[number])
            elif states:
                random_state.restore_alike(states[0])
            elif size > 1:
                random_state.restore_alike(self.ranks.broadcast(random_state.capture()))
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, AttributeError, IndexError) as error:
            raise UserError(
                f"{trainer.ckpt_path} is damaged: what it has of rank {number}'s random states is none; take an "
                f"earlier one"
            ) from error

    def take_back(self, loops: dict[str, Any]) -> None:
        """In the process that has started the ranks of dp: what they remember, and where they have ended."""
        self.attributes.load(self._resumed_attributes[0])
        random_state.restore(self._resumed_states[0])
        self._resumed_attributes, self._resumed_states, self.loops = [], None, loops

    # ---- a validation disturbs no training ----

    def set_random_states_aside(self) -> None:
        """Save training's random states, if they are not saved yet."""
        self._set_aside = self._set_aside or random_state.capture()

    def restore_random_states(self) -> None:
        """As if validation had drawn nothing."""
        random_state.restore(self._set_aside)
        self._set_aside = None


def _go_on_in_the_epoch(trainer: Trainer) -> None:
    loop = trainer.fit_loop
    epochs = loop.epoch_progress
    if not loop.restarted_mid_epoch:
        return
    if epochs.current.ready == epochs.current.completed:
        epochs.increment_ready()  # at the end of an epoch: Lightning does not count the next one as begun
        epochs.increment_started()
    elif any(not hasattr(each, "state_dict") for each in tree_leaves(trainer.train_dataloader)):
        rank_zero_warn(
            "the training loader keeps no position, so the epoch that was begun before the checkpoint begins anew; "
            "a GlobalLoader of `datasets` goes on inside it"
        )


def _back_into_the_epoch(loops: dict[str, Any]) -> None:
    """Let a checkpoint that is saved after training say what one after its last step says.

    When training stops inside an epoch, Lightning counts the epoch as complete, and a resumed run would leave out the
    rest of it.
    """
    epoch, batch = loops.get("epoch_progress"), loops.get("epoch_loop.batch_progress")
    if epoch and 0 < epoch["current"]["ready"] == epoch["current"]["completed"]:
        for part in ("current", "total"):
            epoch[part]["processed"] = epoch[part]["completed"] = epoch[part]["ready"] - 1
            batch[part]["completed"] = batch[part]["processed"] - 1

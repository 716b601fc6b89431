"""What Lightning asks of a strategy about checkpoints, and about random states that must not be disturbed."""

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gan import noise
from gan.files.checkpoint import load
from gan.files.checkpoint_files import failing
from gan.files.errors import UserError
from gan.files.finite import named
from gan.pool import ImagePool
from strategies import random_state
from strategies.checkpoint.attributes import Attributes, alike
from strategies.checkpoint.folders import remove
from strategies.checkpoint.game_state import (
    FiniteWeights,
    check_training,
    game_state,
    load_networks,
    load_training,
    networks_state,
)
from strategies.checkpoint.left_out import LeftOut
from strategies.checkpoint.player_state import optimizer_state
from strategies.checkpoint.writing import ALONE, Background, DiskError, SavingRanks, StoreRanks, prepare, save
from strategies.launched_strategy import LaunchedStrategy
from strategies.policies.policy import Policy
from strategies.processes.stopping import Stopped
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


@dataclass(frozen=True)
class InBackground:
    """How a checkpoint is saved, passed through Lightning as its storage options."""

    excuse: Callable[[DiskError], None] | None = None


class SavingStrategy(LaunchedStrategy):
    """Saves and loads what the policies own, and the random states of all ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policies: dict[str, Policy] = {}
        self.left_out: LeftOut  # made with the policies
        self.finite: FiniteWeights
        self.background = Background()
        self.ranks = Ranks()
        self.seed = 0
        self.attributes: Attributes | None = None  # of a game that trains
        self._resumed_attributes: list[dict[str, Any]] = []  # of the checkpoint, to be filled in
        self._resumed_states: list[dict[str, Any]] | None = None  # random states of the checkpoint, to be restored
        self._set_aside: dict[str, Any] | None = None  # training's random states during a validation

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Always ours: no other one can write shares. But spawned ranks hand whole weights over in a plain file."""
        return TorchCheckpointIO() if self.handing_over else WholeCheckpointIO(self._saving_ranks())

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        refuse_other(io)

    def _saving_ranks(self) -> SavingRanks:
        return SavingRanks(self.global_rank, self.world_size)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, because averages exist only after the policies have adopted the players in `setup`."""
        return True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's checkpoint, with the players' averages and scales and every rank's random states.

        Every rank writes its shares, to the path that the first rank gives. All machines must share this file system.
        """
        self.background.wait()
        self.places.compare()
        _back_into_the_epoch(checkpoint.get("loops", {}).get("fit_loop", {}))
        checkpoint |= game_state(self.lightning_module, self.policies, self.left_out)
        checkpoint["seed"] = self.seed
        averages = {name: player["ema"] for name, player in checkpoint["players"].items()}
        bad = self.finite.bad(checkpoint["state_dict"], averages)
        remembered = {} if self.attributes is None else self.attributes.state()
        own = self._set_aside or random_state.capture(), os.path.abspath(filepath), secrets.token_hex(8), bad
        states, paths, names, bad, remembered = zip(*self.gather_objects((*own, remembered)), strict=True)
        everywhere = all(alike(remembered[0], each) for each in remembered)
        checkpoint["attributes"] = [remembered[0]] if everywhere else list(remembered)
        checkpoint["random_states"], where, name = list(states), paths[0], names[0]
        if found := list(dict.fromkeys(each for of_rank in bad for each in of_rank)):
            rank_zero_warn(
                f"{where} has weights that are not finite: {named(found)}; it will not be resumed or opened. Stop "
                f"this run, and go on from an earlier checkpoint"
            )
        if isinstance(storage_options, InBackground):
            write = partial(prepare(where, checkpoint, self._saving_ranks(), copied=True), self._ranks_of_thread(name))
            self.background.start(write, self.ending.wish, storage_options.excuse)
        else:
            self.checkpoint_io.save_checkpoint(checkpoint, where, storage_options)

    def save_in_background(self, path: str | Path, excuse: Callable[[DiskError], None] | None = None) -> None:
        """Save a checkpoint while training goes on. It returns as soon as the content is copied to host memory.

        Every rank must call it, between two steps. The checkpoint appears completely or not at all. It is there when
        the next save returns, and when `fit` does. If it cannot be written, all ranks raise that after the same step.
        With `excuse` they do not raise the failure of a disk: each calls that with it, here or in a thread, at once.
        """
        trainer = self.lightning_module.trainer
        running = trainer.state.status == TrainerStatus.RUNNING
        try:
            trainer.save_checkpoint(path, storage_options=InBackground(excuse) if running else None)
        except DiskError as error:
            if excuse is None:
                raise
            excuse(error)

    def _ranks_of_thread(self, name: str) -> SavingRanks:
        if self.world_size == 1:
            return self._saving_ranks()
        limit = (self._timeout or default_pg_timeout).total_seconds()
        survivor = self.survivor
        return StoreRanks(
            self.global_rank, self.world_size, f"save {name}", limit, lambda: survivor is not None and survivor.lost
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, but only when the one that is being saved is whole."""
        if self.is_global_zero:
            self.background.afterwards(partial(self.checkpoint_io.remove_checkpoint, filepath))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shares of the weights, and the other state of the modules."""
        return networks_state(self.lightning_module, self.policies, self.is_global_zero, self._slots, self.left_out)

    def _slots(self, pool: ImagePool) -> dict[int, dict[int, Tensor]]:
        """The images of this rank's places in the global batch; under dp those of all replicas."""
        pools = [pool, *(replica.own(pool) for replica in self.ranks.other_replicas)]
        return {place: images for each in pools for place, images in each.get_extra_state().items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """This rank's shares of a player's optimizer state."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        return optimizer_state(next(each for each in self.policies.values() if each.optimizer is optimizer))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A checkpoint's tree. One that a training could not go on from is refused before anything is loaded."""
        tree = super().load_checkpoint(checkpoint_path, weights_only)
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING and not self.handing_over:
            with failing(Path(checkpoint_path)):
                check_training(tree, trainer)
        return tree

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Weights and averages."""
        ranks = self._saving_ranks()
        load_networks(self.lightning_module, self.policies, checkpoint, strict, ranks, self.left_out, self.finite)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Everything else that training needs to resume."""
        load_training(self.policies, checkpoint, self._saving_ranks())
        self.seed = checkpoint["seed"]
        self._resumed_attributes = checkpoint.get("attributes", [])
        self._resumed_states = checkpoint["random_states"]

    def on_train_start(self) -> None:
        """Restore the random states of a checkpoint, or give each of several ranks a state of its own for torch.

        Those of NumPy and Python are the first rank's on all ranks. Only here, because set-up draws random numbers
        too, and first weights must be the same on all ranks. What the game remembers comes back here too, after its own
        on_train_start.
        """
        super().on_train_start()
        loop = self.lightning_module.trainer.fit_loop
        epochs, loader = loop.epoch_progress, self.lightning_module.trainer.train_dataloader
        if loop.restarted_mid_epoch and epochs.current.ready == epochs.current.completed:
            epochs.increment_ready()  # at the end of an epoch: Lightning does not count the next one as begun
            epochs.increment_started()
        elif loop.restarted_mid_epoch and any(not hasattr(each, "state_dict") for each in tree_leaves(loader)):
            rank_zero_warn(
                "the training loader keeps no position, so the epoch that was begun before the checkpoint begins anew; "
                "a GlobalLoader of `datasets` goes on inside it"
            )
        if (saved := self._resumed_attributes) and self.attributes is not None:
            self.attributes.load(saved[self.global_rank] if len(saved) == self.world_size else saved[0])
        self._resumed_attributes = []
        states, self._resumed_states = self._resumed_states, None
        same = states is not None and len(states) == self.world_size
        if not same and (states is not None or self.world_size > 1):
            # Else ranks would draw alike: seed_everything, or manual_seed in __init__, seeds all of them alike.
            torch.manual_seed(noise.seed_for(self.seed, self.lightning_module.step, self.global_rank))
        try:
            if same:
                random_state.restore(states[self.global_rank])
            elif states:
                random_state.restore_alike(states[0])
            elif self.world_size > 1:
                random_state.restore_alike(self.broadcast(random_state.capture()))
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, AttributeError, IndexError) as error:
            raise UserError(
                f"{self.lightning_module.trainer.ckpt_path} is damaged: what it has of rank {self.global_rank}'s "
                f"random states is none; take an earlier one"
            ) from error

    # ---- what is saved in the background is whole when training ends ----

    def setup_distributed(self) -> None:
        """Lightning's. A rank that fails first lets the other ranks finish what they save together."""
        before = random_state.capture()
        super().setup_distributed()
        random_state.restore_alike(before)  # Lightning seeds ranks a second time, and one device not
        if self.survivor is not None:
            self.survivor.settle = self.background.settle

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """If the run ends here because a save has failed, raise that."""
        try:
            super().on_train_batch_start(batch, batch_idx)
        except Stopped:
            self.background.wait()
            raise

    def on_train_end(self) -> None:
        super().on_train_end()
        self.background.wait()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.background.settle()

    def teardown(self) -> None:
        self.background.close()
        super().teardown()

    # ---- a validation disturbs no training ----

    def set_random_states_aside(self) -> None:
        """Save training's random states before the loaders of a validation draw random numbers."""
        self._set_aside = random_state.capture()

    def on_validation_start(self) -> None:
        """Save them here too, for a validation that was not started by training."""
        self._set_aside = self._set_aside or random_state.capture()

    def on_validation_end(self) -> None:
        """Restore training's random states, as if validation had drawn nothing."""
        random_state.restore(self._set_aside)
        self._set_aside = None


def refuse_other(io: Any) -> None:
    """Refuse a CheckpointIO that is not ours."""
    if io is not None and not isinstance(io, WholeCheckpointIO):
        raise UserError(
            f"{type(io).__name__} cannot write what ranks hold in shares, and PhaseStrategy writes its checkpoints "
            f"itself; leave {type(io).__name__} out (strategy.save_in_background(path) saves while training goes on)"
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

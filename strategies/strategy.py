"""PhaseStrategy: the one class that Lightning sees. Its hooks stand in the order in which Lightning calls them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn

from gan.files.checkpoint import load
from gan.files.errors import DiskError, UserError
from gan.module import GanModule
from gan.phase import Phase
from strategies import private
from strategies.accelerator import same_parameters
from strategies.batches.loaders import check_together
from strategies.checkpoint.first_weights import without_values
from strategies.checkpoint.folders import remove
from strategies.checkpoint.player_state import Averages, last_averages
from strategies.checkpoint.state import State
from strategies.checkpoint.writing import Background, InBackground, check_loadable, excused, prepare, refuse_other, save
from strategies.hooks import Hooks, overrides, refuse_what_is_not_called
from strategies.policies import POLICIES
from strategies.policies.choice import choices
from strategies.policies.policy import Policy
from strategies.processes.own_ranks import OwnRanks
from strategies.processes.stopping import OTHERS, Stopped, handle
from strategies.training.assignment import Auto
from strategies.training.players import Players, on_devices, serve_players, set_up_players
from strategies.training.ranks_strategy import RanksStrategy
from strategies.training.steps import Steps
from strategies.training.watch import Check
from strategies.turn import Training, all_learning
from strategies.world import world_of_thread


class PhaseStrategy(RanksStrategy):
    """Trains a `GanModule`, each player under a policy of its own.

    `policy` is a name for all players, or a mapping from player to name in which `*` stands for the rest:
    `PhaseStrategy("zero3")`, `PhaseStrategy({"generator": "zero3", "*": "ddp"})`. The form of the command line works
    too: `PhaseStrategy("generator=zero3,*=ddp")`. Options are added to a policy with `+`: `zero3+offload`.
    `check` tries a step on all ranks together, and on each as if it were one device (see check/one_device.py). It does
    so before a phase is played for the first time, and again at growing distances; with `check="often"` every tenth
    time. `check_replicas` compares weights and buffers on all ranks after every phase. Processes, devices and the
    process group are Lightning's: the other arguments are those of its DDPStrategy, and no model is wrapped in DDP.
    `start_method` "spawn" or "fork" starts ranks as functions; a notebook forks. `process_group_backend` is gloo, nccl
    or mpi; without it nccl on GPUs, else gloo. `init_method` is where ranks meet, if not at MASTER_ADDR and
    MASTER_PORT: `tcp://HOST:PORT`, or `file:///PATH` on a disk that they share (a file that does not exist yet).
    """

    def __init__(
        self,
        policy: str | Mapping[str, str] = "ddp",
        *,
        check: Check = True,
        check_replicas: bool = False,
        start_method: str = "popen",
        process_group_backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,  # a number is seconds
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if check not in (True, False, "often"):
            raise UserError(f"PhaseStrategy(check={check!r}): type True, False or 'often'")
        refuse_other(checkpoint_io)
        super().__init__(
            choices(policy, {**POLICIES, "auto": Auto}),
            init_method,
            process_group_backend,
            timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            start_method=start_method,
        )
        self.check: Check = check
        self.check_replicas = check_replicas
        self.until_teardown = ExitStack()

        self.players = Players()
        self.background = Background()
        self.lockstep.settle = self.background.settle
        self.saving: State  # made in set-up
        self.averages: Averages = {}  # of the training before, in a spawned rank
        self.began = self.epoch_begins = False  # the latter: the game's own on_train_epoch_start runs
        self.steps: Steps  # made when training begins

    restore_checkpoint_after_setup = True  # averages exist only after the policies have adopted the players in `setup`

    def serve(self, trainer: Trainer, game: LightningModule | None = None, *args: Any, **kwargs: Any) -> None:
        game = _game(game or trainer.lightning_module)
        game.trainer = trainer
        self.connect(game)
        serve_players(self, game, self.players, *args)

    # ---- set-up ----

    def connect(self, model: LightningModule) -> None:
        """Lightning calls it first. Some settings it would refuse later, with words that do not help; so do it here."""
        super().connect(model)
        if isinstance(model, GanModule) and model.trainer.state.fn == TrainerFn.FITTING:
            refuse_what_is_not_called(model.trainer, model)

    def setup(self, trainer: Trainer) -> None:
        """Lightning calls it on each rank, after the processes have found each other."""
        self.until_teardown.enter_context(on_devices(self, self.game))
        self.saving = set_up_players(self, self.game, self.players, self.averages)
        self.optimizers = self.players.optimizers()
        self.lr_scheduler_configs = self.players.schedules()
        self.setup_precision_plugin()

    # ---- load a checkpoint ----

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A checkpoint's tree. One that a training could not go on from is refused before anything is loaded.

        As in a save the first rank's path counts: ModelCheckpoint's best one differs, if what it monitors does.
        """
        path = self.world.broadcast(checkpoint_path)
        tree = load(path, weights_only)
        if self.game.trainer.state.fn == TrainerFn.FITTING and "optimizer_states" not in tree:
            raise UserError(f"{path} has weights only, with which no training goes on; give one that has all")
        return tree

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.saving.load_networks(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.saving.load_training(checkpoint)

    def take_back(self, loops: dict[str, Any]) -> None:
        self.saving.take_back(loops)
        self.players.give_back()

    # ---- train ----

    def on_train_start(self) -> None:
        """What the game remembers comes back only here, after the game's own on_train_start."""
        super().on_train_start()
        game = self.game
        self.began = True
        self.lockstep.signals = handle(OTHERS, self.ending.wish, gently=True)  # SIGTERM is Lightning's
        if isinstance(self.launcher, OwnRanks):  # where the training ends with a save
            check_loadable(private.states_beside(game.trainer))
        check_together(game.trainer.train_dataloader, private.taken_ahead(game.trainer))
        self.saving.resume(game.trainer)
        seed, draws, alike = self.saving.seed, self.saving.draws, self.lockstep.same_on_ranks
        known = game, self.policies, self.precision_plugin, self.world, seed, Hooks(game.trainer, game), alike
        checked = bool(self.check) and self.world.size > 1
        training = Training(*known, draws=draws, batches=self.batches, checked=checked)
        self.steps = Steps(training, self.lockstep, self.check, self.check_replicas, super().batch_to_device)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if not (self.game.trainer.training and self.began):
            return super().batch_to_device(batch, device, dataloader_idx)
        return self.steps.incoming.take(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """End here if any rank got a signal. If that is because a save has failed, raise that."""
        self.steps.incoming.refuse_changed(batch)
        if self.ending.look():
            self.background.wait()
            raise Stopped

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """One step: every phase that is due, or what an author's own training_step plays."""
        if not overrides(self.game, "training_step", GanModule):
            return self.steps.step(self.play, batch)
        return self.steps.step(lambda samples: self.game.training_step(samples, *args, **kwargs), batch)

    def play(self, batch: Any) -> None:
        for phase in self.steps.due():
            self.run(phase, batch)

    def run(self, phase: Phase, batch: Any) -> None:
        self.steps.run(phase, batch)

    def all_learning(self) -> AbstractContextManager[None]:
        """Inside the `with`, every player that can learn requires gradients: for a fake that several phases use."""
        return all_learning(self.policies, any(phase.second_order for phase in self.game.phases))

    def on_train_end(self) -> None:
        """Make the author's weights whole again. Raise if ranks have gone different ways, or updates were skipped."""
        super().on_train_end()
        self.background.wait()
        self.lockstep.whereabouts.compare()
        self.players.give_back()
        self.steps.guard.raise_if_hopeless()

    # ---- save a checkpoint ----

    @property
    def _in_a_step(self) -> bool:
        return self.began and (private.in_a_step(self.game.trainer) or self.epoch_begins)

    @property
    def _ended_in_a_step(self) -> bool:
        """By an error or Ctrl-C. A callback that saves then must not hide it by an error of its own."""
        return self._in_a_step and self.game.trainer.state.status == TrainerStatus.INTERRUPTED

    def barrier(self, name: str | None = None) -> None:
        """Lightning's after a save too. After one that was left out other ranks may have gone."""
        if not self._ended_in_a_step:
            super().barrier(name)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shares of the weights, and the other state of the modules: the first that Lightning asks for."""
        if self._ended_in_a_step:
            return {}
        if self._in_a_step:
            raise UserError(
                "a checkpoint is saved while a step is played, or a step or epoch begins, and no training could go on "
                "from it; save in on_train_batch_end"
            )
        return self.saving.networks()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._ended_in_a_step:
            return {}
        return self.saving.optimizer(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's checkpoint, with the players' averages and scales and every rank's random states.

        Every rank writes its shares, to the path that the first rank gives. All machines must share this file system.
        """
        if self._ended_in_a_step:
            rank_zero_warn(f"{filepath} is not saved, because the training ended within a step; resume an earlier one")
            return
        self.background.wait()
        self.lockstep.whereabouts.compare()
        path, name = self.saving.complete(checkpoint, filepath)
        if storage_options is None:
            save(path, checkpoint, self.world)
        elif isinstance(storage_options, InBackground):
            write = prepare(path, checkpoint, self.world, copied=True)
            threads = world_of_thread(self.world, f"save {name}", self._timeout, self.lockstep.is_lost)
            self.background.start(partial(write, threads), self.ending.wish, storage_options.excuse)
        else:
            raise UserError("checkpoints are written to a local or mounted disk; leave storage_options out")

    def save_in_background(self, path: str | Path, excuse: Callable[[DiskError], None] | None = None) -> None:
        """Save a checkpoint while training goes on. It returns as soon as the content is copied to host memory.

        Every rank must call it, between two steps. The checkpoint appears completely or not at all. It is there when
        the next save returns, and when `fit` does. If it cannot be written, all ranks raise that after the same step.
        With `excuse` they do not raise the failure of a disk: each calls that with it, here or in a thread, at once.
        """
        trainer = self.game.trainer
        running = trainer.state.status == TrainerStatus.RUNNING
        with excused(excuse):
            trainer.save_checkpoint(path, storage_options=InBackground(excuse) if running else None)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, but only when the one that is being saved is whole."""
        if self.is_global_zero and not self._ended_in_a_step:  # else the one that would replace it was left out
            self.background.afterwards(partial(remove, filepath))

    # ---- validate, with averaged weights, and disturb no training ----

    def set_random_states_aside(self) -> None:
        """Save training's random states before the loaders of a validation draw random numbers."""
        self.lockstep.whereabouts.meet()
        self.saving.set_random_states_aside()

    on_validation_start = set_random_states_aside  # for a validation that was not started by training

    def on_validation_end(self) -> None:
        self.saving.restore_random_states()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Averaged only during the step: between steps a checkpoint may save the raw weights."""
        with self.averaged():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.averaged():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.averaged():
            return super().predict_step(*args, **kwargs)

    # ---- what programs ask ----

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned rank gets: of a training that has ended only the averages."""
        anew = {"_optimizers": [], "lr_scheduler_configs": [], "players": Players(), "saving": None, "steps": None}
        return {**super().__getstate__(), **anew, "averages": last_averages(self.game)}

    @property
    def game(self) -> GanModule:
        return _game(self.lightning_module)

    @property
    def policies(self) -> dict[str, Policy]:
        return self.players.policies

    def gathered(self, write: bool = False) -> AbstractContextManager[None]:
        """Inside the `with`, between phases, all players' parameters are whole. Every rank must call it.

        With `write` they may be written: all ranks write the same values, and each keeps its part of them. Without it
        a write is an error. Together with `averaged()`, in either order, it is the averages that are read or written.
        """
        return self.players.gathered(write)

    def averaged(self) -> AbstractContextManager[None]:
        """Inside the `with`, players that keep an average have their averaged weights. Every rank must call it."""
        return self.players.averaged()

    # ---- the end ----

    def teardown(self) -> None:
        """Take the policies away, with hooks, process groups and shards. What training has changed stays."""
        self.until_teardown.close()
        if not (self.began or self.is_starter) and (trainer := private.fitting(self.game)):
            # Nothing was left to train, and so Lightning has called no hook of a training.
            if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
                trainer.fit_loop.reset()  # counts an epoch that ends with the checkpoint
            self.saving.resume(trainer)
            self.players.give_back()
        self.began = False
        self.players.release()
        self.background.close()
        self.lockstep.signals.close()
        assert self.lightning_module is not None
        with without_values(self.lightning_module), same_parameters(self.root_device):
            super().teardown()
        if self.is_global_zero:
            self.lockstep.requeue()


def _game(module: LightningModule | None) -> GanModule:
    if not isinstance(module, GanModule):
        raise UserError(
            f"PhaseStrategy trains a gan.GanModule, got {type(module).__name__}; "
            f"derive it from GanModule, or use one of Lightning's own strategies"
        )
    return module


def phase_strategy(trainer: Trainer) -> PhaseStrategy:
    """The strategy of a trainer, for callbacks."""
    assert isinstance(trainer.strategy, PhaseStrategy)  # a GanModule refuses others
    return trainer.strategy

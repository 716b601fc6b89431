"""PhaseStrategy: the one class that Lightning sees. Its hooks stand in the order in which Lightning calls them."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from datasets import GlobalStream, ResumableLoader
from gan.files.checkpoint import failing
from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from strategies import private, random_state
from strategies.accelerator import pins, same_parameters
from strategies.assignment import is_dp
from strategies.auto import Auto
from strategies.checkpoint.attributes import Attributes
from strategies.checkpoint.background import Background, DiskError, InBackground, SavingRanks, StoreRanks
from strategies.checkpoint.player_state import optimizer_state
from strategies.checkpoint.state import State, check_training
from strategies.checkpoint.writing import WholeCheckpointIO, check_loadable, prepare, refuse_other
from strategies.choice import choices
from strategies.draws import draws_follow
from strategies.first_weights import FirstWeights, move, without_values
from strategies.hooks import NO_HOOKS, Hooks, refuse_what_is_not_called
from strategies.loaders import check_loader, dealt
from strategies.lockstep import Lockstep
from strategies.meeting import Meeting, backend_for, check_backend, check_device, check_start
from strategies.players import Players
from strategies.policies import POLICIES
from strategies.policies.policy import Policy
from strategies.policies.world import Groups, World
from strategies.processes.cluster import environment
from strategies.processes.interface import clear_errors
from strategies.processes.launcher import Here, OwnRanks, launcher
from strategies.processes.stopping import Ending, Stopped
from strategies.ranks import Ranks
from strategies.serving import Division, Notice, Served
from strategies.steps import Steps
from strategies.while_training import while_training


class PhaseStrategy(DDPStrategy):
    """Trains a `GanModule`, each player under a policy of its own.

    `policy` is a name for all players, or a mapping from player to name in which `*` stands for the rest:
    `PhaseStrategy("zero3")`, `PhaseStrategy({"generator": "zero3", "*": "ddp"})`. The form of the command line works
    too: `PhaseStrategy("generator=zero3,*=ddp")`. Options are added to a policy with `+`: `zero3+offload`.
    `check` tries a step on all ranks together, and on each as if it were one device (see check/first_step.py). It does
    so before a phase is played for the first time, and again at growing distances; with `check="often"` every tenth
    time.
    `check_replicas` compares weights and buffers on all ranks after every phase. Processes, devices and the process
    group are Lightning's own: the other arguments are those of its DDPStrategy, and the model is never wrapped in DDP.
    `start_method` "spawn" starts the ranks from a script, "fork" from a notebook. `process_group_backend` is gloo, nccl
    or mpi; without it nccl on GPUs, else gloo. `init_method` is where ranks meet, if not at MASTER_ADDR and
    MASTER_PORT: `tcp://HOST:PORT`, or `file:///PATH` on a disk that they share (a file that does not exist yet).
    """

    def __init__(
        self,
        policy: str | Mapping[str, str] = "ddp",
        *,
        check: bool | Literal["often"] = True,
        check_replicas: bool = False,
        start_method: str = "popen",
        process_group_backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        refuse_other(checkpoint_io)
        if check not in (True, False, "often"):
            raise UserError(f"PhaseStrategy(check={check!r}): type True, False or 'often'")
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        if process_group_backend is not None:
            check_backend(process_group_backend)
        self.init_method, self.check, self.check_replicas = init_method, check, check_replicas
        self.choice = choices(policy, {**POLICIES, "auto": Auto})
        self.is_dp = is_dp(self.choice)
        self.until_teardown = ExitStack()

        # What the launcher finds out.
        self.resumes_from: Any = None  # the checkpoint from which the run resumes
        self.is_starter = False  # it starts the ranks of dp, and is a world of its own while they are not running
        self.handing_over = False  # whether a spawned rank's weights are on their way to the process that started it

        # The parts, each of which does one thing.
        self.division = Division()
        self.lockstep = Lockstep()
        self.players = Players()
        self.background = Background()
        self.saving: State  # the last two are made in set-up
        self.steps: Steps

    # ---- what Lightning reads ----

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """What tells Lightning the place of this process."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, found: ClusterEnvironment | None) -> None:
        self._environment = environment(found)

    @property
    def num_processes(self) -> int:
        return 1 if self.is_starter else super().num_processes

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu") if self.is_starter else super().root_device

    @property
    def world_size(self) -> int:
        """The number of ranks that train, or of those that serve with this one. See [Note: serving]."""
        own = 1 if self.is_starter else super().world_size
        return own if self.division.part is None else self.division.part.size

    @property
    def global_rank(self) -> int:
        """This rank's number among those."""
        return super().global_rank if self.division.part is None else self.division.part.rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first of the ranks that train."""
        return self.global_rank == 0 and self.division.trains

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Always ours: no other one can write shares. But spawned ranks hand whole weights over in a plain file."""
        return TorchCheckpointIO() if self.handing_over else WholeCheckpointIO(self._writers)

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        refuse_other(io)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, because averages exist only after the policies have adopted the players in `setup`."""
        return True

    # ---- start the ranks, and connect them ----

    def _configure_launcher(self) -> None:
        """Refuse impossible choices before any process is started."""
        ranks = self.num_processes * self.num_nodes
        self.division.placement = check_start(self.choice, self.cluster_environment, self.num_processes, self.num_nodes)
        if ranks > 1:
            check_device(self._get_process_group_backend(), self.root_device)
        self._launcher = launcher(self, self._start_method, self.is_dp) if ranks > 1 else Here(self)
        self.is_starter = isinstance(self._launcher, OwnRanks)

    def _get_process_group_backend(self) -> str:
        return backend_for(self._process_group_backend, self.root_device)

    def take_part(self, rank: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """What this rank of the whole run does: the function, which trains, or serving those that train."""
        return self.division.take_part(rank, function, partial(self.serve, getattr(function, "__self__", None)))

    def set_world_ranks(self) -> None:
        """Lightning's. A serving rank prints nothing."""
        super().set_world_ranks()
        if self.division.part is not None:
            private.set_first(self.is_global_zero)

    def setup_distributed(self) -> None:
        """A single process needs no process group. Several are tied before they are connected, to end together."""
        before = random_state.capture()
        self.set_world_ranks()
        if self.num_processes * self.num_nodes > 1:
            rank, size = self.division.seat(self.global_rank, self.world_size)
            meeting = Meeting(
                self.cluster_environment,
                rank,
                size,
                self.num_nodes,
                self.root_device,
                self._get_process_group_backend(),
                self._timeout,
                where=self.init_method,
                divided=self.division.part is not None,
            )
            store = meeting.store(self.broadcast)  # held until the group holds it too: rank 0 may be its server
            self.lockstep.tie(store, size, meeting.host, settle=self.background.settle)
            with clear_errors(self.cluster_environment.main_address):
                self.division.connect(store, meeting)
                super().setup_distributed()
        # Lightning seeds ranks a second time, and one device not. What dp's loaders draw is what one device draws.
        (random_state.restore if self.is_dp else random_state.restore_alike)(before)

    def serve(self, trainer: Trainer, game: LightningModule | None = None, *args: Any, **kwargs: Any) -> None:
        """What a serving rank does in place of training: see [Note: serving]. Lightning's set-up hooks are called."""
        game = _game(game or trainer.lightning_module)
        game.trainer = trainer
        self.connect(game)
        training, signals = trainer.state.fn == TrainerFn.FITTING, self.lockstep.signals
        try:
            notice = Notice(signals)
            self.setup_environment()
            if training:
                self.until_teardown.enter_context(draws_follow(self.root_device))
            private.call_module(trainer, "setup", stage=trainer.state.fn.value)
            private.call_module(trainer, "configure_model")
            served = Served(game, self.division.served_here(game, self.choice), self._world(()), self.precision_plugin)
            self.players.policies = served.policies(training, partial(self.reduce, reduce_op="min"))
            self.division.serve(self.policies, notice)
        finally:
            self.players.release()
            self.until_teardown.close()
            signals.give_back()

    # ---- set-up ----

    def connect(self, model: LightningModule) -> None:
        """Lightning calls it first. Some settings it would refuse later, with words that do not help; so do it here."""
        super().connect(model)
        if isinstance(model, GanModule) and model.trainer.state.fn == TrainerFn.FITTING:
            refuse_what_is_not_called(model.trainer, model)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Lightning calls this with every loader, after it has chosen the sampler."""
        training = self.lightning_module.trainer.training
        if self.is_dp and training and self.world_size > 1:
            dataloader = dealt(dataloader, self.global_rank, self.world_size, self.broadcast(random_state.capture()))
        check_loader(dataloader, self.world_size, training)
        if isinstance(dataloader, ResumableLoader | GlobalStream):
            dataloader.pin_memory = pins(self.root_device)
        return super().process_dataloader(dataloader)

    def setup(self, trainer: Trainer) -> None:
        """Lightning's set-up, in its order. But each player gets its policy, instead of one wrapped module."""
        training = trainer.state.fn == TrainerFn.FITTING
        game = _game(self.lightning_module)
        if training and trainer.checkpoint_callbacks:
            check_loadable({"hyper_parameters": dict(game.hparams)})

        # The devices, and the networks on them. What other ranks serve is not needed here.
        several = self.world_size > 1
        if not several or self.is_dp:
            private.leave_samplers(trainer)
        self.accelerator.setup(trainer)
        if isinstance(self.precision_plugin, MixedPrecision):
            self.precision_plugin.device = self.root_device.type  # Lightning says cuda for what it does not know
        if self.root_device.type == "cpu":
            private.stop_looking_for_gpus()
        if training:
            synchronise = several and self._layer_sync is not None
            self.until_teardown.enter_context(while_training(trainer, self.root_device, synchronise))
        self.division.leave_to_others(game, self.choice)
        move(game, self.root_device, self.precision_plugin, everywhere=several)
        game.assemble()
        attributes = Attributes(game, self.root_device) if training else None

        # What all ranks must agree on.
        ranks = self._ranks()
        seed = self.broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32)))
        self.lockstep.agree(ranks, trainer if training else None)

        # The players, and what Lightning wants to know of them.
        resumed, precision = self.resumes_from is not None, self.precision_plugin
        first = FirstWeights(game, self.root_device, seed, resumed and game.strict_loading, self._writers)
        servers = self.division.servers(game, self.choice, self.ending.wish)
        self.players.assign(game, self.choice, self._world(game.phases), precision, ranks, servers)
        self.saving = State(game, self.policies, ranks, self._writers, seed, first.frozen_files, attributes)
        self.players.adopt(first, self.saving.left_out, training, resumed, first_of_host=self.local_rank == 0)
        hooks = Hooks.of(trainer, game) if training else NO_HOOKS
        self.players.stop_other_parameters(game, training)
        tried = bool(self.check) and training and several
        self.steps = Steps(
            game, self.players, self.lockstep, ranks, hooks, tried, self.check == "often", self.check_replicas
        )
        self.optimizers = [policy.optimizer for policy in self.players.learners()]
        self.lr_scheduler_configs = self.players.schedules()
        self.setup_precision_plugin()

    def _ranks(self) -> Ranks:
        own = self.global_rank, self.world_size, self.root_device, self.num_processes
        return Ranks(*own, self.gather_objects, self.broadcast, self.reduce)

    def _world(self, phases: Sequence[Phase]) -> World:
        self.players.groups = Groups(phases, self._timeout)
        return World(self.world_size, self.global_rank, self.root_device, self.num_processes, self.players.groups)

    # ---- load a checkpoint ----

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
        self.saving.load_networks(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Everything else that training needs to resume."""
        self.saving.load_training(checkpoint)

    # ---- train ----

    def on_train_start(self) -> None:
        """What the game remembers comes back only here, after the game's own on_train_start."""
        super().on_train_start()
        self.lockstep.begin()
        self.saving.resume(self.lightning_module.trainer)
        self.steps.begin(self.precision_plugin, self.saving.seed)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """End here if any rank got a signal. If that is because a save has failed, raise that."""
        if self.ending.look():
            self.background.wait()
            raise Stopped

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.step(*args, **kwargs)

    def run(self, phase: Phase, batch: Any) -> None:
        """Play one phase. `GanModule.training_step` calls it for each phase that is due."""
        self.steps.run(phase, batch)

    def ask(self, phase: Phase) -> bool:
        """Whether a phase with a `when` is played: the first rank's answer, on all ranks."""
        return self.steps.ask(phase)

    def all_learning(self) -> AbstractContextManager[None]:
        """Inside the `with`, every player that can learn requires gradients: for a fake that several phases use."""
        return self.players.all_learning(any(phase.second_order for phase in self.lightning_module.phases))

    def on_train_end(self) -> None:
        """Make the author's weights whole again. Raise if ranks have gone different ways, or updates were skipped."""
        super().on_train_end()
        self.background.wait()
        self.lockstep.places.compare()
        self.players.give_back()
        self.steps.guard.raise_if_hopeless()

    # ---- save a checkpoint ----

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shares of the weights, and the other state of the modules."""
        return self.saving.networks()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """This rank's shares of a player's optimizer state."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        return optimizer_state(next(each for each in self.policies.values() if each.optimizer is optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's checkpoint, with the players' averages and scales and every rank's random states.

        Every rank writes its shares, to the path that the first rank gives. All machines must share this file system.
        """
        self.background.wait()
        self.lockstep.places.compare()
        path, name = self.saving.complete(checkpoint, filepath)
        if isinstance(storage_options, InBackground):
            write = partial(prepare(path, checkpoint, self._writers, copied=True), self._ranks_of_thread(name))
            self.background.start(write, self.ending.wish, storage_options.excuse)
        else:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

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

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, but only when the one that is being saved is whole."""
        if self.is_global_zero:
            self.background.afterwards(partial(self.checkpoint_io.remove_checkpoint, filepath))

    @property
    def _writers(self) -> SavingRanks:
        return SavingRanks(self.global_rank, self.world_size)

    def _ranks_of_thread(self, name: str) -> SavingRanks:
        if self.world_size == 1:
            return self._writers
        limit, lockstep = (self._timeout or default_pg_timeout).total_seconds(), self.lockstep
        return StoreRanks(self.global_rank, self.world_size, f"save {name}", limit, lambda: lockstep.lost)

    def take_back(self, trainer: Trainer, checkpoint: Path, loops: dict[str, Any]) -> None:
        """In the process that has started the ranks of dp: what training on one device would have left here."""
        trainer.lightning_module.trainer = trainer
        self.connect(trainer.lightning_module)
        self.resumes_from = checkpoint
        try:
            self.setup(trainer)
            private.restore(trainer, checkpoint)
            self.saving.take_back(loops)
        finally:
            self.teardown()
        trainer.fit_loop.load_state_dict({**loops, "state_dict": {}})
        trainer.fit_loop.restarting = False

    # ---- validate, with averaged weights, and disturb no training ----

    def set_random_states_aside(self) -> None:
        """Save training's random states before the loaders of a validation draw random numbers."""
        self.saving.set_random_states_aside()

    def on_validation_start(self) -> None:
        """Save them here too, for a validation that was not started by training."""
        self.saving.set_random_states_aside()

    def on_validation_end(self) -> None:
        """Restore training's random states, as if validation had drawn nothing."""
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

    @property
    def policies(self) -> dict[str, Policy]:
        """The policy of each player, by its name."""
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

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank. All ranks must call it."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @property
    def ending(self) -> Ending:
        """Whether the run ends before its last step, and by which signal."""
        return self.lockstep.ending

    def end_at_once(self, why: str) -> None:
        """End all ranks in the midst of what they do, and say why, once. For a signal handler."""
        self.lockstep.end_at_once(why, speaks=self.is_global_zero)

    # ---- the end ----

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.lockstep.places.tell()
        self.background.settle()

    def teardown(self) -> None:
        """Take the policies away, with hooks, process groups and shards. What training has changed stays."""
        self.until_teardown.close()
        self.players.release()
        self.background.close()
        self.lockstep.end()
        with without_values(self.lightning_module), same_parameters(self.root_device):
            super().teardown()
        if self.is_global_zero:
            self.lockstep.requeue()


def _game(module: LightningModule) -> GanModule:
    if not isinstance(module, GanModule):
        raise UserError(
            f"PhaseStrategy trains a gan.GanModule, got {type(module).__name__}; "
            f"derive it from GanModule, or use one of Lightning's own strategies"
        )
    return module

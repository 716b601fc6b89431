"""PhaseStrategy: the methods that Lightning calls on a strategy, for a game of several players."""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from gan.errors import UserError
from gan.making import aside
from gan.module import GanModule
from gan.phase import Phase
from nets.norm import convert_sync_batchnorm, unsynchronised
from strategies import private, threads
from strategies.assignment import assign, in_threads
from strategies.auto import USABLE, Auto, memory
from strategies.check.first_step import check_step
from strategies.check.trial import Trial, Trials
from strategies.checkpoint.finite import FiniteWeights
from strategies.checkpoint.left_out import LeftOut
from strategies.checkpoint.loadable import check_loadable
from strategies.checkpoint.saving_strategy import SavingStrategy, refuse_other
from strategies.choice import choices, ranks_as_typed
from strategies.first_weights import FirstWeights, without_values
from strategies.guard import Guard
from strategies.hooks import NO_HOOKS, Hooks, refuse_what_is_not_called
from strategies.loss_scale import LossScale
from strategies.placing.elsewhere import Elsewhere, leave
from strategies.placing.server import Server
from strategies.placing.servers import Servers
from strategies.placing.serving import Notice, Served, served
from strategies.policies import POLICIES
from strategies.policies.groups import Groups
from strategies.policies.policy import Policy, World
from strategies.policies.replica import ADVICE
from strategies.processes import heap
from strategies.ranks import Ranks
from strategies.replicas import compare_replicas, watching_writes
from strategies.sharding.resharded_parameter import resharded
from strategies.threads import ThreadRanks
from strategies.turn import PhaseContext, play


class PhaseStrategy(SavingStrategy):
    """Trains a `GanModule`, each player under a policy of its own.

    `policy` is a name for all players, or a mapping from player to name in which `*` stands for the rest:
    `PhaseStrategy("zero3")`, `PhaseStrategy({"generator": "zero3", "*": "ddp"})`. The form of the command line works
    too: `PhaseStrategy("generator=zero3,*=ddp")`. Options are added to a policy with `+`: `zero3+offload`.
    `check` tries the first step: on all ranks together, and on each as if it were one device (see check/first_step.py);
    `check="often"` tries every tenth step too, which finds what differs only later.
    `check_replicas` compares weights and buffers on all ranks after every phase. Processes, devices and the process
    group are Lightning's own: the other arguments are those of its DDPStrategy. `start_method` "spawn" starts the ranks
    from a script, "fork" from a notebook. `process_group_backend` is gloo, nccl or mpi; without it nccl on GPUs, else
    gloo. `init_method` is where ranks meet, if not at MASTER_ADDR and MASTER_PORT: `tcp://HOST:PORT`, or `file:///PATH`
    on a disk that they share (a file that does not exist yet).
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
            init_method=init_method,
            timeout=timeout,
            start_method=start_method,
        )
        self.choice = choices(policy, {**POLICIES, "auto": Auto})
        self.threaded = in_threads(self.choice)
        if self.threaded and self.cluster_environment is None:
            self.cluster_environment = LightningEnvironment()
        self.check, self.check_replicas = check, check_replicas
        self.trials = Trials()
        self.trial: Trial | None = None
        self.guard = Guard(self.gather_objects)
        self.groups = Groups()
        self.hooks = NO_HOOKS
        self.first: FirstWeights  # made in set-up
        self.losses: dict[str, Tensor] = {}  # of this step so far, and norms of gradients
        self.servers: list[Servers] = []  # the lines to the ranks that serve players
        self.keeps_memory = False  # freed memory, see [Note: memory that is kept] in processes/heap.py

    # ---- a step ----

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """One pass over the phases. Lightning counts it as one step, whatever the number of optimizers."""
        game = self.lightning_module
        self.guard.raise_if_hopeless()
        for policy in self.policies.values():
            policy.begin_step(game.step)
        self.equal_rows.begin(batch)
        with self.places.named():
            self._try_first(game, batch, *args, **kwargs)
            output = self._step(game, batch, *args, **kwargs)
            self.places.end_step()
            self._log(game)
        private.count_step(game.trainer)
        return output

    def _step(self, game: GanModule, batch: Any, *args: Any, **kwargs: Any) -> Any:
        game.forget_shared()
        self.losses = {}
        output = self.ranks.step(game, batch, *args, **kwargs)
        game.forget_shared()
        if not self.ending.played and any(phase.due(game.step, lambda _: False) for phase in game.phases):
            raise UserError(
                f"training_step() of {type(game).__name__} played no phase, so nothing has learned; call "
                f"super().training_step(batch) in it, or leave it out"
            )
        for policy in self.policies.values():
            policy.end_step(game.trainer.is_last_batch)
        return output

    def ask(self, phase: Phase) -> bool:
        """Whether a phase with a `when` is played: the first rank's answer, on all ranks."""
        return self.ranks.ask(phase.when, self.root_device) if self.trial is None else self.trials.ready(phase)

    def _try_first(self, game: GanModule, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Before a phase is played for the first time, or more often: check that ranks would train as one device."""
        if not self.trials.due(game.phases, game.step):
            return

        def step(trial: Trial, samples: Any) -> None:
            game.forget_shared()
            self.trial = trial
            for policy in self.policies.values():
                policy.trying = True
            try:
                samples = move_data_to_device(samples, self.root_device)
                self.ranks.step(game, samples, *args, tried_alone=trial.alone, **kwargs)
            finally:
                self.trial = None
                for policy in self.policies.values():
                    policy.trying = False
                    policy.learn(True)

        games = [game, *(replica.game for replica in self.ranks.other_replicas)]
        check_step(games, self._context(), batch, step, self.gather_objects)

    def run(self, phase: Phase, batch: Any) -> None:
        """Play one phase. `GanModule.training_step` calls it for each phase that is due."""
        context = self._context()
        if self.trial is not None:
            self.trial.play(phase, batch, context)
            return
        self.places.begin(context.step, phase.name)
        self.losses.update(play(phase, batch, context))
        self.ending.played += 1
        self.trials.played.add(phase.name)
        if self.check_replicas:
            self._compare_replicas(phase)

    def _context(self) -> PhaseContext:
        return PhaseContext(
            policies=self.policies,
            ranks=self.ranks,
            precision=self.precision_plugin,
            guard=self.guard,
            number=self.ranks.number,
            size=self.ranks.size,
            seed=self.seed,
            step=self.lightning_module.step,
            hooks=self.hooks,
            equal_rows=self.equal_rows,
        )

    def _log(self, game: GanModule) -> None:
        """Log the means over ranks of the step's losses, when a logger is due or the epoch ends.

        Not in every step, because Lightning's bookkeeping for a few numbers takes milliseconds.
        """
        if not (private.logs_are_due(game.trainer) or game.trainer.is_last_batch):
            return
        if self.losses:
            values = torch.stack([loss.float() for loss in self.losses.values()])
            self.losses = dict(zip(self.losses, self.reduce(values, reduce_op="mean"), strict=True))
        skipped = {f"{name}/skipped": float(policy.skipped) for name, policy in self.policies.items() if policy.skipped}
        game.log_dict({**self.losses, **skipped})

    def _compare_replicas(self, phase: Phase) -> None:
        replica = threads.here()
        game = self.lightning_module if replica is None else replica.game
        gather = self.gather_objects if replica is None else partial(self.ranks.every, "the comparison of replicas")
        compare_replicas(game, self.policies, gather, f"after phase '{phase.name}' of step {game.step}")

    # ---- whole weights ----

    @contextmanager
    def gathered(self, write: bool = False) -> Iterator[None]:
        """Inside the `with`, between phases, all players' parameters are whole. Every rank must call it.

        With `write` they may be written: all ranks write the same values, and each keeps its part of them. Without it
        a write is an error.
        """
        with ExitStack() as stack:
            for policy in self.policies.values():
                stack.enter_context(policy.gathered())
            with watching_writes(self.policies, write, self.gather_objects):
                yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the `with`, players that keep an average have their averaged weights. Every rank must call it."""
        if threads.here() is not None:
            raise UserError(f"averaged() in a step: under strategy dp the first device alone has averages; {ADVICE}")
        with ExitStack() as stack:
            for policy in self.policies.values():
                stack.enter_context(policy.averaged())
            yield

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Lightning's all_gather; in a step under dp, from all replicas."""
        if threads.here() is not None:
            return self.ranks.gather(tensor, sync_grads)
        return super().all_gather(tensor, group, sync_grads)

    @contextmanager
    def all_learning(self) -> Iterator[None]:
        """Inside the `with`, every player that can learn requires gradients: for a fake that several phases use."""
        second_order = any(phase.second_order for phase in self.lightning_module.phases)
        with ExitStack() as stack:
            for policy in self.policies.values():
                stack.enter_context(policy.for_several_phases())
            stack.enter_context(self.ranks.all_learning(self.policies, second_order))
            yield

    # ---- set-up ----

    def connect(self, model: LightningModule) -> None:
        """Lightning calls it first. What it refuses itself without our words is refused here."""
        super().connect(model)
        if isinstance(model, GanModule) and model.trainer.state.fn == TrainerFn.FITTING:
            refuse_what_is_not_called(model.trainer, model)

    def setup(self, trainer: Trainer) -> None:
        """Lightning's set-up, in its order. But each player gets its policy, instead of one wrapped module."""
        training = trainer.state.fn == TrainerFn.FITTING
        game = _game(self.lightning_module)
        if self.world_size == 1:
            private.leave_samplers(trainer)
        self.accelerator.setup(trainer)
        if self.placement is not None:
            game.assemble()
            for name, each in served(self.placement, self.choice, game).items():
                leave(game.players[name], f"ranks {ranks_as_typed(each.ranks)}")
        if training and trainer.checkpoint_callbacks:
            check_loadable({"hyper_parameters": dict(game.hparams)})
        if self.root_device.type == "cpu":
            private.stop_looking_for_gpus()
            self.keeps_memory = training and heap.keep_freed_memory()
        if training and self._layer_sync is not None:
            convert_sync_batchnorm(game)
        with aside(game, resharded):
            self.precision_plugin.convert_module(game)
        with without_values(game):
            self.model_to_device()
            if self.world_size > 1:
                private.broadcast_module(game)
        game.assemble()
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32))
        self.seed = self.broadcast(seed)
        self.agree_on_ending(trainer if training else None)
        resumed = self.resumes_from is not None and game.strict_loading
        self.first = FirstWeights(game, self.root_device, self.seed, resumed, self._saving_ranks())
        self._adopt_players(game, training)
        self.setup_precision_plugin()

    def _adopt_players(self, game: GanModule, training: bool) -> None:
        self.groups = Groups(game.phases, self._timeout)
        world = World(self.world_size, self.global_rank, self.root_device, self.num_processes, self.groups)
        elsewhere = self._servers(game)
        self.policies = assign(self.choice, game, world, self.precision_plugin, self._smallest, elsewhere)
        self.finite = FiniteWeights(game, game.players)
        self.left_out = LeftOut(game, self.policies, self.is_global_zero, self.first.frozen_files)
        self.first.begin(self.policies.values() if training else ())
        if training or self.resumes_from is not None:
            self.left_out.note(self.first.digests(first_of_host=self.local_rank == 0))
        self.ranks, self.guard = Ranks(self.global_rank, self.world_size), Guard(self.gather_objects)
        if training:
            # ModelCheckpoint thinks that a manual optimization wants weights from before the update.
            warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
            self._warn_of_unsynchronised_batch_norm()
        for policy in self.policies.values():
            policy.adopt(training)
            if _needs_loss_scale(self.precision_plugin):
                policy.loss_scale = LossScale()
        self.first.fill_shards()
        for servers in self.servers:
            servers.meet()
        for policy in self.policies.values():
            if training and policy.followed is not None:
                policy.follow()
        self.hooks = Hooks.of(game.trainer, game) if training else NO_HOOKS
        if training and self.threaded and len(self.parallel_devices) > 1:
            self.hooks.refuse_in_threads()
            self._make_replicas(game)
        players = {id(p) for player in game.players.values() for p in player.module.parameters()}
        for parameter in game.parameters():
            if id(parameter) not in players:
                parameter.requires_grad_(False)
        several = self.ranks.size > 1
        self.trials = Trials(game.phases if self.check and training and several else (), often=self.check == "often")
        learners = [policy for policy in self.policies.values() if policy.optimizer is not None]
        self.optimizers = [policy.optimizer for policy in learners]
        self.lr_scheduler_configs = [
            LRSchedulerConfig(policy.schedule, name=f"lr-{policy.player.name}")
            for policy in learners
            if policy.schedule is not None
        ]

    def _smallest(self, value: Tensor) -> Tensor:
        return self.reduce(value, reduce_op="min")

    def _servers(self, game: GanModule) -> dict[str, Servers]:
        """For each player that other ranks serve, the line to them."""
        if self.placement is None:
            return {}
        chosen = served(self.placement, self.choice, game)
        lines = {
            ranks: Servers(self.bridge, self.placement.training, ranks, self.ending.wish)
            for ranks in dict.fromkeys(self.placement.serving.values())
        }
        self.servers = list(lines.values())
        return {name: lines[each.ranks] for name, each in chosen.items()}

    def serve(self, trainer: Trainer, game: LightningModule | None = None, *args: Any, **kwargs: Any) -> None:
        """Serve players until the training ends: see [Note: serving]. Lightning's hooks for set-up are called."""
        game = _game(game or trainer.lightning_module)
        game.trainer = trainer
        self.connect(game)
        training = trainer.state.fn == TrainerFn.FITTING
        notice = Notice(self.signals)
        try:
            self.setup_environment()
            private.call_module(trainer, "setup", stage=trainer.state.fn.value)
            private.call_module(trainer, "configure_model")
            game.assemble()
            chosen = served(self.placement, self.choice, game)
            chosen = {name: each for name, each in chosen.items() if each.ranks == self.part.ranks}
            self.groups = Groups((), self._timeout)
            world = World(self.world_size, self.global_rank, self.root_device, self.num_processes, self.groups)
            part = Served(game, chosen, world, self.precision_plugin)
            self.policies = part.policies(training, self._smallest)
            Server(self.bridge, self.placement.training, self.part.ranks, self.policies, notice).run()
        finally:
            for policy in self.policies.values():
                policy.release()
            self.groups.release()
            self.signals.give_back()

    def _make_replicas(self, game: GanModule) -> None:
        self.ranks = ThreadRanks(game, self.parallel_devices, self.policies)
        rank_zero_warn(
            f"strategy dp: one process, and a replica with a thread for each of {len(self.parallel_devices)} devices. "
            f"All weights are copied to the others in every step; {self.root_device} alone adds up gradients and holds "
            f"the optimizers' states and averages; the threads take turns at Python. That is for a quick try; to "
            f"train, {ADVICE}"
        )

    def _warn_of_unsynchronised_batch_norm(self) -> None:
        if self.world_size == 1 and not (self.threaded and len(self.parallel_devices) > 1):
            return
        for policy in self.policies.values():
            for name in () if policy.player.frozen else unsynchronised(policy.player.module):
                rank_zero_warn(
                    f"player '{policy.player.name}': batch norm '{name}' sees only its own rank's samples, so "
                    f"training differs from one device's; type Trainer(sync_batchnorm=True)"
                )
                return

    def on_train_end(self) -> None:
        """Make the author's weights whole again. Raise if ranks have gone different ways, or updates were skipped."""
        super().on_train_end()
        self.places.compare()
        for policy in self._fitting():
            policy.storage.unshard(exact=True)
        self.guard.raise_if_hopeless()

    def _fitting(self) -> list[Policy]:
        """The policies whose players may be whole now. A network that never was may be too large for that."""
        if not self.first.begin_sharded:
            return list(self.policies.values())
        free = torch.tensor(memory(self.root_device, self.num_processes), dtype=torch.float64).to(self.root_device)
        free = self.reduce(free, reduce_op="min").item() * USABLE
        fitting = []
        for policy in self.policies.values():
            if isinstance(policy, Elsewhere):
                continue
            if self.first.bytes_of(policy) > max(free, 0):
                rank_zero_warn(
                    f"player '{policy.player.name}' stays sharded after the training, for its weights do not fit into "
                    f"half of the memory that is free; load a checkpoint to use it"
                )
            else:
                fitting.append(policy)
                free -= self.first.bytes_of(policy)
        return fitting

    def teardown(self) -> None:
        """Restore the networks to what they were before training."""
        if isinstance(self.ranks, ThreadRanks):
            self.ranks.close()
        self.ranks = Ranks()
        for servers in self.servers:
            servers.end()
        self.servers = []
        for policy in self.policies.values():
            policy.release()
        self.groups.release()
        with without_values(self.lightning_module):
            super().teardown()
        if self.keeps_memory:
            heap.give_freed_memory_back()
            self.keeps_memory = False

    # ---- evaluation uses averaged weights, and disturbs no training ----

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """With averaged weights, but only during the step: between steps a checkpoint may save the raw weights."""
        with self.averaged():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """With averaged weights."""
        with self.averaged():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """With averaged weights."""
        with self.averaged():
            return super().predict_step(*args, **kwargs)


def _game(module: LightningModule) -> GanModule:
    if not isinstance(module, GanModule):
        raise UserError(
            f"PhaseStrategy trains a gan.GanModule, got {type(module).__name__}; "
            f"derive it from GanModule, or use one of Lightning's own strategies"
        )
    return module


def _needs_loss_scale(precision: Precision) -> bool:
    """Whether small gradients would become zero without a loss scale."""
    return isinstance(precision, MixedPrecision) and precision.precision == "16-mixed"

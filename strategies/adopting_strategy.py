"""The part of PhaseStrategy that gives each player its policy before training, and gives the networks back after it."""

import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from gan.files.errors import UserError
from gan.making import aside
from gan.module import GanModule
from nets.norm import synchronised
from strategies import private
from strategies.accelerator import same_parameters
from strategies.assignment import assign, in_threads
from strategies.auto import USABLE, Auto, memory
from strategies.checkpoint.attributes import Attributes
from strategies.checkpoint.game_state import FiniteWeights
from strategies.checkpoint.left_out import LeftOut
from strategies.checkpoint.writing import check_loadable
from strategies.choice import choices, ranks_as_typed
from strategies.draws import Following
from strategies.first_weights import FirstWeights, without_values
from strategies.guard import Guard
from strategies.hooks import NO_HOOKS, GameFirst, Hooks, refuse_what_is_not_called
from strategies.loss_scale import LossScale
from strategies.placing.elsewhere import Elsewhere, leave
from strategies.placing.server import Server
from strategies.placing.servers import Servers
from strategies.policies import POLICIES
from strategies.policies.policy import Policy
from strategies.policies.replica import ADVICE
from strategies.policies.world import Groups, World
from strategies.processes import heap
from strategies.ranks import Ranks
from strategies.saving_strategy import SavingStrategy
from strategies.serving import Notice, Served, served
from strategies.sharding.resharded_parameter import resharded
from strategies.threads import ThreadRanks


class AdoptingStrategy(SavingStrategy):
    """Sets up the policies of all players, and takes them down. `policy` says which, as PhaseStrategy explains."""

    def __init__(self, policy: str | Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.choice = choices(policy, {**POLICIES, "auto": Auto})
        self.threaded = in_threads(self.choice)
        if self.threaded and self.cluster_environment is None:
            self.cluster_environment = LightningEnvironment()
        self.guard = Guard(self.gather_objects)
        self.groups = Groups()
        self.hooks = NO_HOOKS
        self.first: FirstWeights  # made in set-up
        self.servers: list[Servers] = []  # the lines to the ranks that serve players
        self.following = Following()  # draws that follow the samples
        self.batch_norms = ExitStack()  # they are synchronised while a game trains on several ranks
        self.keeps_memory = False  # freed memory, see [Note: memory that is kept] in processes/heap.py

    # ---- before training ----

    def connect(self, model: LightningModule) -> None:
        """Lightning calls it first. Some settings it would refuse later, with words that do not help; so do it here."""
        super().connect(model)
        if isinstance(model, GanModule) and model.trainer.state.fn == TrainerFn.FITTING:
            refuse_what_is_not_called(model.trainer, model)

    def setup(self, trainer: Trainer) -> None:
        """Lightning's set-up, in its order. But each player gets its policy, instead of one wrapped module."""
        training = trainer.state.fn == TrainerFn.FITTING
        game = _game(self.lightning_module)
        if training and trainer.checkpoint_callbacks:
            check_loadable({"hyper_parameters": dict(game.hparams)})

        # The devices, and the networks on them. What other ranks serve is not needed here.
        if self.world_size == 1:
            private.leave_samplers(trainer)
        self.accelerator.setup(trainer)
        if isinstance(self.precision_plugin, MixedPrecision):
            self.precision_plugin.device = self.root_device.type  # Lightning says cuda for what it does not know
        if training:
            self.following.begin(self.root_device)
        if self.root_device.type == "cpu":
            private.stop_looking_for_gpus()
            self.keeps_memory = training and heap.keep_freed_memory()
        if self.placement is not None:
            game.assemble()
            for name, each in served(self.placement, self.choice, game).items():
                leave(game.players[name], f"ranks {ranks_as_typed(each.ranks)}")
        if training:
            trainer.callbacks = [GameFirst(), *(each for each in trainer.callbacks if not isinstance(each, GameFirst))]
        if training and self._layer_sync is not None and max(self.world_size, len(self.parallel_devices)) > 1:
            self.batch_norms.enter_context(synchronised())
        with aside(game, resharded):
            self.precision_plugin.convert_module(game)
        with without_values(game), same_parameters(self.root_device):
            self.model_to_device()
            if self.world_size > 1:
                private.broadcast_module(game)
        game.assemble()
        self.attributes = Attributes(game, self.root_device) if training else None

        # What all ranks must agree on.
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32))
        self.seed = self.broadcast(seed)
        self.agree_on_ending(trainer if training else None)

        # The players, and what Lightning wants to know of them.
        resumed = self.resumes_from is not None and game.strict_loading
        self.first = FirstWeights(game, self.root_device, self.seed, resumed, self._saving_ranks())
        self._adopt_players(game, training)
        learners = [policy for policy in self.policies.values() if policy.optimizer is not None]
        self.optimizers = [policy.optimizer for policy in learners]
        self.lr_scheduler_configs = [
            LRSchedulerConfig(policy.schedule, name=f"lr-{policy.player.name}")
            for policy in learners
            if policy.schedule is not None
        ]
        self.setup_precision_plugin()

    def _adopt_players(self, game: GanModule, training: bool) -> None:
        # Which policy each player has.
        self.groups = Groups(game.phases, self._timeout)
        world = World(self.world_size, self.global_rank, self.root_device, self.num_processes, self.groups)
        elsewhere = self._servers(game)
        self.policies = assign(self.choice, game, world, self.precision_plugin, self._smallest, elsewhere)
        self.ranks, self.guard = Ranks(self.global_rank, self.world_size), Guard(self.gather_objects)
        if training:
            # ModelCheckpoint thinks that a manual optimization wants weights from before the update.
            warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")

        # Their first weights. What a policy shards gets its values after it has adopted its player.
        self.finite = FiniteWeights(game, game.players)
        self.left_out = LeftOut(game, self.policies, self.is_global_zero, self.first.frozen_files)
        self.first.begin(self.policies.values() if training else ())
        if training or self.resumes_from is not None:
            self.left_out.note(self.first.digests(first_of_host=self.local_rank == 0))
        for policy in self.policies.values():
            policy.adopt(training)
            if _needs_loss_scale(self.precision_plugin):
                policy.loss_scale = LossScale()
        self.first.fill_shards()

        # What needs all of them: serving ranks, followers, hooks of the author, replicas under dp.
        for servers in self.servers:
            servers.meet()
        for policy in self.policies.values():
            if training and policy.followed is not None:
                policy.follow()
        self.hooks = Hooks.of(game.trainer, game) if training else NO_HOOKS
        if training and self.threaded and len(self.parallel_devices) > 1:
            self.hooks.refuse_in_threads()
            self._make_replicas(game)

        # A parameter of no player is never updated, so it requires no gradient.
        of_players = {id(p) for player in game.players.values() for p in player.module.parameters()}
        lost = [name for name, each in game.named_parameters(recurse=False) if id(each) not in of_players]
        if training and lost:
            rank_zero_warn(f"'{lost[0]}' is a parameter of no player, and never learns; put it into a player's module")
        for parameter in game.parameters():
            if id(parameter) not in of_players:
                parameter.requires_grad_(False)

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
            if training:
                self.following.begin(self.root_device)
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
            self.following.end()
            self.signals.give_back()

    def _make_replicas(self, game: GanModule) -> None:
        self.ranks = ThreadRanks(game, self.parallel_devices, self.policies)
        rank_zero_warn(
            f"strategy dp: one process, and a replica with a thread for each of {len(self.parallel_devices)} devices. "
            f"All weights are copied to the others in every step; {self.root_device} alone adds up gradients and holds "
            f"the optimizers' states and averages; the threads take turns at Python. That is for a quick try; to "
            f"train, {ADVICE}"
        )

    # ---- after training ----

    def on_train_end(self) -> None:
        """Make the author's weights whole again. Raise if ranks have gone different ways, or updates were skipped."""
        super().on_train_end()
        self.places.compare()
        for policy in self._that_fit_whole():
            policy.storage.unshard(exact=True)
        self.guard.raise_if_hopeless()

    def _that_fit_whole(self) -> list[Policy]:
        """The policies whose weights fit on this rank as a whole. Those that were sharded from the start may not."""
        if not self.first.begin_sharded:
            return list(self.policies.values())
        free = torch.tensor(memory(self.root_device, self.num_processes), dtype=torch.float64).to(self.root_device)
        free = self.reduce(free, reduce_op="min").item() * USABLE
        small = []
        for policy in self.policies.values():
            if isinstance(policy, Elsewhere):
                continue
            if self.first.bytes_of(policy) > max(free, 0):
                rank_zero_warn(
                    f"player '{policy.player.name}' stays sharded after the training, for its weights do not fit into "
                    f"half of the memory that is free; load a checkpoint to use it"
                )
            else:
                small.append(policy)
                free -= self.first.bytes_of(policy)
        return small

    def teardown(self) -> None:
        """Take the policies away, with hooks, process groups and shards. What training has changed stays."""
        self.batch_norms.close()
        if isinstance(self.ranks, ThreadRanks):
            self.ranks.close()
        self.ranks = Ranks()
        for servers in self.servers:
            servers.end()
        self.servers = []
        for policy in self.policies.values():
            policy.release()
        self.groups.release()
        self.following.end()
        with without_values(self.lightning_module), same_parameters(self.root_device):
            super().teardown()
        if self.keeps_memory:
            heap.give_freed_memory_back()
            self.keeps_memory = False


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

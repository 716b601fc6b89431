"""The players of a game, each under its policy: from the set-up of a training to its end."""

import os
import signal
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import Optimizer

from datasets.workers import Loader
from gan.ema import Ema
from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Player
from strategies import private
from strategies.accelerator import correct_precision
from strategies.advice import type_instead
from strategies.batches.draw_kernels import draws_follow
from strategies.check.replicas import Writes
from strategies.checkpoint import first_weights
from strategies.checkpoint.attributes import Attributes
from strategies.checkpoint.first_weights import FirstWeights
from strategies.checkpoint.player_state import Averages, last_averages, remember_averages, show_averages
from strategies.checkpoint.state import State
from strategies.checkpoint.writing import check_loadable
from strategies.optimizers.updater import LossScale, Updater
from strategies.options.compile import compiling
from strategies.placing.division import part_of
from strategies.placing.remote_player import RemotePlayer, Servers
from strategies.policies.choice import Choice
from strategies.policies.policy import Policy
from strategies.processes.stopping import SIGNALS, handle
from strategies.sharding.bucket import UNSHARDED
from strategies.training.assignment import USABLE, assign, memory
from strategies.training.ranks_strategy import RanksStrategy
from strategies.training.steps import while_training
from strategies.world import World

LOOKS = 3  # after so many uses of gathered() it is looked for memory that code keeps of weights


class Players:
    """Empty before set-up. `servers` are the lines to the ranks that serve players."""

    def __init__(self) -> None:
        self.policies: dict[str, Policy] = {}
        self.servers: Mapping[str, Servers] = {}
        self.world = World()
        self.first: FirstWeights  # made in set-up
        self.compiling = ExitStack()
        self._writes: Writes | None = None  # inside gathered()
        self._averaging = False  # inside averaged()
        self._looks = LOOKS

    # ---- set-up, in this order ----

    def assign(self, strategy: RanksStrategy, game: GanModule, choice: Mapping[str, Choice]) -> None:
        self.world, precision = strategy.world, strategy.precision_plugin
        self.policies = assign(choice, game, self.world, precision, self.servers)
        if _needs_loss_scale(precision):
            scaler = getattr(precision, "scaler", None)  # off where the device has none: Lightning makes it for cuda
            begin = (scaler.get_scale(), scaler.get_growth_interval()) if scaler and scaler.is_enabled() else ()
            for policy in self.policies.values():
                policy.loss_scale = LossScale(*begin)

    def adopt(self, first: FirstWeights, training: bool) -> None:
        """Their first weights. What a policy shards gets its values after the policy has adopted its player."""
        self.first = first
        first.begin(self.policies.values() if training else ())
        for policy in self.policies.values():
            policy.adopt(training)
            if self.world.size > 1 and not policy.in_stages:
                _refuse_rows_of_samples(policy.player)
        first.fill_shards()
        if any(policy.compiled or policy.compiled_by_author for policy in self.policies.values()):
            self.compiling.enter_context(compiling())

        # What needs all of them: serving ranks, followers.
        for servers in dict.fromkeys(self.servers.values()):
            servers.meet()
        for policy in self.policies.values():
            if training:
                policy.follow()
        _stop_what_never_learns(first.game, training)

    def updaters(self) -> dict[str, Updater]:
        """What updates them, by the names of their learning rates: lr-PLAYER, or lr-PLAYER-PHASE."""
        return {
            "-".join(filter(None, ("lr", name, phase))): updater
            for name, policy in self.policies.items()
            for phase, updater in policy.updaters.items()
        }

    def optimizers(self) -> list[Optimizer]:
        return [each.optimizer for each in self.updaters().values()]

    def schedules(self) -> list[LRSchedulerConfig]:
        """Their schedules, as Lightning names them to callbacks."""
        updaters = self.updaters().items()
        return [LRSchedulerConfig(each.schedule, name=name) for name, each in updaters if each.schedule is not None]

    # ---- whole weights ----

    @contextmanager
    def gathered(self, write: bool) -> Iterator[None]:
        self.world.owed.catch_up()
        with ExitStack() as stack:
            for policy in self.policies.values():
                stack.enter_context(policy.gathered())
                if self._writes is None:  # no other gathered() is around this one
                    stack.enter_context(policy.plain())
            writes = Writes(self.policies, write, self.world)
            stack.enter_context(mock.patch.object(self, "_writes", writes))
            with self.world.owed.then(lambda: writes.look(self._averaging)):
                yield
                self.world.owed.catch_up()
            if UNSHARDED and self._looks:  # it takes too long for each time
                self._looks -= 1
                first_weights.refuse_views_of_gathered(self.first.game)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        if self._averaging:  # a validation step is inside already
            yield
            return
        self.world.owed.catch_up()
        writes = self._writes
        if writes is not None:
            writes.look(averaged=False)()
        with ExitStack() as stack:
            if writes is not None:
                stack.enter_context(self.world.owed.then(lambda: partial(self._go_on, writes)))
            stack.enter_context(mock.patch.object(self, "_averaging", True))
            if self.policies and (kept := last_averages(self.first.game)):
                stack.callback(remember_averages, self.first.game, kept)  # that is no write of a person's
            for policy in self.policies.values():
                stack.enter_context(policy.averaged())
            if writes is not None:
                writes.begin()
                stack.enter_context(self.world.owed.then(lambda: writes.look(averaged=True)))
            yield
            self.world.owed.catch_up()

    def _go_on(self, writes: Writes) -> None:
        """After averaged(), the weights of before are whole again, for the rest of gathered()."""
        self._unshard(self.policies.values())
        writes.begin()

    # ---- the end ----

    def give_back(self) -> None:
        """Make the author's weights whole again, where they fit on this rank."""
        self.world.owed.catch_up()
        # The averages that this rank has whole, which a validation after the training shows.
        whole = {name: each for name, each in self.policies.items() if each.storage.owned is each.storage.weights}
        averages = {name: each.ema.state_dict() for name, each in whole.items() if isinstance(each.ema, Ema)}
        self._unshard(self._that_fit() if self.first.begin_sharded else self.policies.values())
        remember_averages(self.first.game, averages)

    def _that_fit(self) -> list[Policy]:
        free = min(self.world.gather(memory(self.world.device, self.world.per_node))) * USABLE
        small = []
        for policy in self.policies.values():
            if isinstance(policy, RemotePlayer):
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

    def _unshard(self, policies: Iterable[Policy]) -> None:
        for policy in policies:
            policy.storage.unshard(exact=True)

    def release(self) -> None:
        for servers in dict.fromkeys(self.servers.values()):
            servers.end()
        self.servers = {}
        for policy in self.policies.values():
            policy.release()
        self.compiling.close()
        self.world.groups.release()
        self.world.owed.work.clear()


def _stop_what_never_learns(game: GanModule, training: bool) -> None:
    """A parameter of no player is never updated, so it requires no gradient. In a training, say what never learns."""
    of_players = {id(p) for player in game.players.values() for p in player.module.parameters()}
    lost = [name for name, each in game.named_parameters(recurse=False) if id(each) not in of_players]
    if training and lost:
        rank_zero_warn(f"'{lost[0]}' is a parameter of no player, and never learns; put it into a player's module")
    for parameter in game.parameters():
        if id(parameter) not in of_players:
            parameter.requires_grad_(False)
    if not training:
        return
    taught = {name for phase in game.phases for name in phase.learners}
    for player in game.players.values():
        if not player.frozen and player.name not in taught:
            rank_zero_warn(
                f"player '{player.name}' has an optimizer, and no phase teaches it, so it never learns; yield "
                f"Phase(..., learners='{player.name}'), or leave its optimizer out"
            )

    # Lightning warns of modules in eval mode. It need not where the author has put none there: see Policy.adopt.
    frozen = {part for player in game.players.values() if player.frozen for part in player.module.modules()}
    if all(part.training or part in frozen for part in game.modules()):
        warnings.filterwarnings("ignore", message="Found .* in eval mode at the start of training")


def _refuse_rows_of_samples(player: Player) -> None:
    """torch rescales rows of such a table when they are read. A rank reads those of its own samples."""
    for name, module in player.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UserError(
                f"player '{player.name}': {name or 'it'} has max_norm={module.max_norm}, by which each rank would "
                f"rescale the rows that its own samples read; leave max_norm out and type Player(..., after=...), a "
                f"function that rescales all rows, or type {type_instead(player.name, 'pipeline')}"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
            raise UserError(
                f"player '{player.name}': {name or 'it'} has scale_grad_by_freq=True, by which each rank would count "
                f"its own samples; leave it out, or type {type_instead(player.name, 'pipeline')}"
            )


def _needs_loss_scale(precision: Precision) -> bool:
    """Whether small gradients would become zero without a loss scale."""
    return isinstance(precision, MixedPrecision) and precision.precision == "16-mixed"


# ---- how a rank sets up what it trains or serves, in Lightning's order ----


@contextmanager
def on_devices(strategy: RanksStrategy, game: GanModule) -> Iterator[None]:
    """Inside the `with` this rank's device, loaders and batch norms are ready for a game."""
    trainer = game.trainer
    training, several = trainer.state.fn == TrainerFn.FITTING, strategy.world_size > 1
    if training and trainer.checkpoint_callbacks:
        check_loadable({"hyper_parameters": dict(game.hparams)})
    with ExitStack() as stack:
        stack.enter_context(private.keeping_loaders(Loader))
        if not several or strategy.is_dp:
            stack.enter_context(private.leaving_samplers(trainer, held_out=not several))
        assert strategy.accelerator is not None
        strategy.accelerator.setup(trainer)
        correct_precision(strategy.precision_plugin, strategy.root_device)
        if training:
            synchronise = several and strategy._layer_sync is not None
            stack.enter_context(while_training(game, strategy.root_device, synchronise))
        yield


def set_up_players(strategy: RanksStrategy, game: GanModule, players: Players, averages: Averages) -> State:
    """Put the networks on the device, and give each player its policy. Returns what a checkpoint of it has.

    `averages` are those of a training before, which another process did. What other ranks serve is not needed here.
    """
    training, several = game.trainer.state.fn == TrainerFn.FITTING, strategy.world_size > 1
    strategy.division.leave_to_others(game, strategy.choice)
    first_weights.refuse_lazy(game)
    if several:
        first_weights.refuse_one_memory(game)
        first_weights.refuse_other_networks(game, [game], strategy.world)  # which `move_game` makes those of rank 0
    averages = averages or last_averages(game)
    first_weights.move_game(game, strategy.root_device, strategy.precision_plugin, everywhere=several)
    game.assemble()

    # What all ranks must agree on.
    strategy.groups.phases, world = game.phases, strategy.world
    seed = world.broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32)))
    strategy.lockstep.name_run(world, game.trainer if training else None)
    if several:
        modules = [player.module for player in game.players.values()]
        first_weights.refuse_other_networks(game, modules, world)  # a list of weights may have an order of its own

    # The players.
    resumed = strategy.resumes_from is not None
    first = FirstWeights(game, world, seed, resumed and game.strict_loading)
    attributes = Attributes(game, strategy.root_device) if training else None
    players.servers = strategy.division.servers(game, strategy.choice, strategy.ending.wish)
    players.assign(strategy, game, strategy.choice)
    state = State(first, players.policies, attributes)
    if training or resumed:
        state.left_out.note_files(first_of_host=strategy.local_rank == 0)
    with first_weights.refuse_old_views(game) if training and several else nullcontext():
        players.adopt(first, training)
    if not (training or resumed):
        show_averages(game, players.policies, averages)
    return state


def serve_players(strategy: RanksStrategy, game: GanModule, players: Players, *given: Any) -> None:
    """Set up the players that this rank serves, and answer the ranks that train. See [Note: serving].

    `given` is what `fit` was given beside the game: Lightning's set-up hooks are called.
    """
    training = game.trainer.state.fn == TrainerFn.FITTING
    with ExitStack() as stack:
        # The ranks that train are told of a signal, and end together. They also decide what Ctrl-C means.
        stack.enter_context(handle(SIGNALS, strategy.ending.wish))
        stack.enter_context(handle((signal.SIGINT,), lambda *_: None))
        strategy.setup_environment()
        if training:
            stack.enter_context(draws_follow(strategy.root_device))
        private.call_setup_hooks(game.trainer, game, *given)
        chosen = strategy.division.served_here(game, strategy.choice)
        part = part_of(game, chosen)
        first_weights.move_game(part, strategy.root_device, strategy.precision_plugin)
        players.assign(strategy, part, chosen)
        players.adopt(FirstWeights(part, strategy.world, seed=0, resumed=False), training)
        strategy.division.serve(players.policies, lambda: strategy.ending.noted)
        players.release()  # after an error `teardown` does so

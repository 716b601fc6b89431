"""How a rank sets up what it trains, in Lightning's order. But each player gets its policy: no module is wrapped."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn

from datasets.workers import Loader
from gan.module import GanModule
from strategies import private
from strategies.accelerator import correct
from strategies.checkpoint.attributes import Attributes
from strategies.checkpoint.player_state import Averages, last_averages, show_averages
from strategies.checkpoint.state import State
from strategies.checkpoint.writing import check_loadable
from strategies.draws import draws_follow
from strategies.first_weights import FirstWeights, move, refuse_lazy, refuse_one_memory
from strategies.placing.division import part_of
from strategies.players import Players
from strategies.processes.stopping import SIGNALS
from strategies.ranks_strategy import RanksStrategy
from strategies.steps import while_training


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
        correct(strategy.precision_plugin, strategy.root_device)
        if training:
            synchronise = several and strategy._layer_sync is not None
            stack.enter_context(while_training(trainer, strategy.root_device, synchronise))
        yield


def set_up_players(strategy: RanksStrategy, game: GanModule, players: Players, averages: Averages) -> State:
    """Put the networks on the device, and give each player its policy. Returns what a checkpoint of it has.

    `averages` are those of a training before, which another process did. What other ranks serve is not needed here.
    """
    training, several = game.trainer.state.fn == TrainerFn.FITTING, strategy.world_size > 1
    strategy.division.leave_to_others(game, strategy.choice)
    refuse_lazy(game)
    if several:
        refuse_one_memory(game)
    averages = averages or last_averages(game)
    move(game, strategy.root_device, strategy.precision_plugin, everywhere=several)
    game.assemble()
    attributes = Attributes(game, strategy.root_device) if training else None

    # What all ranks must agree on.
    strategy.groups.phases, world = game.phases, strategy.world
    seed = world.broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32)))
    strategy.lockstep.name_run(world, game.trainer if training else None)

    # The players.
    resumed = strategy.resumes_from is not None
    first = FirstWeights(game, world, seed, resumed and game.strict_loading)
    players.servers = strategy.division.servers(game, strategy.choice, strategy.ending.wish)
    players.assign(strategy, game, strategy.choice)
    state = State(first, players.policies, attributes)
    if training or resumed:
        state.left_out.note_files(first_of_host=strategy.local_rank == 0)
    players.adopt(first, training)
    if not (training or resumed):
        show_averages(game, players.policies, averages)
    return state


def serve_players(strategy: RanksStrategy, game: GanModule, players: Players, *given: Any) -> None:
    """Set up the players that this rank serves, and answer the ranks that train. See [Note: serving].

    `given` is what `fit` was given beside the game: Lightning's set-up hooks are called.
    """
    training, signals = game.trainer.state.fn == TrainerFn.FITTING, strategy.lockstep.signals
    with ExitStack() as stack:
        stack.callback(signals.give_back)
        # The ranks that train are told of a signal, and end together. They also decide what Ctrl-C means.
        signals.take(SIGNALS, strategy.ending.wish)
        signals.take((signal.SIGINT,), lambda *_: None)
        strategy.setup_environment()
        if training:
            stack.enter_context(draws_follow(strategy.root_device))
        private.call_setup_hooks(game.trainer, game, *given)
        chosen = strategy.division.served_here(game, strategy.choice)
        part = part_of(game, chosen)
        move(part, strategy.root_device, strategy.precision_plugin)
        players.assign(strategy, part, chosen)
        players.adopt(FirstWeights(part, strategy.world, seed=0, resumed=False), training)
        strategy.division.serve(players.policies, lambda: strategy.ending.noted)
        players.release()  # after an error `teardown` does so

"""The steps of a training: each is one pass over the phases of the game."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from gan.module import GanModule
from gan.phase import Phase
from nets.norm import synchronised
from strategies import private
from strategies.batches.draw_kernels import draws_follow
from strategies.batches.draws import for_all_ranks
from strategies.check.replicas import compare_replicas, compare_settings
from strategies.hooks import GameFirst, draws_alike
from strategies.optimizers.making import check_saved, check_unaltered
from strategies.processes import heap
from strategies.training.incoming import Incoming
from strategies.training.lockstep import Lockstep
from strategies.training.logged import Logged
from strategies.training.watch import Check, Watch
from strategies.turn import Training, play


class Steps:
    """Made when training begins: then all that a phase needs is known, also what a checkpoint has.

    `check` is PhaseStrategy's: each phase is tried before its first time, and again. `compared`: weights and buffers
    are compared on all ranks after every phase. `to_device` is Lightning's way of a batch.
    """

    def __init__(
        self, training: Training, lockstep: Lockstep, check: Check, compared: bool, to_device: Callable[..., Any]
    ) -> None:
        game = training.game
        training.batches.begin(game.trainer.train_dataloader)
        for phase in game.phases:  # what is logged of it is a mean over ranks already
            warnings.filterwarnings("ignore", rf"It is recommended to use `self.log\('{re.escape(phase.name)}/")
        self.game, self.training, self.lockstep, self.compared = game, training, lockstep, compared
        self.guard, self.policies = training.guard, training.policies
        for policy in self.policies.values():
            if training.checked and policy.storage.owns_pieces:
                check_unaltered(policy.player, policy.updaters.values(), policy.name)
        training.draws.compiled = any(each.compiled or each.compiled_by_author for each in self.policies.values())
        self.incoming = Incoming(training, lockstep.whereabouts, to_device)
        self.watch = Watch(training, self.incoming, check)
        self.logged = Logged(training, lockstep.whereabouts)
        self.stepped = False

    def step(self, play: Callable[[Any], Any], batch: Any) -> Any:
        """One pass over the phases, `play(batch)`, and trials of it where they are due. Lightning counts one step."""
        game, step, several = self.game, self.game.step, self.training.world.size > 1
        one_pass = partial(self._pass, play)
        self.guard.raise_if_hopeless()
        self.incoming.agree(batch)
        tried = self.watch.due()
        with for_all_ranks(self.training.seed, step, "freeze"):
            for policy in self.policies.values():
                policy.begin_step(step, tried and several)
        self.watch.begin()
        self.lockstep.whereabouts.begin_step(step)
        with self.lockstep.whereabouts.named():
            if tried:
                self.watch.try_step(one_pass, batch, first=step == 0)
            self.logged.begin_step()
            output = one_pass(batch)
            self.watch.end(one_pass, batch)
            for policy in self.policies.values():
                if not self.stepped:
                    check_saved(policy.player, policy.updaters.values())
                policy.end_step(game.trainer.is_last_batch)
            self.stepped = True
            if tried and several:
                compare_settings(self.policies, self.training.world, step)
            self.lockstep.whereabouts.end_step()
            self.logged.end_step()
        private.count_step(game.trainer)
        return output

    def _pass(self, play: Callable[[Any], Any], batch: Any) -> Any:
        self._forget()
        output = play(batch)
        self._forget()
        return output

    def _forget(self) -> None:
        self.game.forget_shared()
        self.training.batches.forget_parts()

    def due(self) -> Iterator[Phase]:
        """The phases to be played in this step. Whether the next one is due may depend on what this one does."""
        return (phase for phase in self.game.phases if phase.due(self.game.step, self.watch.asked))

    def run(self, phase: Phase, batch: Any) -> None:
        self.training.world.owed.catch_up()
        if self.watch.trial is not None:
            self.watch.play(phase, batch)
            return
        step = self.game.step
        self.lockstep.whereabouts.begin(step, phase.name)
        self.logged.losses.update(play(phase, batch, step, self.training))
        self.lockstep.ending.played += 1
        self.watch.played(phase)
        if self.compared:
            when = f"after phase '{phase.name}' of step {step}"
            compare_replicas(self.game, self.policies, self.training.world, when)


@contextmanager
def while_training(game: GanModule, device: torch.device, synchronise: bool) -> Iterator[None]:
    """What differs here while a game trains. With `synchronise` batch norms have statistics of all ranks."""
    trainer = game.trainer
    others = [each for each in private.callbacks(trainer) if not isinstance(each, GameFirst)]
    private.set_callbacks(trainer, [GameFirst(), *others])
    # ModelCheckpoint thinks that a manual optimization wants weights from before the update.
    warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
    with ExitStack() as stack:
        stack.enter_context(draws_follow(device))
        stack.enter_context(draws_alike(game))
        if synchronise:
            stack.enter_context(synchronised(training=True))
        if device.type == "cpu" and heap.keep_freed_memory():  # see [Note: memory that is kept]
            stack.callback(heap.give_freed_memory_back)
        yield

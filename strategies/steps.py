"""The steps of a training: each is one pass over the phases of the game."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from strategies import private, threads
from strategies.check.first_step import check_step
from strategies.check.trial import Trial, Trials
from strategies.checkpoint.saving import Saving
from strategies.draws import Draws
from strategies.guard import Guard
from strategies.hooks import Hooks
from strategies.lockstep import Lockstep
from strategies.players import Gather, Players, Reduce
from strategies.ranks import Ranks
from strategies.replicas import compare_replicas
from strategies.turn import PhaseContext, play


class Steps:
    """Made in set-up. `tried`: each phase is tried before its first time, and again (see check/first_step.py)."""

    def __init__(
        self,
        game: GanModule,
        players: Players,
        ranks: Ranks,
        lockstep: Lockstep,
        precision: Precision,
        saving: Saving,
        hooks: Hooks,
        gather: Gather,
        tried: bool,
        often: bool,
        compared: bool,
    ) -> None:
        self.game, self.players, self.ranks, self.lockstep, self.saving = game, players, ranks, lockstep, saving
        self.hooks, self.gather, self.compared = hooks, gather, compared
        self.guard, self.draws = Guard(gather), Draws()
        self.trials = Trials(game.phases if tried else (), often)
        self.trial: Trial | None = None
        self.losses: dict[str, Tensor] = {}  # of this step so far, and norms of gradients
        self.context = PhaseContext(
            policies=players.policies,
            ranks=ranks,
            precision=precision,
            guard=self.guard,
            number=ranks.number,
            size=ranks.size,
            seed=saving.seed,
            step=0,
            hooks=hooks,
            equal_rows=lockstep.equal_rows,
            draws=self.draws,
        )

    def step(self, batch: Any, reduce: Reduce, *args: Any, **kwargs: Any) -> Any:
        """One pass over the phases. Lightning counts it as one step, whatever the number of optimizers."""
        game = self.game
        self.guard.raise_if_hopeless()
        for policy in self.players.policies.values():
            policy.begin_step(game.step)
        self.lockstep.equal_rows.begin(batch)
        with self.lockstep.places.named():
            if self.trials.due(game.phases, game.step):
                self._try(batch, *args, **kwargs)
            output = self._train(batch, *args, **kwargs)
            self.lockstep.places.end_step()
            self._log(reduce)
        private.count_step(game.trainer)
        return output

    def _train(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        game = self.game
        game.forget_shared()
        self.losses = {}
        output = self.ranks.step(game, batch, *args, **kwargs)
        game.forget_shared()
        if not self.lockstep.ending.played and any(phase.due(game.step, lambda _: False) for phase in game.phases):
            raise UserError(
                f"training_step() of {type(game).__name__} played no phase, so nothing has learned; call "
                f"super().training_step(batch) in it, or leave it out"
            )
        for policy in self.players.policies.values():
            policy.end_step(game.trainer.is_last_batch)
        return output

    def run(self, phase: Phase, batch: Any) -> None:
        """Play one phase. `GanModule.training_step` calls it for each phase that is due."""
        context = self._context()
        if self.trial is not None:
            self.trial.play(phase, batch, context)
            return
        self.lockstep.places.begin(context.step, phase.name)
        found = play(phase, batch, context)
        self.losses.update(found)
        self.lockstep.ending.played += 1
        if phase.name not in self.trials.played and self.ranks.number == 0 and (draws := self.draws.said(phase)):
            private.say(draws)
        self.trials.saw(phase.name, (name for name in found if not name.endswith("_grad_norm")))
        if self.compared:
            self._compare_replicas(phase)

    def ask(self, phase: Phase, device: torch.device) -> bool:
        """Whether a phase with a `when` is played: the first rank's answer, on all ranks."""
        return self.ranks.ask(phase.when, device) if self.trial is None else self.trials.ready(phase)

    @contextmanager
    def all_learning(self) -> Iterator[None]:
        """Inside the `with`, every player that can learn requires gradients."""
        second_order = any(phase.second_order for phase in self.game.phases)
        with self.players.for_several_phases(), self.ranks.all_learning(self.players.policies, second_order):
            yield

    def _context(self) -> PhaseContext:
        """The seed may be a checkpoint's, and under dp the number is the thread's."""
        return replace(self.context, step=self.game.step, seed=self.saving.seed, number=self.ranks.number)

    def _try(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Check that the ranks would train as one device."""
        game, policies = self.game, self.players.policies.values()

        def step(trial: Trial, samples: Any) -> None:
            game.forget_shared()
            self.trial = trial
            for policy in policies:
                policy.trying = True
            try:
                samples = move_data_to_device(samples, game.device)
                self.ranks.step(game, samples, *args, tried_alone=trial.alone, **kwargs)
            finally:
                self.trial = None
                for policy in policies:
                    policy.trying = False
                    policy.learn(True)

        games = [game, *(replica.game for replica in self.ranks.other_replicas)]
        check_step(games, self._context(), batch, step, self.gather, self.trials.ready)
        for replica in self.ranks.other_replicas:
            replica.note()  # what a trial has changed is put back, and no replica must take it for a change

    def _log(self, reduce: Reduce) -> None:
        """Log the means over ranks of the step's losses, when a logger is due or the epoch ends.

        Not in every step, because Lightning's bookkeeping for a few numbers takes milliseconds.
        """
        game = self.game
        if not (private.logs_are_due(game.trainer) or game.trainer.is_last_batch):
            return
        if self.losses:
            values = torch.stack([loss.float() for loss in self.losses.values()])
            self.losses = dict(zip(self.losses, reduce(values, reduce_op="mean"), strict=True))
        policies = self.players.policies.items()
        skipped = {f"{name}/skipped": float(policy.skipped) for name, policy in policies if policy.skipped}
        game.log_dict({**self.losses, **skipped})

    def _compare_replicas(self, phase: Phase) -> None:
        replica = threads.here()
        game = self.game if replica is None else replica.game
        gather = self.gather if replica is None else partial(self.ranks.every, "the comparison of replicas")
        compare_replicas(game, self.players.policies, gather, f"after phase '{phase.name}' of step {game.step}")

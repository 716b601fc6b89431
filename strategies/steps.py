"""The steps of a training: each is one pass over the phases of the game."""

from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from strategies import private
from strategies.check.first_step import check_step
from strategies.check.trial import Trial, Trials
from strategies.draws import Draws
from strategies.guard import Guard
from strategies.hooks import Hooks
from strategies.lockstep import Lockstep
from strategies.players import Players
from strategies.ranks import Ranks
from strategies.replicas import compare_replicas
from strategies.turn import Training, play


class Steps:
    """Made in set-up. `tried`: each phase is tried before its first time, and again (see check/first_step.py).

    `compared`: weights and buffers are compared on all ranks after every phase.
    """

    def __init__(
        self,
        game: GanModule,
        players: Players,
        lockstep: Lockstep,
        ranks: Ranks,
        hooks: Hooks,
        tried: bool,
        often: bool,
        compared: bool,
    ) -> None:
        self.game, self.players, self.lockstep, self.ranks = game, players, lockstep, ranks
        self.hooks, self.compared = hooks, compared
        self.guard, self.draws = Guard(ranks.gather), Draws()
        self.trials = Trials(game.phases if tried else (), often)
        self.trial: Trial | None = None  # that is played now
        self.training: Training  # made when it begins
        self.played = False  # whether it has played a phase
        self.losses: dict[str, Tensor] = {}  # of this step so far, and norms of gradients

    def begin(self, precision: Precision, seed: int) -> None:
        """All that a phase needs is known when training begins, also the seed that a checkpoint has."""
        self.played = False
        self.training = Training(
            policies=self.players.policies,
            precision=precision,
            guard=self.guard,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            seed=seed,
            hooks=self.hooks,
            equal_rows=self.lockstep.equal_rows,
            draws=self.draws,
        )

    def step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """One pass over the phases. Lightning counts it as one step, whatever the number of optimizers."""
        game = self.game
        self.guard.raise_if_hopeless()
        for policy in self.players.policies.values():
            policy.begin_step(game.step)
        self.lockstep.equal_rows.begin(batch)
        self.lockstep.places.begin_step(game.step)
        with self.lockstep.places.named():
            if self.trials.due(game.phases, game.step):
                self._try(batch, *args, **kwargs)
            output = self._train(batch, *args, **kwargs)
            self.lockstep.places.end_step()
            self._log()
        private.count_step(game.trainer)
        return output

    def _train(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        game = self.game
        game.forget_shared()
        self.losses = {}
        output = game.training_step(batch, *args, **kwargs)
        game.forget_shared()
        if not self.played and any(phase.due(game.step, lambda _: False) for phase in game.phases):
            raise UserError(
                f"training_step() of {type(game).__name__} played no phase, so nothing has learned; call "
                f"super().training_step(batch) in it, or leave it out"
            )
        for policy in self.players.policies.values():
            policy.end_step(game.trainer.is_last_batch)
        return output

    def _try(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Check that the ranks would train as one device."""
        game, policies = self.game, self.players.policies.values()

        def step(trial: Trial, samples: Any) -> None:
            game.forget_shared()
            self.trial = trial
            for policy in policies:
                policy.trying = True
            try:
                game.training_step(move_data_to_device(samples, self.ranks.device), *args, **kwargs)
            finally:
                self.trial = None
                for policy in policies:
                    policy.trying = False
                    policy.learn(True)

        check_step(game, self.training, batch, game.step, step, self.ranks.gather, self.trials.ready)

    def run(self, phase: Phase, batch: Any) -> None:
        """Play one phase."""
        if self.trial is not None:
            self.trial.play(phase, batch, self.training)
            return
        step = self.game.step
        self.lockstep.places.begin(step, phase.name)
        found = play(phase, batch, step, self.training)
        self.losses.update(found)
        self.played = True
        self.lockstep.ending.played += 1
        if phase.name not in self.trials.played and self.ranks.rank == 0 and (draws := self.draws.said(phase)):
            private.say(draws)
        self.trials.saw(phase.name, (name for name in found if not name.endswith("_grad_norm")))
        if self.compared:
            when = f"after phase '{phase.name}' of step {step}"
            compare_replicas(self.game, self.players.policies, self.ranks.gather, when)

    def ask(self, phase: Phase) -> bool:
        """Whether a phase with a `when` is played: the first rank's answer, on all ranks."""
        return self.ranks.first(phase.when) if self.trial is None else self.trials.ready(phase)

    def _log(self) -> None:
        """Log the means over ranks of the step's losses, when a logger is due or the epoch ends.

        Not in every step, because Lightning's bookkeeping for a few numbers takes milliseconds.
        """
        trainer = self.game.trainer
        if not (private.logs_are_due(trainer) or trainer.is_last_batch):
            return
        if self.losses:
            values = torch.stack([loss.float() for loss in self.losses.values()])
            self.losses = dict(zip(self.losses, self.ranks.reduce(values, reduce_op="mean"), strict=True))
        policies = self.players.policies.items()
        skipped = {f"{name}/skipped": float(policy.skipped) for name, policy in policies if policy.skipped}
        self.game.log_dict({**self.losses, **skipped})

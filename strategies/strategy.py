"""PhaseStrategy: the strategy that trains a game of several players. Here are its steps, and whole weights."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning import Trainer
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from strategies import private, threads
from strategies.adopting_strategy import AdoptingStrategy
from strategies.check.first_step import check_step
from strategies.check.trial import Trial, Trials
from strategies.draws import Draws
from strategies.policies.replica import ADVICE
from strategies.replicas import Writes, compare_replicas
from strategies.saving_strategy import refuse_other
from strategies.turn import PhaseContext, play


class PhaseStrategy(AdoptingStrategy):
    """Trains a `GanModule`, each player under a policy of its own.

    `policy` is a name for all players, or a mapping from player to name in which `*` stands for the rest:
    `PhaseStrategy("zero3")`, `PhaseStrategy({"generator": "zero3", "*": "ddp"})`. The form of the command line works
    too: `PhaseStrategy("generator=zero3,*=ddp")`. Options are added to a policy with `+`: `zero3+offload`.
    `check` tries a step on all ranks together, and on each as if it were one device (see check/first_step.py). It does
    so before a phase is played for the first time, and again at growing distances; with `check="often"` every tenth
    time.
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
            policy,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            init_method=init_method,
            timeout=timeout,
            start_method=start_method,
        )
        self.check, self.check_replicas = check, check_replicas
        self.trials = Trials()
        self.trial: Trial | None = None
        self.draws = Draws()
        self.losses: dict[str, Tensor] = {}  # of this step so far, and norms of gradients
        self.writes: Writes | None = None  # inside gathered()
        self.averaging = False  # inside averaged()

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
        """If a trial is due before this step: check that the ranks would train as one device."""
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
        check_step(games, self._context(), batch, step, self.gather_objects, self.trials.ready)
        for replica in self.ranks.other_replicas:
            replica.note()  # what a trial has changed is put back, and no replica must take it for a change

    def run(self, phase: Phase, batch: Any) -> None:
        """Play one phase. `GanModule.training_step` calls it for each phase that is due."""
        context = self._context()
        if self.trial is not None:
            self.trial.play(phase, batch, context)
            return
        self.places.begin(context.step, phase.name)
        found = play(phase, batch, context)
        self.losses.update(found)
        self.ending.played += 1
        if phase.name not in self.trials.played and self.ranks.number == 0 and (draws := self.draws.said(phase)):
            private.say(draws)
        self.trials.saw(phase.name, (name for name in found if not name.endswith("_grad_norm")))
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
            draws=self.draws,
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
        a write is an error. Together with `averaged()`, in either order, it is the averages that are read or written.
        """
        with ExitStack() as stack:
            for policy in self.policies.values():
                stack.enter_context(policy.gathered())
            outer, self.writes = self.writes, Writes(self.policies, write, self.gather_objects)
            try:
                yield
                self.writes.check(self.averaging)
            finally:
                self.writes = outer

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the `with`, players that keep an average have their averaged weights. Every rank must call it."""
        if threads.here() is not None:
            raise UserError(f"averaged() in a step: under strategy dp the first device alone has averages; {ADVICE}")
        if self.averaging:  # a validation step is inside already
            yield
            return
        writes = self.writes
        if writes is not None:
            writes.check(averaged=False)
        self.averaging = True
        try:
            with ExitStack() as stack:
                for policy in self.policies.values():
                    stack.enter_context(policy.averaged())
                if writes is not None:
                    writes.begin()
                yield
                if writes is not None:
                    writes.check(averaged=True)
        finally:
            self.averaging = False
        if writes is not None:  # the weights of before are whole again, for the rest of gathered()
            for policy in self.policies.values():
                policy.storage.unshard(exact=True)
            writes.begin()

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

    def setup(self, trainer: Trainer) -> None:
        """Give each player its policy. On several ranks each phase is tried before its first time."""
        super().setup(trainer)
        tried = self.check and trainer.state.fn == TrainerFn.FITTING and self.ranks.size > 1
        self.draws = Draws()
        self.trials = Trials(self.lightning_module.phases if tried else (), often=self.check == "often")

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

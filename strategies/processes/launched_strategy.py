"""A strategy whose ranks this package starts, ties together and ends together."""

import secrets
from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy

from gan.errors import UserError
from strategies import private
from strategies.assignment import check_ranks
from strategies.choice import Choice
from strategies.policies.replica import ADVICE
from strategies.processes.launcher import launcher
from strategies.processes.lost_ranks import Survivor
from strategies.processes.stopping import OTHERS, Ending, Signals, Stopped


class LaunchedStrategy(DDPStrategy):
    """Lightning's DDPStrategy, of which it keeps processes, devices and the process group; the model is never wrapped.

    `choice` says which policies were asked for; `threaded` that one process serves all devices (dp).
    """

    choice: dict[str, Choice]
    threaded: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ending = Ending()
        self.signals = Signals()
        self.survivor: Survivor | None = None
        self.advice = ""  # what to type when a rank was lost

    @property
    def num_processes(self) -> int:
        """Lightning's, of which there is one for all devices under dp."""
        return 1 if self.threaded else super().num_processes

    @property
    def root_device(self) -> torch.device:
        """Lightning's; under dp the first of the devices."""
        return self.parallel_devices[0] if self.threaded else super().root_device

    def _configure_launcher(self) -> None:
        """Refuse what cannot be before any process is started; one process is this one: nothing to launch."""
        if self.threaded:
            launched = [env for env in (TorchElasticEnvironment, SLURMEnvironment) if env.detect()]
            others = max([self.num_nodes, *(env().world_size() for env in launched)])
            if others > 1:
                raise UserError(f"strategy dp is one process on one machine, and there are {others}; {ADVICE}")
        ranks = self.num_processes * self.num_nodes
        check_ranks(self.choice, ranks)
        if ranks > 1:
            self._launcher = launcher(self, self._start_method)

    def setup_distributed(self) -> None:
        """One process needs no process group; several are tied together, to end together when one is lost."""
        if self.num_processes * self.num_nodes > 1:
            super().setup_distributed()
            if self.survivor is not None:
                host = self.cluster_environment.main_address
                self.survivor.tie(host, self.advice, self.broadcast, self.gather_objects)
        else:
            self.set_world_ranks()

    def gather_objects(self, value: Any) -> list[Any]:
        """What each rank says, on all ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def agree_on_ending(self, trainer: Trainer | None) -> None:
        """Once there is a process group; with a trainer where the run trains."""
        run = self.broadcast(secrets.token_hex(8))
        self.ending = Ending(run if self.world_size > 1 else "")
        if trainer is not None and self.world_size > 1:
            private.end_by(trainer, self.ending.wish)

    def on_train_start(self) -> None:
        """Take the signals to end that nobody else has taken; SIGTERM is Lightning's."""
        super().on_train_start()
        self.signals.take(OTHERS, self.ending.wish, gently=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """End here if any rank was told to: the step before is over, logged, and saved by whoever saves."""
        if self.ending.look():
            raise Stopped

    def teardown(self) -> None:
        """Give the signals back."""
        self.signals.give_back()
        super().teardown()

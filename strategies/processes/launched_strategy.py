"""The part of PhaseStrategy that starts the ranks, connects them, and ends them together."""

import os
import secrets
from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy

from gan.errors import UserError
from strategies import private
from strategies.assignment import check_ranks
from strategies.choice import Choice
from strategies.loaders import check_loader
from strategies.policies.replica import ADVICE
from strategies.processes.equal_rows import EqualRows
from strategies.processes.interface import choose_interface, clear_errors, own_name
from strategies.processes.launcher import launcher
from strategies.processes.lost_ranks import Survivor
from strategies.processes.places import Places
from strategies.processes.stopping import OTHERS, Ending, Signals, Stopped


class LaunchedStrategy(DDPStrategy):
    """Lightning's DDPStrategy, used for its processes, devices and process group. The model is never wrapped in DDP.

    `choice` has the policies that were typed. `threaded` is true if one process serves all devices (dp).
    """

    choice: dict[str, Choice]
    threaded: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ending, self.equal_rows, self.places = Ending(), EqualRows(), Places()
        self.signals = Signals()
        self.survivor: Survivor | None = None
        self.advice = ""  # the command to type after a rank was lost

    @property
    def num_processes(self) -> int:
        """Lightning's number; under dp one process for all devices."""
        return 1 if self.threaded else super().num_processes

    @property
    def root_device(self) -> torch.device:
        """Lightning's device; under dp the first one."""
        return self.parallel_devices[0] if self.threaded else super().root_device

    def _configure_launcher(self) -> None:
        """Refuse impossible choices before any process is started. A single process needs no launcher."""
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
        """A single process needs no process group. Several are tied before they are connected, to end together."""
        self.set_world_ranks()
        if self.num_processes * self.num_nodes == 1:
            return
        main = self.cluster_environment.main_address
        if self.num_nodes > 1:
            choose_interface(main)
        store = self._meet(main)  # held until the process group holds it too: rank 0 may be its server
        if self.survivor is not None:
            self.survivor.place = lambda: str(self.places)
            self.survivor.tie(store, self.world_size, own_name(main), self.advice)
        with clear_errors(main):
            super().setup_distributed()

    def _meet(self, main: str) -> dist.Store:
        """torch's store, in which the ranks find each other."""
        if dist.is_initialized():
            return private.default_store()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = main, str(self.cluster_environment.main_port)
        limit = self._timeout or default_pg_timeout
        store, _, _ = next(dist.rendezvous("env://", self.global_rank, self.world_size, timeout=limit))
        return store

    def process_dataloader(self, dataloader: Any) -> Any:
        """Lightning calls this with every loader, after it has chosen the sampler."""
        check_loader(dataloader, self.world_size, self.lightning_module.trainer.training)
        return super().process_dataloader(dataloader)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.places.tell()

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank. All ranks must call it."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def agree_on_ending(self, trainer: Trainer | None) -> None:
        """Give all ranks one name for this run. The process group must exist. Pass the trainer only in training."""
        run = self.broadcast(secrets.token_hex(8))
        self.ending = Ending(run if self.world_size > 1 else "")
        self.equal_rows = EqualRows(self.global_rank, self.world_size, run, self.gather_objects)
        self.places = Places(self.global_rank, self.world_size, run, self.gather_objects)
        if trainer is not None and self.world_size > 1:
            private.end_by(trainer, self.ending.wish)

    def on_train_start(self) -> None:
        """Handle the signals to end that have no handler yet. SIGTERM is Lightning's."""
        super().on_train_start()
        self.signals.take(OTHERS, self.ending.wish, gently=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """End here if any rank got a signal. The step before is complete and logged, and callbacks have saved it."""
        if self.ending.look():
            raise Stopped

    def teardown(self) -> None:
        """Put the earlier signal handlers back."""
        self.signals.give_back()
        super().teardown()

"""The part of PhaseStrategy that starts the ranks, connects them, and ends them together."""

import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import DDPStrategy

from datasets import GlobalStream, ResumableLoader
from gan.files.errors import UserError
from gan.files.system import check_ranks as check_system
from strategies import private
from strategies.accelerator import pins
from strategies.assignment import check_ranks
from strategies.choice import Choice
from strategies.loaders import check_loader
from strategies.placing.elsewhere import connect as connect_part
from strategies.placing.elsewhere import refuse_a_group
from strategies.placing.messages import Bridge
from strategies.placing.placement import Part, Placement, placement_of
from strategies.policies.replica import ADVICE
from strategies.processes import agent
from strategies.processes.equal_rows import EqualRows
from strategies.processes.interface import THIS_HOST, choose_interface, clear_errors, clear_meeting, own_name
from strategies.processes.launched import connect, environment, place_of
from strategies.processes.launched import store as store_of
from strategies.processes.launcher import Here, launcher
from strategies.processes.lost_ranks import Survivor
from strategies.processes.places import Places
from strategies.processes.slurm import Requeue
from strategies.processes.stopping import OTHERS, Ending, Signals, Stopped, tell
from strategies.processes.watch import Watch

KNOWN = ("gloo", "nccl", "mpi")
TYPE_GLOO = "type gloo (process_group_backend, in gan.fit --backend), or leave it out"


def check_backend(name: str) -> None:
    """Refuse a backend that this torch does not have. `cpu:gloo,cuda:nccl` names one for each kind of device."""
    for part in name.split(","):
        single = part.rpartition(":")[2].strip().lower()
        if not dist.is_backend_available(single):
            found = ", ".join(each for each in KNOWN if dist.is_backend_available(each))
            why = "; only a torch that is built on a machine with MPI has it" if single == "mpi" else ""
            raise UserError(f"torch {torch.__version__} has no backend '{single}' here, but {found}{why}; {TYPE_GLOO}")


def check_device(name: str, device: torch.device) -> None:
    """Refuse a backend that cannot move the memory of this device."""
    if name.strip().lower() == "nccl" and device.type != "cuda":
        raise UserError(f"backend nccl communicates between GPUs only, and ranks compute on {device.type}; {TYPE_GLOO}")


def with_store(name: str) -> str:
    """The backend as torch is given it. For plain `mpi` torch makes no store, by which our ranks end together."""
    return "cpu:mpi,cuda:mpi" if name.strip().lower() == "mpi" else name


class LaunchedStrategy(DDPStrategy):
    """Lightning's DDPStrategy, used for its processes, devices and process group. The model is never wrapped in DDP.

    `choice` has the policies that were typed. `threaded` is true if one process serves all devices (dp). `serve` is
    what a rank does that serves players to those that train; it gets the trainer, and what the training would get.
    """

    choice: dict[str, Choice]
    threaded: bool
    serve: Callable[..., None]

    def __init__(self, *args: Any, init_method: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.init_method = init_method
        if self._process_group_backend is not None:
            check_backend(self._process_group_backend)
        self.ending, self.equal_rows, self.places = Ending(), EqualRows(), Places()
        self.signals = Signals()
        self.survivor: Survivor | None = None
        self.watch: Watch | None = None
        self.advice = ""  # the command to type after a rank was lost
        self.saved: Callable[[], bool] = _yes  # whether there is a checkpoint from which that goes on
        self.requeues = True  # whether a warned job of Slurm is saved and requeued here; gan.fit does so itself
        self._requeue: Requeue | None = None
        self.resumes_from: Any = None  # the checkpoint from which the run resumes; the launcher finds it
        self.placement: Placement | None = None  # which ranks train and which serve, if that was typed
        self.part: Part | None = None  # of which this rank is one; its process group is torch's default group
        self.bridge: Bridge | None = None  # to the ranks of the other parts
        self.handing_over = False  # whether a spawned rank's weights are on their way to the process that started it

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """What tells Lightning the place of this process."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, found: ClusterEnvironment | None) -> None:
        self._environment = environment(found)

    @property
    def num_processes(self) -> int:
        """Lightning's number; under dp one process for all devices."""
        return 1 if self.threaded else super().num_processes

    @property
    def world_size(self) -> int:
        """The number of ranks that train, or of those that serve with this one. See [Note: serving]."""
        return super().world_size if self.part is None else self.part.size

    @property
    def global_rank(self) -> int:
        """This rank's number among those."""
        return super().global_rank if self.part is None else self.part.rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first of the ranks that train."""
        return self.global_rank == 0 and (self.part is None or self.part.trains)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Lightning's. A serving rank prints nothing."""
        super().set_world_ranks()
        if self.part is not None:
            private.set_first(self.is_global_zero)

    @property
    def root_device(self) -> torch.device:
        """Lightning's device; under dp the first one."""
        return self.parallel_devices[0] if self.threaded else super().root_device

    def _configure_launcher(self) -> None:
        """Refuse impossible choices before any process is started."""
        place = place_of(self.cluster_environment)
        if self.threaded:
            others = max(self.num_nodes, place.world_size if place is not None else 1)
            if others > 1:
                raise UserError(f"strategy dp is one process on one machine, and there are {others}; {ADVICE}")
        ranks = self.num_processes * self.num_nodes
        if place is not None and (place.local_size, place.nodes) != (self.num_processes, self.num_nodes):
            raise UserError(
                f"{place}, {place.world_size} on all hosts, and the Trainer is for {self.num_processes} on each of "
                f"{self.num_nodes}; type Trainer(devices={place.local_size}, num_nodes={place.nodes})"
            )
        self.placement = placement_of(self.choice, ranks)
        check_ranks(self.choice, ranks, self.placement)
        check_system(ranks, self.num_nodes)
        if ranks > 1:
            check_device(self._get_process_group_backend(), self.root_device)
        self._launcher = launcher(self, self._start_method) if ranks > 1 else Here(self)

    def _get_process_group_backend(self) -> str:
        own = self._process_group_backend or dist.Backend.default_device_backend_map.get(self.root_device.type)
        return with_store(own or "gloo")

    def take_part(self, rank: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """What this rank of the whole run does: the function, which trains, or serving those that train."""
        if self.placement is None:
            return function
        if self.part is not None:
            raise UserError(
                "the ranks that serve players have ended with the first fit, validate, test or predict of this "
                "program; do the next one in a program of its own, or without '@' in its strategy"
            )
        self.part = self.placement.part(rank)
        return function if self.part.trains else partial(self.serve, function.__self__)

    def end_serving(self) -> None:
        """End a serving process where the training has ended. The program goes on on the ranks that have trained."""
        if self.part is not None and not self.part.trains:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def setup_distributed(self) -> None:
        """A single process needs no process group. Several are tied before they are connected, to end together."""
        self.set_world_ranks()
        if self.num_processes * self.num_nodes == 1:
            return
        if self.init_method is None:
            choose_interface(self.cluster_environment.main_address if self.num_nodes > 1 else THIS_HOST)
        store = self._meet()  # held until the process group holds it too: rank 0 may be its server
        main = self.cluster_environment.main_address
        if self.survivor is not None:
            self.survivor.beside = lambda lost: self.places.beside(lost)
            self.survivor.saved = self.saved
            host = own_name(main) if self.num_nodes > 1 else THIS_HOST
            self.survivor.tie(store, self._whole_size, host, self.advice)
        with clear_errors(main):
            if self.part is not None:
                backend, options = self._get_process_group_backend(), self._group_options()
                self.bridge = connect_part(self.part, store, self.placement.size, self.root_device, backend, **options)
            super().setup_distributed()

    @property
    def _whole_rank(self) -> int:
        """This rank's number in the whole run."""
        return self.global_rank if self.part is None else self.part.ranks[self.part.rank]

    @property
    def _whole_size(self) -> int:
        return self.world_size if self.placement is None else self.placement.size

    def _group_options(self) -> dict[str, Any]:
        device = self.root_device if self.root_device.type != "cpu" else None
        return dict(timeout=self._timeout, device_id=device)

    def _meet(self) -> dist.Store:
        """torch's store, in which the ranks find each other. Also the process group, where Lightning's way fails."""
        if self.part is not None:
            refuse_a_group()
        if dist.is_initialized():
            return private.default_store()
        place, rank, size = place_of(self.cluster_environment), self._whole_rank, self._whole_size
        backend, where, options = self._get_process_group_backend(), self.init_method, self._group_options()
        if where is not None and self.part is not None:
            raise UserError("players on ranks of their own meet at MASTER_ADDR and MASTER_PORT; leave init_method out")
        if where is not None:
            dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, **options)
            if "MASTER_ADDR" not in os.environ:
                main = "127.0.0.1" if self.num_nodes == 1 else socket.gethostname()
                os.environ["MASTER_ADDR"] = self.broadcast(main)
        elif place is not None and place.by == "torchrun" and place.restarts and place.nodes == 1:
            if self.part is not None:
                return store_of(place)
            connect(place, backend, **options)  # see `launched.store`; of several hosts each has its own number
        else:
            main, port = self.cluster_environment.main_address, self.cluster_environment.main_port
            os.environ.update(MASTER_ADDR=main, MASTER_PORT=str(port))
            with clear_meeting(main, port):
                store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=self._timeout or default_pg_timeout))
            return store
        return private.default_store()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Lightning calls this with every loader, after it has chosen the sampler."""
        check_loader(dataloader, self.world_size, self.lightning_module.trainer.training)
        if isinstance(dataloader, ResumableLoader | GlobalStream):
            dataloader.pin_memory = pins(self.root_device)
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
        if trainer is not None:
            self._await_warning(trainer)

    def _await_warning(self, trainer: Trainer) -> None:
        warning = private.warn_by(trainer, self.ending.wish)
        if warning is not None and self.requeues:
            others = [each for each in trainer.callbacks if each is not self._requeue]
            self._requeue = Requeue(warning)
            trainer.callbacks = [*others, self._requeue]

    def on_train_start(self) -> None:
        """Handle the signals to end that have no handler yet. SIGTERM is Lightning's."""
        super().on_train_start()
        self.signals.take(OTHERS, self.ending.wish, gently=True)
        if self.survivor is not None and threading.current_thread() is threading.main_thread():
            self.watch = Watch(self.places, self.survivor.end)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """End here if any rank got a signal. The step before is complete and logged, and callbacks have saved it."""
        if self.ending.look():
            raise Stopped

    def end_at_once(self, why: str) -> None:
        """End all ranks in the midst of what they do, and say why, once. For a signal handler."""
        if self.is_global_zero and not agent.speaks():
            tell(why)
        status = 128 + signal.SIGINT
        if self.survivor is not None:
            self.survivor.interrupt(why, status)
        os._exit(status)

    def teardown(self) -> None:
        """Put the earlier signal handlers back. A job that was warned goes back into the queue."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        self.signals.give_back()
        super().teardown()
        if self._requeue is not None and self.is_global_zero:
            self._requeue.requeue()


def _yes() -> bool:
    """Unlike a lambda, it may be handed to a spawned process."""
    return True

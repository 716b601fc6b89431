"""How the ranks of a training are started and find each other, and over which backend they communicate."""

import os
import socket
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

from gan.files.errors import UserError
from gan.files.system import check_ranks as check_system
from strategies import private
from strategies.batches import random_state
from strategies.batches.loaders import prepare_loader
from strategies.batches.micro_batches import Batches
from strategies.checkpoint.writing import refuse_other
from strategies.placing.division import Division, placement_of, refuse_a_group
from strategies.policies import POLICIES
from strategies.policies.choice import Choice, choices
from strategies.processes.cluster import connect, environment, launched_in
from strategies.processes.cluster import store as store_of
from strategies.processes.lost_ranks import Survivor
from strategies.processes.own_ranks import OwnRanks
from strategies.processes.rendezvous import THIS_HOST, choose_interface, clear_errors, clear_meeting, own_name
from strategies.processes.starting import LaunchedStrategy, Scripts, StartMethod
from strategies.processes.stopping import Ending
from strategies.training.assignment import check_ranks, is_dp
from strategies.training.lockstep import Lockstep
from strategies.world import Groups, Owed, World

TYPE_GLOO = "type gloo (process_group_backend, in gan.fit --backend), or leave it out"


def launcher(strategy: LaunchedStrategy, start_method: StartMethod, is_dp: bool = False) -> Scripts | OwnRanks:
    """The launcher for Lightning's `start_method`. Where somebody else has started the ranks, it starts none."""
    scripts = start_method == "popen" and not is_dp and not hasattr(sys, "ps1")  # a notebook is none
    cluster = strategy.cluster_environment
    if scripts or launched_in(cluster) is not None or cluster.creates_processes_externally:
        return Scripts(strategy)
    if strategy.num_nodes > 1:
        raise UserError(
            f"start_method and notebooks start the ranks of one machine, and there are {strategy.num_nodes}; start a "
            f"program on each machine, without start_method"
        )
    return OwnRanks(strategy, start_method)


class RanksStrategy(LaunchedStrategy):
    """Lightning's DDPStrategy for ranks that anybody has started. They find each other, and end together.

    Which rank this is and how the ranks are connected is decided here alone; what they train, by PhaseStrategy alone.
    `choice` is what was typed for the players, of which some may be served by ranks of their own: [Note: serving].
    """

    def __init__(
        self,
        choice: Mapping[str, Choice],
        init_method: str | None,
        backend: str | None,
        timeout: timedelta | float | None,
        **lightnings: Any,
    ) -> None:
        for part in backend.split(",") if backend is not None else ():  # such as `cpu:gloo,cuda:nccl`, or nccl
            single = part.rpartition(":")[2].strip().lower()
            if not dist.is_backend_available(single):
                found = ", ".join(filter(dist.is_backend_available, ("gloo", "nccl", "mpi")))
                why = "; only a torch that is built on a machine with MPI has it" if single == "mpi" else ""
                raise UserError(
                    f"torch {torch.__version__} has no backend '{single}' here, but {found}{why}; {TYPE_GLOO}"
                )
        if isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        super().__init__(process_group_backend=backend, timeout=timeout, **lightnings)
        self.choice, self.is_dp, self.init_method = choice, is_dp(choice), init_method
        self.groups, self.owed = Groups(timeout=self._timeout), Owed()
        self.division = Division()
        self.lockstep = Lockstep()
        self.batches = Batches()

    def take_part(self, survivor: Survivor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.lockstep.survivor = survivor
        trainer: Any = getattr(function, "__self__", None)
        serves = partial(self.serve, trainer)
        result = survivor.run(self.division.take_part(survivor.rank, function, serves), *args, **kwargs)
        self.division.end()
        return result

    @abstractmethod
    def serve(self, trainer: Trainer, game: LightningModule | None = None, *args: Any, **kwargs: Any) -> None:
        """What a serving rank does in place of training."""

    # ---- which rank this is ----

    @property
    def cluster_environment(self) -> ClusterEnvironment:
        """What tells Lightning the place of this process. Lightning sets it before it starts any."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, found: ClusterEnvironment) -> None:
        self._environment = environment(found)

    @property
    def num_processes(self) -> int:
        return 1 if self.is_starter else super().num_processes

    @property
    def local_rank(self) -> int:
        """A script is started again for each rank of a training, and may train on one device before it."""
        return 0 if self.num_processes == 1 else super().local_rank

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu") if self.is_starter else super().root_device

    @property
    def world_size(self) -> int:
        """The number of ranks that train, or of those that serve with this one."""
        own = 1 if self.is_starter else super().world_size
        return own if self.division.part is None else len(self.division.part)

    @property
    def global_rank(self) -> int:
        """This rank's number among those."""
        return super().global_rank if self.division.part is None else self.division.number

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first of the ranks that train."""
        return self.global_rank == 0 and self.division.trains

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def world(self) -> World:
        """The ranks that train, or that serve with this one, and what this one asks of them."""
        return World(self.world_size, self.global_rank, self.root_device, self.num_processes, self.groups, self.owed)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.owed.catch_up()
        super().barrier(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        self.owed.catch_up()
        return super().broadcast(*args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        self.owed.catch_up()
        return super().reduce(*args, **kwargs)

    def on_one_device(self) -> AbstractContextManager[Any]:
        return mock.patch.multiple(self, choice=choices("single", POLICIES), division=Division())

    @LaunchedStrategy.checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        """Lightning asks for one. Checkpoints are written without it, by `save_checkpoint`."""
        refuse_other(io)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Lightning calls this with every loader, after it has chosen the sampler."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        overfits = getattr(trainer, "overfit_batches", 0) > 0
        loader = prepare_loader(dataloader, self.world, trainer.training, self.is_dp, overfits, self.batches)
        return super().process_dataloader(loader)

    # ---- start the ranks, and connect them ----

    def _configure_launcher(self) -> None:
        """Refuse what cannot be, before any process is started."""
        place, per_node, nodes = launched_in(self.cluster_environment), self.num_processes, self.num_nodes
        ranks, machines = per_node * nodes, max(nodes, place.nodes if place is not None else 1)
        if self.is_dp and machines > 1:
            raise UserError(f"strategy dp trains on one machine, and there are {machines}; type --strategy ddp")
        if place is not None and (place.local_size, place.nodes) != (per_node, nodes):
            raise UserError(
                f"{place}, {place.world_size} on all hosts, and the Trainer is for {per_node} on each of {nodes}; type "
                f"Trainer(devices={place.local_size}, num_nodes={place.nodes})"
            )
        self.division.placement = placement_of(self.choice, ranks)
        check_ranks(self.choice, ranks, self.division.placement)
        check_system(ranks, nodes)
        nccl = ranks > 1 and self._get_process_group_backend().strip().lower() == "nccl"
        if nccl and (kind := self.root_device.type) != "cuda":
            raise UserError(f"backend nccl communicates between GPUs only, and ranks compute on {kind}; {TYPE_GLOO}")
        self._launcher = launcher(self, self._start_method, self.is_dp) if ranks > 1 else Scripts(self)
        self.is_starter = self.is_dp and isinstance(self._launcher, OwnRanks)

    def _get_process_group_backend(self) -> str:
        """For plain `mpi` torch makes no store, by which our ranks end together."""
        name = self._process_group_backend or dist.Backend.default_device_backend_map.get(self.root_device.type, "gloo")
        return "cpu:mpi,cuda:mpi" if name.strip().lower() == "mpi" else name

    def set_world_ranks(self) -> None:
        """Lightning's. A serving rank prints nothing."""
        super().set_world_ranks()
        if self.division.part is not None:
            private.set_first(self.is_global_zero)

    def setup_distributed(self) -> None:
        """A single process needs no process group. Several are tied before they are connected, to end together."""
        before = random_state.capture()
        self.batches = Batches()
        self.set_world_ranks()
        if self.num_processes * self.num_nodes > 1:
            rank, size = self.global_rank, self.world_size
            if self.division.part is not None and self.division.placement is not None:  # of all ranks of the run
                rank, size = self.division.part[rank], self.division.placement.size
            if self.init_method is None:
                choose_interface(self.cluster_environment.main_address if self.num_nodes > 1 else THIS_HOST)
            store = self._store(rank, size)  # held until the group holds it too: rank 0 may be its server
            main = self.cluster_environment.main_address  # if init_method was typed, it is known only now
            self.lockstep.tie(store, size, own_name(main) if self.num_nodes > 1 else THIS_HOST)
            with clear_errors(main):
                self.division.connect(store, self.root_device, self._get_process_group_backend(), **self._group)
                super().setup_distributed()
        random_state.restore(before)  # Lightning seeds ranks a second time, and one device not

    def _store(self, rank: int, size: int) -> dist.Store:
        """torch's store, in which the ranks find each other. Also the process group, where Lightning's way fails."""
        if self.division.part is not None:
            refuse_a_group()
            if self.init_method is not None:
                raise UserError(
                    "players on ranks of their own meet at MASTER_ADDR and MASTER_PORT; leave init_method out"
                )
        if dist.is_initialized():
            return private.default_store()
        if self.init_method is not None:
            backend, where = self._get_process_group_backend(), self.init_method
            dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, **self._group)
            if "MASTER_ADDR" not in os.environ:
                os.environ["MASTER_ADDR"] = self.broadcast("127.0.0.1" if self.num_nodes == 1 else socket.gethostname())
            return private.default_store()
        place = launched_in(self.cluster_environment)
        if place is not None and place.launcher.elastic and place.restarts and place.nodes == 1:
            if self.division.part is not None:
                return store_of(place)
            # See `cluster.store`; other hosts count restarts themselves.
            connect(place, self._get_process_group_backend(), **self._group)
            return private.default_store()
        main, port = self.cluster_environment.main_address, self.cluster_environment.main_port
        os.environ.update(MASTER_ADDR=main, MASTER_PORT=str(port))
        with clear_meeting(main, port):
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=self._timeout or default_pg_timeout))
        return store

    @property
    def _group(self) -> dict[str, Any]:
        return {"timeout": self._timeout, "device_id": self.root_device if self.root_device.type != "cpu" else None}

    def end_at_once(self, why: str) -> None:
        self.lockstep.end_at_once(why, speaks=self.is_global_zero)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, and end what all do beside training."""
        self.lockstep.whereabouts.tell()
        self.lockstep.settle()
        if isinstance(self.launcher, OwnRanks):
            self.launcher.put_back()

    @property
    def ending(self) -> Ending:
        return self.lockstep.ending

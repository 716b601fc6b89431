"""How the ranks of a training find each other, and over which backend they communicate."""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

from gan.files.errors import UserError
from gan.files.system import check_ranks as check_system
from strategies import private
from strategies.assignment import check_ranks, is_dp
from strategies.choice import Choice
from strategies.placing.elsewhere import refuse_a_group
from strategies.placing.placement import Placement, placement_of
from strategies.processes.cluster import connect, place_of
from strategies.processes.cluster import store as store_of
from strategies.processes.interface import THIS_HOST, choose_interface, clear_meeting, own_name

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


def backend_for(typed: str | None, device: torch.device) -> str:
    """The backend as torch is given it. For plain `mpi` torch makes no store, by which our ranks end together."""
    name = typed or dist.Backend.default_device_backend_map.get(device.type) or "gloo"
    return "cpu:mpi,cuda:mpi" if name.strip().lower() == "mpi" else name


def check_start(
    choice: Mapping[str, Choice],
    environment: ClusterEnvironment,
    per_node: int,
    nodes: int,
) -> Placement | None:
    """Refuse what cannot be, before any process is started. Returns who trains and who serves, if that was typed."""
    place = place_of(environment)
    machines = max(nodes, place.nodes if place is not None else 1)
    if is_dp(choice) and machines > 1:
        raise UserError(f"strategy dp trains on one machine, and there are {machines}; type --strategy ddp")
    if place is not None and (place.local_size, place.nodes) != (per_node, nodes):
        raise UserError(
            f"{place}, {place.world_size} on all hosts, and the Trainer is for {per_node} on each of {nodes}; type "
            f"Trainer(devices={place.local_size}, num_nodes={place.nodes})"
        )
    ranks = per_node * nodes
    placement = placement_of(choice, ranks)
    check_ranks(choice, ranks, placement)
    check_system(ranks, nodes)
    return placement


@dataclass(frozen=True)
class Meeting:
    """Where rank `rank` of `size` meets the others.

    `where` is what was typed as init_method. `divided`: some ranks only serve players, and each part of the run has a
    process group of its own.
    """

    environment: ClusterEnvironment
    rank: int
    size: int
    nodes: int
    device: torch.device
    backend: str
    timeout: timedelta | None
    where: str | None
    divided: bool

    @property
    def options(self) -> dict[str, Any]:
        """What each process group is made with."""
        return dict(timeout=self.timeout, device_id=self.device if self.device.type != "cpu" else None)

    @property
    def host(self) -> str:
        """By which the other ranks reach this host."""
        return own_name(self.environment.main_address) if self.nodes > 1 else THIS_HOST

    def store(self, broadcast: Callable[[Any], Any]) -> dist.Store:
        """torch's store, in which the ranks find each other. Also the process group, where Lightning's way fails."""
        if self.where is None:
            choose_interface(self.environment.main_address if self.nodes > 1 else THIS_HOST)
        return self._store(broadcast)

    def _store(self, broadcast: Callable[[Any], Any]) -> dist.Store:
        if self.divided:
            refuse_a_group()
        if dist.is_initialized():
            return private.default_store()
        if self.where is not None:
            self._connect_where_it_was_typed(broadcast)
            return private.default_store()
        place = place_of(self.environment)
        if place is not None and place.by == "torchrun" and place.restarts and place.nodes == 1:
            if self.divided:
                return store_of(place)
            connect(place, self.backend, **self.options)  # see `cluster.store`; other hosts count restarts themselves
            return private.default_store()
        main, port = self.environment.main_address, self.environment.main_port
        os.environ.update(MASTER_ADDR=main, MASTER_PORT=str(port))
        with clear_meeting(main, port):
            timeout = self.timeout or default_pg_timeout
            store, _, _ = next(dist.rendezvous("env://", self.rank, self.size, timeout=timeout))
        return store

    def _connect_where_it_was_typed(self, broadcast: Callable[[Any], Any]) -> None:
        if self.divided:
            raise UserError("players on ranks of their own meet at MASTER_ADDR and MASTER_PORT; leave init_method out")
        dist.init_process_group(
            self.backend, init_method=self.where, rank=self.rank, world_size=self.size, **self.options
        )
        if "MASTER_ADDR" not in os.environ:
            os.environ["MASTER_ADDR"] = broadcast("127.0.0.1" if self.nodes == 1 else socket.gethostname())

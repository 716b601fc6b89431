"""What Lightning is told of how this process was started, and how ranks that somebody else started are connected."""

import os
import sys
from collections import ChainMap
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import environments
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment

from gan.files.errors import UserError
from gan.files.system import unless_within
from strategies.processes.launchers import LAUNCHERS, Launched, launched, port_of
from strategies.processes.rendezvous import clear_meeting

QUIET = 15.0  # seconds in which ranks that are there usually meet
LIGHTNINGS = "MASTER_PORT", "SLURM_NTASKS_PER_NODE"  # what its classes read, and a launcher has meant otherwise


def environment(found: ClusterEnvironment) -> ClusterEnvironment:
    """Lightning's cluster environment, corrected: Lightning does not see mpirun, and takes every Slurm job for srun.

    `found` is what Lightning has found; before it has looked that is None, and stays so. One that a person has made for
    another launcher stays.
    """
    if type(found) not in (LightningEnvironment, *_of_launchers()):
        return found
    place = launched()
    if place is None:
        return found if isinstance(found, LightningEnvironment) else LightningEnvironment()
    if not place.launcher.lightning:
        return LaunchedEnvironment(place)
    kind = getattr(environments, place.launcher.lightning)
    os.environ.update({name: place.variables[name] for name in LIGHTNINGS if name in place.variables})
    return found if isinstance(found, kind) else kind()


def launched_in(found: ClusterEnvironment | None) -> Launched | None:
    """The place that a launcher gave this process, if `environment` has chosen what tells Lightning so."""
    return launched() if isinstance(found, (LaunchedEnvironment, *_of_launchers())) else None


def _of_launchers() -> tuple[type[ClusterEnvironment], ...]:
    """Lightning's own classes for the launchers that we know."""
    return tuple(getattr(environments, each.lightning) for each in LAUNCHERS.values() if each.lightning)


@cache  # because rank 0 serves it
def store(place: Launched) -> dist.Store:
    """torch's store, by which ranks that somebody else started find each other.

    torchrun on one host keeps what an attempt has written when it starts the ranks again. A rank could take the
    address that another one had then for the one that it has now. So each attempt has a prefix of its own. (Of several
    hosts, each counts its own attempts. Our own agent keeps nothing.)
    """
    where = environment(LightningEnvironment())
    address, port = where.main_address, where.main_port
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    words = f"rank {place.rank} of {place.world_size} waits at {address}:{port} for the others, for 30 minutes at most"
    said = unless_within(QUIET, partial(print, words, file=sys.stderr, flush=True))  # torch says nothing until then
    with clear_meeting(address, port), said:
        found, *_ = next(dist.rendezvous(f"env://?rank={place.rank}&world_size={place.world_size}"))
    return dist.PrefixStore(f"attempt {place.restarts if place.nodes == 1 else 0}", found)


def connect(place: Launched, backend: str, **options: Any) -> None:
    """Make the process group of ranks that somebody else started."""
    dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, store=store(place), **options)


class LaunchedEnvironment(TorchElasticEnvironment):
    """Tells Lightning the place of this process, where Lightning does not know the launcher: as torchrun's."""

    def __init__(self, place: Launched) -> None:
        super().__init__()
        self.place = place

    @property
    def main_address(self) -> str:
        return self._meeting("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(self._meeting("MASTER_PORT", str(port_of(self.place.variables.get(self.place.launcher.job, "")))))

    def _meeting(self, name: str, default: str) -> str:
        """A variable, which only ranks on one host can do without, if their launcher names its launches."""
        said = ChainMap({**self.place.variables}, os.environ)  # a program may set them later
        if name not in said and (self.place.nodes > 1 or not self.place.launcher.job):
            raise UserError(
                f"this is one of {self.place.world_size} ranks and {name} is not set; MASTER_ADDR names the host of "
                f"rank 0 and MASTER_PORT a free port of it: {self.place.launcher.set_both}"
            )
        return said.get(name, default)

    def world_size(self) -> int:
        return self.place.world_size

    def global_rank(self) -> int:
        return self.place.rank

    def local_rank(self) -> int:
        return self.place.local_rank

    def node_rank(self) -> int:
        return self.place.node_rank

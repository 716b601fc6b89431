"""World: the ranks that train together, or serve together, as one of them sees the others."""

import itertools
import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gan.files.errors import DiskError, UserError, reason
from gan.phase import Phase
from strategies.private import default_store, limit

T = TypeVar("T")
CPU = torch.device("cpu")


class Owed:
    """What this rank has not done with the others yet, because an error has left a `with` that ranks end together.

    After an error no rank waits for another one, which may be gone. But the author may catch the error and go on. So
    the rank does this before ranks do something together again, in the order in which a rank without an error has done
    it, or waits for this one.
    """

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    @contextmanager
    def then(self, look: Callable[[], Callable[[], object]]) -> Iterator[None]:
        """At the end of the `with`, call what `look` returns: after an error later. `look` asks no other rank."""
        try:
            yield
        except BaseException:
            self.work.append(look() if not self.work else lambda: look()())  # there is nothing to see now
            raise
        look()()

    def catch_up(self) -> None:
        work, self.work = self.work, []
        for each in work:
            each()


class Groups:
    """Gives each player a process group; players share one where their collectives never run at the same time.

    Two players that learn in one phase need two groups: backward makes their gradients in an order that may differ
    between ranks, and in one group collectives must have the same order on all ranks. It is never torch's default
    group, in which losses and synchronised batch norms have collectives of their own. Sharing keeps the number small,
    because each group costs threads (gloo) or the device's memory (NCCL).

    All ranks must ask for the groups of the same players, in the same order.
    """

    def __init__(self, phases: Sequence[Phase] = (), timeout: timedelta | None = None) -> None:
        """`timeout` is how long a collective waits for the other ranks; None is torch's own limit."""
        self.phases, self.timeout = phases, timeout
        self._made: list[dist.ProcessGroup] = []
        self._shared: list[tuple[dist.ProcessGroup, set[str]]] = []  # with the players that have it

    def own(self) -> dist.ProcessGroup:
        """A group for one player alone, whose collectives may run at any time."""
        group = dist.new_group(timeout=self.timeout)
        assert group != dist.GroupMember.NON_GROUP_MEMBER  # all ranks are in it
        self._made.append(group)
        dist.barrier()  # a rank that refuses next closes its connections, while others may still be making theirs
        return group

    def shared(self, player: str) -> dist.ProcessGroup:
        """A group for a player whose collectives run only in phases in which it learns, and between phases."""
        others = {name for phase in self.phases if player in phase.learners for name in phase.learners} - {player}
        for group, players in self._shared:
            if not players & others:
                players.add(player)
                return group
        self._shared.append((self.own(), {player}))
        return self._shared[-1][0]

    def mesh(self, kind: str, shape: tuple[int, int], names: tuple[str, str]) -> DeviceMesh:
        """All ranks in rows and columns, with a group for each row and each column."""
        mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
        for group in mesh.get_all_groups():
            limit(group, self.timeout)
            self._made.append(group)
        dist.barrier()
        return mesh

    def release(self) -> None:
        """End them, with their threads. Nobody may refer to one any more."""
        self._shared = []
        while self._made:
            dist.destroy_process_group(self._made.pop())


@dataclass(frozen=True)
class World:
    """This is rank `rank` of `size`, on its `device`; `per_node` of the run's ranks are on its host.

    `groups` gives players the process groups for their collectives. What a rank asks of the others here, all of them
    must ask at the same time; what it has `owed` them since an error comes first.
    """

    size: int = 1
    rank: int = 0
    device: torch.device = CPU
    per_node: int = 1
    groups: Groups = field(default_factory=Groups)
    owed: Owed = field(default_factory=Owed)

    def gather(self, value: Any) -> list[Any]:
        self.owed.catch_up()
        return [value] if self.size == 1 else of_all(value)

    def broadcast(self, value: Any) -> Any:
        self.owed.catch_up()
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def mean(self, value: Tensor) -> Tensor:
        self.owed.catch_up()
        if self.size > 1:
            dist.all_reduce(value)
        return value / self.size

    def answer(self, question: Callable[[], bool]) -> bool:
        """The first rank's answer. All call the function: it may ask the others, or move on what all draw from."""
        self.owed.catch_up()
        own = bool(question())
        if self.size == 1:
            return own
        answer = torch.tensor(own).byte().to(self.device, non_blocking=True)
        dist.broadcast(answer, 0)
        return bool(answer)

    def each(self, step: Callable[[], T]) -> list[T]:
        """Run a step on all ranks. Returns all results. If one rank fails, all raise, so that none waits for it."""
        result, failure, told = None, None, None
        try:
            result = step()
        except (OSError, UserError) as error:
            failure, told = error, (DiskError if isinstance(error, OSError) else UserError, reason(error))
        except Exception as error:  # noqa: BLE001 - our own mistake, so it is no UserError on the other ranks
            failure, told = error, (RuntimeError, f"{type(error).__name__}: {error}")
        heard = self.gather((result, told))
        if failure is not None:
            raise failure
        for rank, (_, told) in enumerate(heard):
            if told is not None:
                kind, text = told
                raise kind(f"rank {rank}: {text}")
        return [result for result, _ in heard]

    def first(self, step: Callable[[], None]) -> None:
        """Run a step on the first rank, while the others wait."""
        self.each(step if self.rank == 0 else lambda: None)


ALONE = World()


@dataclass(frozen=True)
class StoreWorld(World):
    """The ranks for a thread beside training. It uses torch's store, for its collectives would meet training's."""

    name: str = ""  # of one save, the same on all ranks
    limit: float = 1800.0  # seconds that a rank waits for the others
    lost: Callable[[], bool] = bool  # whether one of them is gone, so that it gives up at once
    store: Any = field(default_factory=default_store)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def gather(self, value: Any) -> list[Any]:
        """Rank 0 collects the values and shows them all. It waits until all have read them: it may be about to exit,
        and its host serves the store.
        """
        shown = f"{self.name}, {next(self.numbers)}"
        keys = [f"{shown}, rank {rank}" for rank in range(1, self.size)]
        if self.rank:
            own = keys[self.rank - 1]
            self.store.set(own, pickle.dumps(value))
            self._until(lambda: self.store.check([shown]))
            values = pickle.loads(self.store.get(shown))
            self.store.delete_key(own)
            return values
        self._until(lambda: self.store.check(keys))
        values = [value, *(pickle.loads(self.store.get(key)) for key in keys)]
        self.store.set(shown, pickle.dumps(values))
        for key in keys:
            self._until(lambda key=key: not self.store.check([key]))
        self.store.delete_key(shown)
        return values

    def _until(self, answer: Callable[[], bool]) -> None:
        """Ask again and again. `store.wait` would keep the main thread from the store."""
        until, pause = time.monotonic() + self.limit, 0.001
        while not answer():
            if self.lost():
                raise dist.DistError("a rank was lost while a checkpoint was written")
            if time.monotonic() > until:
                raise UserError(f"rank {self.rank} has waited {self.limit:g} seconds for what other ranks write")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)


def world_of_thread(world: World, save: str, limit: timedelta | None, lost: Callable[[], bool]) -> World:
    if world.size == 1:
        return world
    return StoreWorld(world.size, world.rank, name=save, limit=(limit or default_pg_timeout).total_seconds(), lost=lost)


def of_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of the group has."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def equal_on_ranks(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether all ranks have tensors of the same norms and sums. It waits for the device."""
    numbers = [*torch._foreach_norm(list(tensors)), *(tensor.sum() for tensor in tensors)] if tensors else []
    return bool(agree(torch.stack(numbers).tolist() if numbers else None, device))


def agree(what: object, device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """Whether all ranks of the group have the same `repr`: a tensor, read later, because that waits for the device."""
    code = zlib.crc32(repr(what).encode())
    both = torch.tensor([code, -code]).to(device, non_blocking=True)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return both[:1] == -both[1:]

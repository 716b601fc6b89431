"""The ranks of dp: a thread and a replica of the game for each device of this process."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gan import ranks
from gan.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from strategies.micro_batches import rows, split_batch
from strategies.policies.policy import Policy
from strategies.policies.replica import ADVICE, Replica
from strategies.ranks import Ranks

T = TypeVar("T")

_here: ContextVar[Replica | None] = ContextVar("replica", default=None)


def here() -> Replica | None:
    """The replica that plays in this thread, if there are replicas at all."""
    return _here.get()


class ThreadRanks(Ranks):
    """The game on all devices. It plays each step on all of them at once, each in a thread of its own.

    [Note: a rank in a thread]
    A replica is to its thread what a game is to a rank of ddp: it plays the whole step on its part of the batch, and
    where ranks would communicate the threads meet. Its backward runs in its own thread too, not in the threads of
    autograd, which know nothing of replicas. So batch norms and gradient penalties meet those of the other replicas
    in one order, forward and backward. What one device does for all, such as an update, the first replica does
    while the others wait.
    """

    def __init__(self, game: GanModule, devices: list[torch.device], policies: Mapping[str, Policy]) -> None:
        self.game, self.policies = game, policies
        self.replicas = [Replica(game, device, number, devices[0]) for number, device in enumerate(devices)]
        for policy in policies.values():
            policy.replicas = self.replicas[1:]
        self.meeting = Meeting(len(devices))
        self.workers = [ThreadPoolExecutor(1, f"replica-{number}") for number in range(len(devices))]
        self.autocast = Autocast()

    @property
    def number(self) -> int:
        """Of the replica in whose thread this is asked; outside of a step that of the first."""
        replica = here()
        return 0 if replica is None else replica.number

    @property
    def size(self) -> int:
        return len(self.replicas)

    def close(self) -> None:
        """End the threads."""
        for worker in self.workers:
            worker.shutdown()

    # ---- a step ----

    def step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The author's training_step by every replica on its part of the batch; returns what the first one returns."""
        size = rows(batch)
        if size % self.size:
            raise UserError(
                f"a batch of {size} does not divide among the {self.size} devices of strategy dp; choose a "
                f"--batch-size that does, and drop_last=True in a loader of your own"
            )
        parts = split_batch(batch, self.size, "dp")
        for replica in self.replicas[1:]:
            replica.follow()

        def play(replica: Replica) -> Any:
            part = move_data_to_device(parts[replica.number], replica.device)
            replica.game.forget_shared()
            try:
                return replica.game.training_step(part, *args, **kwargs)
            finally:
                replica.game.forget_shared()

        with self._logging(), self._guarded():
            found = self._each(play)
        for replica in self.replicas[1:]:
            replica.note()
        return found[0]

    def _each(self, function: Callable[[Replica], T]) -> list[T]:
        """Call it for each replica in its thread, all at once; the first failure is raised, with its device."""
        streams = [torch.accelerator.current_stream(r.device) for r in self.replicas if r.device.type != "cpu"]
        futures = [
            worker.submit(copy_context().run, self._within, replica, streams, function)
            for worker, replica in zip(self.workers, self.replicas, strict=True)
        ]
        try:
            wait(futures)
        except BaseException:
            self.meeting.close()
            wait(futures)
            raise
        finally:
            self.meeting.open()
        for replica, future in zip(self.replicas, futures, strict=True):
            error = future.exception()
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                error.add_note(f"in {replica.name}, one of {self.size} of strategy dp")
                raise error
        return [future.result() for future in futures]

    def _within(self, replica: Replica, streams: list[torch.Stream], function: Callable[[Replica], T]) -> T:
        """In the thread of a replica, on its device. See [Note: a rank in a thread]."""
        if replica.device.type != "cpu":
            for stream in streams:
                torch.accelerator.set_stream(stream)
            torch.accelerator.set_device_index(replica.device)
        token = _here.set(replica)
        try:
            with torch.autograd.set_multithreading_enabled(False), ranks.summed_by(self.total):
                result = function(replica)
                self.meeting.all(replica.number, "the end of the step")
        except BaseException:
            self.meeting.close()
            raise
        finally:
            _here.reset(token)
        return result

    # ---- what a phase asks; called by all threads ----

    def begin(self, phase: Phase, policies: Mapping[str, Policy]) -> None:
        """The policies set the flags of the author's weights; the other replicas have weights of their own."""
        if self.number == 0:
            super().begin(phase, policies)
        else:
            here().learn(policies, phase.learners)

    @contextmanager
    def all_learning(self, policies: Mapping[str, Policy], second_order: bool) -> Iterator[None]:
        """As for processes, each thread for its own weights."""
        alike = super().all_learning if self.number == 0 else lambda policies, _: here().all_learning(policies)
        with alike(policies, second_order):
            yield

    def any(self, value: bool) -> bool:
        return any(self.every("the sum of losses", value))

    def once(self, items: Sequence[T], what: str) -> Iterator[T]:
        """These items for the first replica, and none for the others, who wait until it is done with them."""
        self.every(f"the start of {what}", None)
        if self.number == 0:
            yield from items
        self.every(f"the end of {what}", None)

    def mean(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """On the first device."""
        found = self.every(f"the losses {', '.join(losses)}", losses)
        first = self.replicas[0].device
        return {name: torch.stack([each[name].to(first) for each in found]).mean(0) for name in losses}

    def every(self, what: str, value: T) -> list[T]:
        """What each replica says."""
        return self.meeting.all(self.number, what, value)

    def total(self, value: Tensor) -> Tensor:
        """The sum of everyone's tensors, the same to the last bit for all."""
        values = self.every(f"the sum of tensors {list(value.shape)}", value)
        return torch.stack([each.to(value.device) for each in values]).sum(0)

    def gather(self, value: Tensor, sync_grads: bool) -> Tensor:
        """Everyone's tensor, stacked, as all_gather gives those of ranks."""
        if sync_grads:
            zeros, number = torch.zeros_like(value), self.number
            return ranks.sum(torch.stack([value if each == number else zeros for each in range(self.size)]))
        values = self.every(f"all_gather of tensors {list(value.shape)}", value.detach())
        return torch.stack([each.to(value.device) for each in values])

    @contextmanager
    def forward(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """The first replica enters the context, because a default dtype is one for all threads. Autocast is not: the
        other threads repeat it.
        """
        first = self.number == 0
        with ExitStack() as stack:
            if first:
                stack.enter_context(context)
                self.autocast = Autocast.of_this_thread(self.replicas[0].device.type)
            self.every("a loss", None)
            if not first:
                stack.enter_context(self.autocast.entered())
            yield
            self.every("a loss", None)

    # ---- what a step does besides ----

    @contextmanager
    def _logging(self) -> Iterator[None]:
        """What the replicas log is logged once, as their mean."""
        vars(self.game)["log"] = self.replicas[0].log
        try:
            yield
        finally:
            del vars(self.game)["log"]
            spoken = [replica.logged for replica in self.replicas]
            for replica in self.replicas:
                replica.logged = []
        for each in zip(*spoken, strict=False):
            name, value, args, kwargs = each[0]
            values = [other[1] for other in each]
            if all(other[0] == name for other in each) and all(isinstance(v, Tensor | float | int) for v in values):
                device = self.replicas[0].device
                value = torch.stack([torch.as_tensor(v, device=device).detach().float() for v in values]).mean(0)
            self.game.log(name, value, *args, **kwargs)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A loss that gets past its replica at the author's own networks is stopped: their buffers would move twice."""

        def check(module: nn.Module, _: Any) -> None:
            replica = here()
            if replica is not None and replica.stands_for(module):
                raise UserError(
                    f"strategy dp: {replica.name} calls a {type(module).__name__} of the first device, which it knows "
                    f"not through self, but as a global variable or the like; write self.generator(...) in a method "
                    f"of the game, or {ADVICE}"
                )

        hook = register_module_forward_pre_hook(check)
        try:
            yield
        finally:
            hook.remove()


class Meeting:
    """Where the replicas' threads wait for each other and see what each has brought."""

    def __init__(self, size: int) -> None:
        self.brought: list[tuple[str, Any]] = [("", None)] * size
        self.barrier = threading.Barrier(size)

    def all(self, number: int, what: str, value: Any = None) -> list[Any]:
        """What every thread brings. All must come for the same thing: otherwise they would wait for ever."""
        self.brought[number] = (what, value)
        self.barrier.wait()
        brought = list(self.brought)
        self.barrier.wait()
        if any(other != what for other, _ in brought):
            parts = "; ".join(f"replica {k} is at {other}" for k, (other, _) in enumerate(brought))
            raise UserError(f"under strategy dp the parts of a batch go different ways: {parts}; {ADVICE}")
        return [value for _, value in brought]

    def close(self) -> None:
        """End all waiting: one thread will not come."""
        self.barrier.abort()

    def open(self) -> None:
        self.barrier.reset()
        self.brought = [("", None)] * len(self.brought)


@dataclass(frozen=True)
class Autocast:
    """What torch keeps of autocast for each thread by itself."""

    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    caching: bool = True

    @classmethod
    def of_this_thread(cls, kind: str) -> "Autocast":
        dtypes = {k: torch.get_autocast_dtype(k) for k in {"cpu", kind} if torch.is_autocast_enabled(k)}
        return cls(dtypes, torch.is_autocast_cache_enabled())

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype in self.dtypes.items():
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.caching))
            yield

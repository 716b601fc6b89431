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
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_pre_hook

from gan import ranks
from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from strategies.micro_batches import deal_batch
from strategies.policies.policy import Policy
from strategies.policies.replica import ADVICE, Replica
from strategies.ranks import Ranks

T = TypeVar("T")

_here: ContextVar[Replica | None] = ContextVar("replica", default=None)


def here() -> Replica | None:
    """The replica that runs in this thread; None outside a step of dp."""
    return _here.get()


class ThreadRanks(Ranks):
    """The game on all devices. It plays each step on all of them at the same time, each in a thread of its own.

    [Note: a rank in a thread]
    A thread with its replica works like a rank of ddp: it plays the whole step on its part of the batch. Where ranks
    would communicate, the threads wait for each other at a `Meeting`. The backward runs in the replica's own thread
    too, because autograd's threads would not know which replica they work for. So the sums of batch norms, also those
    inside gradient penalties, come in the same order on all replicas, in forward and in backward. What one device does
    for all, such as an update, is done by the first replica while the others wait.
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
        """The number of this thread's replica; 0 outside a step."""
        replica = here()
        return 0 if replica is None else replica.number

    @property
    def size(self) -> int:
        return len(self.replicas)

    @property
    def other_replicas(self) -> Sequence[Replica]:
        return self.replicas[1:]

    def close(self) -> None:
        """End the threads."""
        for worker in self.workers:
            worker.shutdown()

    # ---- a step ----

    def step(self, game: GanModule, batch: Any, *args: Any, tried_alone: bool | None = None, **kwargs: Any) -> Any:
        """Run training_step on every replica, each with its part of the batch. Returns the result of the first."""
        parts = [batch] * self.size if tried_alone else deal_batch(batch, self.size)
        for replica in self.replicas[1:]:
            replica.follow()

        def play(replica: Replica) -> Any:
            part = move_data_to_device(parts[replica.number], replica.device)
            replica.game.forget_shared()
            try:
                return replica.game.training_step(part, *args, **kwargs)
            finally:
                replica.game.forget_shared()

        with self._logging(silent=tried_alone is not None), self._guarded(), self._without_forward_mode():
            found = self._each(play)
        for replica in self.replicas[1:]:
            replica.note()
        return found[0]

    def _each(self, function: Callable[[Replica], T]) -> list[T]:
        """Call the function for all replicas at once, each in its thread. A failure is raised, with its device."""
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
        errors = [(replica, future.exception()) for replica, future in zip(self.replicas, futures, strict=True)]
        # What one thread refuses may make another one fail.
        for replica, error in sorted(errors, key=lambda each: not isinstance(each[1], UserError)):
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                error.add_note(f"in {replica.name}, one of {self.size} of strategy dp")
                raise error
        return [future.result() for future in futures]

    def _within(self, replica: Replica, streams: list[torch.Stream], function: Callable[[Replica], T]) -> T:
        """Runs in the thread of a replica, on its device. See [Note: a rank in a thread]."""
        if replica.device.type != "cpu":
            for stream in streams:
                torch.accelerator.set_stream(stream)
            torch.accelerator.set_device_index(replica.device)
        token = _here.set(replica)
        try:
            with (
                torch.autograd.set_multithreading_enabled(False),
                ranks.summed_by(self.total, replica.number, self.size),
            ):
                result = function(replica)
                self.meeting.all(replica.number, "the end of the step")
        except BaseException:
            self.meeting.close()
            raise
        finally:
            _here.reset(token)
        return result

    # ---- within a phase; every thread calls these ----

    def begin(self, phase: Phase, policies: Mapping[str, Policy]) -> None:
        """The policies set requires_grad of the author's weights. The other replicas set it for their own weights."""
        if self.number == 0:
            super().begin(phase, policies)
        else:
            here().learn(policies, phase.learners)

    @contextmanager
    def all_learning(self, policies: Mapping[str, Policy], second_order: bool) -> Iterator[None]:
        """As in `Ranks`, but each thread does it for its own weights."""
        alike = super().all_learning if self.number == 0 else lambda policies, _: here().all_learning(policies)
        with alike(policies, second_order):
            yield

    def ask(self, question: Callable[[], bool], device: torch.device) -> bool:
        return self.every("whether a phase is played", self.number == 0 and bool(question()))[0]

    def any(self, value: bool) -> bool:
        return any(self.every("the sum of losses", value))

    def once(self, items: Sequence[T], what: str) -> Iterator[T]:
        """The items for the first replica, and none for the others. They wait until the first one is done."""
        self.every(f"the start of {what}", None)
        if self.number == 0:
            yield from items
        self.every(f"the end of {what}", None)

    def mean(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """The means are on the first device."""
        found = self.every(f"the losses {', '.join(losses)}", losses)
        first = self.replicas[0].device
        return {name: torch.stack([each[name].to(first) for each in found]).mean(0) for name in losses}

    def every(self, what: str, value: T) -> list[T]:
        """The values of all replicas. `what` names this meeting in the error if a replica comes to another one."""
        return self.meeting.all(self.number, what, value)

    def total(self, value: Tensor) -> Tensor:
        """The sum of all replicas' tensors, the same on all replicas to the last bit."""
        values = self.every(f"the sum of tensors {list(value.shape)}", value)
        return torch.stack([each.to(value.device) for each in values]).sum(0)

    def gather(self, value: Tensor, sync_grads: bool) -> Tensor:
        """All replicas' tensors, stacked, as all_gather returns those of ranks."""
        if sync_grads:
            zeros, number = torch.zeros_like(value), self.number
            return ranks.sum(torch.stack([value if each == number else zeros for each in range(self.size)]))
        values = self.every(f"all_gather of tensors {list(value.shape)}", value.detach())
        return torch.stack([each.to(value.device) for each in values])

    @contextmanager
    def forward(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Only the first replica enters the context, because all threads share one default dtype.

        Autocast belongs to a single thread, so the other threads enter it again.
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

    # ---- around a step ----

    @contextmanager
    def _logging(self, silent: bool) -> Iterator[None]:
        """Collect what the replicas log, and log the mean once, or not at all."""
        vars(self.game)["log"] = self.replicas[0].log
        try:
            yield
        finally:
            del vars(self.game)["log"]
            spoken = [replica.logged for replica in self.replicas]
            for replica in self.replicas:
                replica.logged = []
        for each in zip(*spoken, strict=False) if not silent else ():
            name, value, args, kwargs = each[0]
            values = [other[1] for other in each]
            if all(other[0] == name for other in each) and all(isinstance(v, Tensor | float | int) for v in values):
                device = self.replicas[0].device
                value = torch.stack([torch.as_tensor(v, device=device).detach().float() for v in values]).mean(0)
            self.game.log(name, value, *args, **kwargs)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Raise if another replica calls the author's own networks: it would update their buffers a second time."""

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

    @contextmanager
    def _without_forward_mode(self) -> Iterator[None]:
        """Raise if a replica takes a forward-mode derivative: torch keeps its level for all threads together."""

        def enter() -> int:
            if here() is None:
                return before()
            raise UserError(
                f"strategy dp: a loss takes a forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad), and "
                f"torch has only one at a time for all threads of a process; {ADVICE}"
            )

        before, forward_ad.enter_dual_level = forward_ad.enter_dual_level, enter
        try:
            yield
        finally:
            forward_ad.enter_dual_level = before


class Meeting:
    """Where the replicas' threads wait for each other and exchange values."""

    def __init__(self, size: int) -> None:
        self.brought: list[tuple[str, Any]] = [("", None)] * size
        self.barrier = threading.Barrier(size)

    def all(self, number: int, what: str, value: Any = None) -> list[Any]:
        """The values of all threads. Raises if the threads come with different `what`: their losses have diverged."""
        self.brought[number] = (what, value)
        self.barrier.wait()
        brought = list(self.brought)
        self.barrier.wait()
        if any(other != what for other, _ in brought):
            parts = "; ".join(f"replica {k} is at {other}" for k, (other, _) in enumerate(brought))
            raise UserError(f"under strategy dp the parts of a batch go different ways: {parts}; {ADVICE}")
        return [value for _, value in brought]

    def close(self) -> None:
        """End all waiting, because one thread will not come."""
        self.barrier.abort()

    def open(self) -> None:
        self.barrier.reset()
        self.brought = [("", None)] * len(self.brought)


@dataclass(frozen=True)
class Autocast:
    """The autocast settings that torch keeps separately for each thread."""

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

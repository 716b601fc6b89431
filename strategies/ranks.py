"""The ranks that play a phase together. Here each is a process; under dp each is a thread (see policies/dp.py)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gan.module import GanModule
from gan.phase import Phase
from strategies.policies.policy import Policy
from strategies.policies.replica import Replica

T = TypeVar("T")


class Ranks:
    """What a phase needs from the other ranks, beside what its policies communicate. ThreadRanks overrides it.

    Where each rank is a process this is almost nothing, because then no other rank shares this process.
    """

    def __init__(self, number: int = 0, size: int = 1) -> None:
        self.number, self.size = number, size  # this rank's number, and the number of ranks

    @property
    def other_replicas(self) -> Sequence[Replica]:
        """The replicas in this process beside the author's game."""
        return ()

    def step(self, game: GanModule, batch: Any, *args: Any, tried_alone: bool | None = None, **kwargs: Any) -> Any:
        """Run the game's training_step.

        `tried_alone` is None in training. In a trial (see check/first_step.py) it is whether the batch has the samples
        of all ranks.
        """
        return game.training_step(batch, *args, **kwargs)

    def begin(self, phase: Phase, policies: Mapping[str, Policy]) -> None:
        """Let only the phase's learners require gradients."""
        for policy in policies.values():
            policy.begin(phase)

    @contextmanager
    def all_learning(self, policies: Mapping[str, Policy], second_order: bool) -> Iterator[None]:
        """Inside the `with`, every player that can learn requires gradients: for a fake that several phases use.

        With `second_order`, compiled players run eagerly inside.
        """
        before = {name: policy.learning for name, policy in policies.items()}
        compiled = [policy.compiled for policy in policies.values() if second_order and policy.compiled is not None]
        for policy in policies.values():
            policy.learn(not policy.player.frozen)
        try:
            with ExitStack() as stack:
                for each in compiled:
                    stack.enter_context(each.as_written())
                yield
        finally:
            for name, policy in policies.items():
                policy.learn(before[name])

    def forward(self, context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        """The context around a loss. `context` is the precision plugin's."""
        return context

    def ask(self, question: Callable[[], bool], device: torch.device) -> bool:
        """The first rank's answer, on all ranks. No other rank calls the function."""
        if self.size == 1:
            return bool(question())
        answer = torch.tensor(self.number == 0 and bool(question())).byte().to(device, non_blocking=True)
        dist.broadcast(answer, 0)
        return bool(answer)

    def any(self, value: bool) -> bool:
        """Whether the value is true on any rank of this process."""
        return value

    def mean(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """The mean of each loss over the ranks of this process."""
        return losses

    def once(self, items: Sequence[T], what: str) -> Iterator[T] | Sequence[T]:
        """Iterate over the items on one rank of this process. Its other ranks wait until that is done."""
        return items

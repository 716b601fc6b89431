"""The ranks that save or load together. If one rank fails, all raise an error."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from gan.checkpoint import reason
from gan.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class SavingRanks:
    rank: int = 0
    size: int = 1

    def each(self, step: Callable[[], T]) -> list[T]:
        """Run a step on all ranks. Returns all results. If one rank fails, all raise, so that none waits for it."""
        result, failure, told = None, None, None
        try:
            result = step()
        except (OSError, UserError) as error:
            failure, told = error, (UserError, reason(error))
        except Exception as error:  # noqa: BLE001 - our own mistake, so it is no UserError on the other ranks
            failure, told = error, (RuntimeError, f"{type(error).__name__}: {error}")
        heard: list[Any] = [(result, told)]
        if self.size > 1:
            heard = [None] * self.size
            dist.all_gather_object(heard, (result, told))
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


ALONE = SavingRanks()

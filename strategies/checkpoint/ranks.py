"""The ranks that save or load together: a failure of one is an error on all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from gan.checkpoint import reason
from gan.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1

    def each(self, step: Callable[[], T]) -> list[T]:
        """All ranks do a step and get the results of all. Where one fails, all raise, so that none waits for it."""
        result, failure = None, None
        try:
            result = step()
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
            failure = error
        told: list[Any] = [(result, _told(failure))]
        if self.size > 1:
            told = [None] * self.size
            dist.all_gather_object(told, (result, _told(failure)))
        if failure is not None:
            raise failure
        for rank, (_, other) in enumerate(told):
            if other is not None:
                kind, text = other
                raise kind(f"rank {rank}: {text}")
        return [result for result, _ in told]

    def first(self, step: Callable[[], None]) -> None:
        """The first rank does a step, for all."""
        self.each(step if self.rank == 0 else lambda: None)


def _told(failure: Exception | None) -> tuple[type[Exception], str] | None:
    """What the other ranks raise. A mistake of ours is no UserError there either."""
    if failure is None:
        return None
    if isinstance(failure, (OSError, UserError)):
        return UserError, reason(failure)
    return RuntimeError, f"{type(failure).__name__}: {failure}"


ALONE = Ranks()

"""Makes a run's game and a rank's batch without values, and traces the game's phases."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from datasets.files.pictures import MadeUp
from gan.app.run.reopen import batches_of, loaders_ready
from gan.files.errors import UserError
from gan.module import GanModule
from gan.runs import Run
from gan.runs.run import made_to
from nets.norm import synchronised
from strategies.batches.micro_batches import Batches
from strategies.cost.tracing import Trace, traces
from strategies.processes.failure import in_a_line

# What code raises that asks a tensor without values for them; by way of NumPy too.
NO_VALUES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, AssertionError)


@dataclass
class Opened:
    """A run, and a rank's batch. `why`: why it was computed on a CPU, with values."""

    run: Run
    batch: Any
    why: str = ""
    played: dict[Any, Sequence[Trace]] = field(default_factory=dict, init=False)

    @property
    def game(self) -> GanModule:
        return self.run.game

    @property
    def samples(self) -> int:
        return Batches().rows(self.batch)

    @property
    def made_up(self) -> str:
        """What it is counted with where there are no data."""
        train: Any = getattr(self.run.data, "train", None)
        if not isinstance(getattr(getattr(train, "a", None), "pictures", train), MadeUp):  # of two sides the first
            return ""
        size = "x".join(map(str, reversed(train.size)))
        return f"no data that can be read: counted with {len(train):,} made-up pictures of {size}"

    def trace(self, recompute: frozenset[str], served: Mapping[str, str] = MappingProxyType({})) -> Sequence[Trace]:
        """What happens in its phases, if these players recompute, and those in `served` are on other ranks."""
        key = recompute, *sorted(served.items())
        if key not in self.played:
            with synchronised():  # as in training
                self.played[key] = traces(self.game, self.batch, recompute, "cpu" if self.why else "meta", served)
        return self.played[key]


def opened(make: Callable[[], Run], ranks: int) -> Opened:
    """Open the run that `make` makes, in a world of so many ranks.

    All is on the meta device and needs no memory. Games that read values, as by `.item()`, are played on the CPU.
    """
    try:
        with torch.device("meta"), made_to("plan", ranks=ranks):
            run = make()
        run.game.to("meta")  # what was read from a file is on the CPU yet
        found = _opened(run, ranks)
        found.trace(frozenset())
        return found
    except UserError:
        raise
    except NO_VALUES as error:
        why = in_a_line(error)
    with made_to("plan", ranks=ranks):
        run = make()
    return _opened(run, ranks, why)


def _opened(run: Run, ranks: int, why: str = "") -> Opened:
    """The run with its first rank's first batch."""
    run.game.assemble()
    with loaders_ready(run, ranks) as source:
        batch = next(batches_of(source, "train"))
    return Opened(run, batch if why else move_data_to_device(batch, torch.device("meta")), why)

"""How long the stages of a pipeline take, and where an even cut would be.

Before the first call nobody knows how long a layer takes: that depends on the samples. So the first cut is by weights.
The first calls are measured, and if another cut were clearly more even, a line says what to type. Weights do not move
in the midst of a training.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from strategies.pipelining.cutting import share_out

MEASURED = range(3, 9)  # the calls that are measured
WORTH_IT = 0.8  # what an even cut must leave of the slowest stage's time


class Balance:
    """Measures the units of one network. `unit_stage` has them in the order of the network."""

    def __init__(
        self, player: str, unit_stage: Mapping[str, int], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.player, self.unit_stage, self.group, self.device = player, unit_stage, group, device
        self.calls = 0
        self.seconds: dict[str, float] = {}  # the shortest time of each unit of this rank

    def timed(self, unit: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a unit, which is measured for each chunk."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.calls not in MEASURED:
                return forward(*args, **kwargs)
            self._wait()
            began = time.perf_counter()
            found = forward(*args, **kwargs)
            self._wait()
            took = time.perf_counter() - began
            self.seconds[unit] = min(took, self.seconds.get(unit, took))
            return found

        return call

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def called(self) -> None:
        """A call is over. All ranks say so together."""
        self.calls += 1
        if self.calls == MEASURED.stop:
            everyone: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(everyone, self.seconds, group=self.group)
            advice = advise(self.player, self.unit_stage, {n: s for each in everyone for n, s in each.items()})
            if advice:
                rank_zero_info(advice)


def advise(player: str, unit_stage: Mapping[str, int], seconds: Mapping[str, float]) -> str | None:
    """What to type if other stages would take less time; None if these are even enough."""
    units = [name for name in unit_stage if name in seconds]
    stages = len({unit_stage[name] for name in units})
    better = dict(zip(units, share_out([seconds[name] for name in units], stages), strict=True))
    now, then = _times(unit_stage, seconds, units), _times(better, seconds, units)
    if max(then) > WORTH_IT * max(now):
        return None
    first = {stage: name for name, stage in reversed(better.items())}
    return (
        f"player '{player}': the forward of its stages takes {_milliseconds(now)} a chunk, and all wait for the "
        f"slowest; with {_milliseconds(then)} the stages would be more even: type "
        f"Player('{player}', ..., blocks={[first[stage] for stage in sorted(first)]})"
    )


def _times(stage_of: Mapping[str, int], seconds: Mapping[str, float], units: list[str]) -> list[float]:
    total: dict[int, float] = {}
    for name in units:
        total[stage_of[name]] = total.get(stage_of[name], 0.0) + seconds[name]
    return [total[stage] for stage in sorted(total)]


def _milliseconds(times: list[float]) -> str:
    return ", ".join(f"{1000 * each:.3g}" for each in times) + " ms"

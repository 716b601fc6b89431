"""A network in stages on the ranks of a group."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nets.norm import rows_together
from strategies import private
from strategies.pipelining.cutting import share_out
from strategies.pipelining.program import Action, Carrier, Plan, Program, forwards

# Before the first call nobody knows how long a layer takes: that depends on the samples. So the first cut is by
# weights. The first calls are measured, and if another cut were clearly more even, a line says what to type. Weights do
# not move in the midst of a training.

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
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def called(self) -> None:
        """A call is over. All ranks say so together."""
        self.calls += 1
        if self.calls == MEASURED.stop:
            everyone: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(everyone, self.seconds, group=self.group)
            advice = advise(self.player, self.unit_stage, {n: s for each in everyone for n, s in each.items()})
            if advice:
                private.say(advice)


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


@dataclass
class Pipe:
    """A network whose units are dealt out to the ranks of a group, in stages.

    [Note: a call through a pipeline]
    Every rank calls the network with its own samples, as under any policy. Then, in this order:

        compare     all ranks tell each other what they call it with, because all must do the same
        plan        when it is new: a run of one chunk, all ranks at once, shows what goes from where to where
        gather      every rank gets the inputs of all
        forward     each rank runs the forward of its stages for each chunk; tensors go on to later stages
        scatter     each rank gets the outputs of its own samples

    Then each rank computes its loss from its own samples, by whatever networks and policies. So all ranks work while
    the discriminator does. When its backward comes to this call:

        gather      the last stage gets all gradients of outputs
        backward    each rank runs the backward of its stages for each chunk; gradients go back to earlier stages
        sum         of the gradients of inputs, if they need them

    The gradients of a stage's weights are then those of all samples of the group's ranks.

    A chunk is a part of all ranks' samples together. What looks at a whole batch, as batch norm does, needs one chunk.

    `unit_stage` has the stage of each unit, `stage_of` that of each parameter, by its id. `copies` is the group of the
    ranks that have the same stages of other pipelines, if there are any. `chunks` is what the user typed.
    """

    player: str
    network: nn.Module
    unit_stage: Mapping[str, int]
    stage_of: Mapping[int, int]
    group: dist.ProcessGroup
    copies: dist.ProcessGroup | None
    device: torch.device
    chunks: int | None
    overlaps: bool = False  # schedule 1f1b
    plans: dict[str, Plan] = field(default_factory=dict)
    tables: set[tuple[Any, int]] = field(default_factory=set)  # arguments that have no row for each sample
    program: Program | None = None  # the run that goes on
    whole_batch: bool = False  # some unit looks at the whole batch
    last: bool = True  # the backward that runs, or comes next, is that of the phase's last micro-batch
    trying: bool = False  # a trial of a step, on a few samples, whatever the number of chunks
    waiting: Any = None  # the backward of an earlier micro-batch that runs beside the next forward

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.stages = max(self.unit_stage.values()) + 1
        self.balance = Balance(self.player, self.unit_stage, self.group, self.device)
        self.together = rows_together(self.network)
        self.copy = (0, 1)
        if self.copies is not None:
            self.copy = dist.get_rank(self.copies), dist.get_world_size(self.copies)

    def rank_of(self, stage: int) -> int:
        return stage % self.size

    def mine(self) -> range:
        """The stages of this rank."""
        return range(self.rank, self.stages, self.size)

    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank's stages."""
        return [each for each in self.network.parameters() if self.rank_of(self.stage_of[id(each)]) == self.rank]

    def orders(self, chunks: int) -> list[list[Action]]:
        """The forwards of each rank. The backwards are these in reverse."""
        return [forwards(rank, self.size, self.stages, chunks) for rank in range(self.size)]

    def add(self, values: Tensor) -> Tensor:
        """The sum of a tensor over the pipelines."""
        total = values.clone(memory_format=torch.contiguous_format)
        if self.copies is not None:
            dist.all_reduce(total, group=self.copies)
        return total

    def start(self, mine: range, carrier: Carrier) -> Program:
        """A run of the network's forward for these stages."""
        return Program(self.player, frozenset(mine), self.stage_of, carrier, self.device, self.add, self.copy)

    def finish(self) -> None:
        """Run the backward that waits. All ranks call it together."""
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            waiting.run()
            waiting.give()

    def drop(self) -> None:
        """Forget the backward that waits, after a phase that has failed or was a trial."""
        self.waiting = None

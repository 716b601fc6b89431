"""A network in stages on the ranks of a group, and the plan of its forward, which all of them know."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gan import ranks
from gan.files.errors import UserError
from gan.files.tensors import as_bytes
from nets.norm import rows_together
from strategies import private
from strategies.advice import type_instead
from strategies.pipelining.cutting import Unit


@dataclass(frozen=True)
class Meta:
    """What is known everywhere of a tensor that is on one rank."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Meta":
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def stand_in(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def in_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, because gloo and NCCL do not send every dtype: int16, complex numbers."""
    return as_bytes(tensor.resolve_conj().resolve_neg())


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit: what it returns, where a tensor is a `Meta`, how often it draws noise, and what it writes."""

    unit: str
    form: Any
    leaves: Sequence[Any]
    draws: int
    wrote: Sequence[int] = ()  # the numbers of the arguments that it has changed in place


OUTSIDE = -1  # where an output goes

Endpoint = tuple[str, int]  # "output" or "transfer", and its number


@dataclass
class Transfer:
    """A tensor that leaves a stage in each chunk: to a later one, or as an output of the network."""

    source: int
    target: int  # a stage, or OUTSIDE
    meta: Meta
    learns: bool = False  # whether a gradient comes back


@dataclass
class ForwardPlan:
    """What a run of the whole forward has shown. It is the same on all ranks of a pipeline."""

    calls: list[UnitCall] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    form: Any = None  # of what the network returns
    leaves: list[Any] = field(default_factory=list)  # of what it returns: those that are no tensors, else None
    outputs: dict[int, Transfer] = field(default_factory=dict)  # the tensors, by the numbers of these leaves
    whole_batch: str = ""  # a unit that looks at the whole batch
    written: dict[int, list[str]] = field(default_factory=dict)  # by rank, the buffers that its stages write
    noting: list[int] = field(default_factory=list)  # ranks whose units assign attributes
    reached: dict[int, set[Endpoint]] = field(default_factory=dict)  # by output: where its gradient comes


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

        compare     which outputs some rank's loss makes use of: what leads to others has no gradient, as on one device
        gather      the last stage gets all gradients of outputs
        backward    each rank runs the backward of its stages for each chunk; gradients go back to earlier stages
        sum         of the gradients of inputs, if they need them

    The gradients of a stage's weights are then those of all samples of the group's ranks.

    A chunk is a part of all ranks' samples together. What looks at a whole batch, as batch norm does, needs one chunk.
    """

    player: str
    network: nn.Module
    units: Sequence[Unit]  # which have their stages; a parameter outside of them is in the first stage
    group: dist.ProcessGroup
    copies: dist.ProcessGroup | None  # the ranks that have the same stages of other pipelines, if there are any
    device: torch.device
    chunks: int | None  # what the user typed
    overlaps: bool = False  # schedule 1f1b
    plans: dict[str, ForwardPlan] = field(default_factory=dict)
    tables: set[tuple[Any, int]] = field(default_factory=set)  # arguments that have no row for each sample
    program: Any = None  # the Program that runs now
    whole_batch: bool = False  # some unit looks at the whole batch
    last: bool = True  # the backward that runs, or comes next, is that of the phase's last micro-batch
    trying: bool = False  # a trial of a step, on a few samples, whatever the number of chunks
    waiting: Any = None  # the backward of an earlier micro-batch that runs beside the next forward
    called: list[Tensor] = field(default_factory=list)  # what each call since the last backward has returned beside

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.stages = max(unit.stage for unit in self.units) + 1
        self.stage_of = dict.fromkeys(map(id, self.network.parameters()), 0)  # by the ids of parameters
        self.stage_of |= {id(each): unit.stage for unit in self.units for each in unit.parameters.values()}
        self.together = rows_together(self.network)

    def same_stages(self) -> ranks.World:
        """The ranks that have this one's stages in all pipelines. Not kept: it refers to the pipe, and so to groups."""

        def add(values: Tensor) -> Tensor:
            total = values.clone(memory_format=torch.contiguous_format)
            if self.copies is not None:
                dist.all_reduce(total, group=self.copies)
            return total

        number, size = (0, 1) if self.copies is None else (dist.get_rank(self.copies), dist.get_world_size(self.copies))
        return ranks.World(number, size, add)

    def refusal(self, what: str) -> UserError:
        """The error where the network does what does not go through stages."""
        return UserError(
            f"player '{self.player}': under policy 'pipeline' its network {what}; otherwise type "
            f"{type_instead(self.player, 'zero3')}"
        )

    def rank_of(self, stage: int) -> int:
        return stage % self.size

    def mine(self) -> range:
        """The stages of this rank."""
        return range(self.rank, self.stages, self.size)

    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank's stages."""
        return [each for each in self.network.parameters() if self.rank_of(self.stage_of[id(each)]) == self.rank]

    def finish(self) -> None:
        """Run the backward that waits. All ranks call it together."""
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            waiting.run()
            waiting.give()

    def drop(self) -> None:
        """Forget the backward that waits, after a phase that has failed or was a trial, and earlier calls."""
        self.waiting, self.called = None, []


def refuse_checkpoint(player: str, around: str) -> None:
    """Refuse a checkpoint around what ranks compute together: in backward one of them alone would compute it again."""
    if private.in_checkpoint():
        raise UserError(
            f"player '{player}': torch.utils.checkpoint around {around} computes it again in backward, where the other "
            f"ranks of a pipeline do not come; leave the checkpoint out and type "
            f"{type_instead(player, 'pipeline+recompute')}"
        )


def another_way(player: str, what: str = "goes another way than before") -> UserError:
    """The error where a forward differs between two calls, or between two ranks."""
    return UserError(
        f"player '{player}': its forward {what}; a pipeline needs the same blocks in the same order, in every call and "
        f"on every rank; type {type_instead(player, 'zero3')}"
    )

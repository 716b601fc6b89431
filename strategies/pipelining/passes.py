"""The forward and the backward of a call, chunk by chunk."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gan.files.errors import UserError
from strategies.advice import type_instead
from strategies.pipelining.cutting import Unit
from strategies.pipelining.pipe import Endpoint, Meta, Pipe, Transfer, UnitCall, another_way, in_bytes
from strategies.pipelining.program import Program
from strategies.pipelining.request import ForwardRequest, as_result
from strategies.pipelining.schedule import Action, orders
from strategies.pipelining.wires import Wires
from strategies.pipelining.writes import Buffers
from strategies.sharding.resharded_parameter import version_of


class StageChunk:
    """One chunk in one stage: it carries tensors over the wires in the forward, and keeps them for the backward."""

    def __init__(self, request: ForwardRequest, wires: Wires, action: Action) -> None:
        self.player, self.plan, self.wires, self.action = request.pipe.player, request.plan, wires, action
        self.calls = iter(self.plan.calls)
        self.inputs: list[Tensor] = []  # leaves of the network's inputs
        self.received: dict[int, Tensor] = {}  # leaves, by transfer
        self.made: dict[Endpoint, Tensor] = {}  # what it sends and returns, with a graph

    def carry(self, number: int, tensor: Tensor, source: int, target: int) -> Tensor | None:
        known = self.plan.transfers[number] if number < len(self.plan.transfers) else None
        if known is None or (known.source, known.target) != (source, target):
            raise another_way(self.player)
        if source == self.action.stage:
            now = tensor.requires_grad, tensor.shape, tensor.dtype
            if now != (known.learns, known.meta.shape, known.meta.dtype):
                raise another_way(
                    self.player,
                    "passes on a tensor of another shape than before, or that learns where it did not, or the reverse",
                )
            if known.learns:
                self.made["transfer", number] = tensor
            self.wires.send(True, number, self.action.chunk, tensor)
        if target != self.action.stage:
            return None
        received = self.wires.receive(True, number, self.action.chunk)
        if not known.learns:
            return received
        self.received[number] = received.requires_grad_()
        return as_result(received)

    def agreed(self, unit: Unit, call: UnitCall | None) -> UnitCall:
        known = next(self.calls, None)
        if known is None or known.unit != unit.name:
            before = "returned" if known is None else f"called '{known.unit}'"
            raise another_way(self.player, f"calls '{unit.name}', where it {before} before")
        if call is not None and _plain(call.leaves) != _plain(known.leaves):
            raise another_way(self.player, f"gets other numbers from '{unit.name}' than before")
        if call is not None and call.draws != known.draws:
            drew = f"draws {call.draws} times in '{unit.name}', where it drew {known.draws} times before"
            raise another_way(self.player, drew)
        return known


def _plain(leaves: Sequence[Any]) -> list[Any]:
    """The numbers and texts among leaves. A NaN is a text here, for it equals nothing."""
    return [None if isinstance(leaf, Tensor | Meta) else leaf if leaf == leaf else "nan" for leaf in leaves]


StageChunks = dict[Action, StageChunk]


class ForwardPass:
    """The forwards of this rank's stages. `pieces` are what their backward needs."""

    def __init__(self, request: ForwardRequest) -> None:
        self.request, self.plan, self.pipe = request, request.plan, request.pipe
        self.inputs = request.inputs()
        self.pieces: StageChunks = {}
        self.held: dict[int, list[Tensor]] = {}  # the chunks of each output that this rank's stages have
        self.buffers = Buffers(self.pipe, self.plan.written.get(self.pipe.rank, ()))

    def step(self, action: Action, wires: Wires) -> None:
        piece = StageChunk(self.request, wires, action)
        program = Program(self.pipe, [action.stage], piece)
        with self.buffers.chunk():
            leaves, form, piece.inputs = self.request.run(program, self.inputs, action.chunk)
        if form != self.plan.form or len(program.carried) != len(self.plan.transfers):
            raise another_way(self.pipe.player)
        if _plain(leaves) != _plain(self.plan.leaves):
            raise another_way(self.pipe.player, "returns other numbers than before")
        for number, output in self.plan.outputs.items():
            if output.source == action.stage:
                if output.learns != leaves[number].requires_grad:
                    raise another_way(self.pipe.player, "returns a tensor that learns where it did not, or the reverse")
                self.held.setdefault(number, []).append(leaves[number].detach())
                if leaves[number].requires_grad:
                    piece.made["output", number] = leaves[number]
        if self.request.graph:
            self.pieces[action] = piece

    def outputs(self) -> tuple[Tensor, ...]:
        """After all chunks: the tensors that the network returns for this rank's samples."""
        self.buffers.keep()
        self._send_buffers()
        return tuple(self._scattered(output, self.held.get(number)) for number, output in self.plan.outputs.items())

    def _scattered(self, output: Transfer, held: list[Tensor] | None) -> Tensor:
        """This rank's rows of an output, from the rank of the stage that has it."""
        source, group, meta = self.pipe.rank_of(output.source), self.pipe.group, output.meta
        own = torch.empty((self.request.rows, *meta.shape[1:]), dtype=meta.dtype, device=self.pipe.device)
        whole = None if held is None else torch.cat(held).contiguous()
        if self.request.alone:
            own = own if whole is None else whole
            dist.broadcast(in_bytes(own), group=group, group_src=source)
        else:
            parts = None if whole is None else [in_bytes(part) for part in whole.split(self.request.rows)]
            dist.scatter(in_bytes(own), parts, group=group, group_src=source)
        return own

    @torch.no_grad()
    def _send_buffers(self) -> None:
        """What a forward has written into buffers and attributes is the same on all ranks, as under any policy."""
        buffers = dict(self.pipe.network.named_buffers()) if self.plan.written else {}
        for rank, names in self.plan.written.items():
            for name in names:
                dist.broadcast(buffers[name], group=self.pipe.group, group_src=rank)
        for rank in self.plan.noting:
            told: list[Any] = [self.buffers.assigned()]
            dist.broadcast_object_list(told, group=self.pipe.group, group_src=rank)
            if rank != self.pipe.rank:
                self.buffers.hear(told[0], self.pipe.device)


class BackwardPass:
    """The backwards of this rank's stages. `slopes` are the gradients of the network's outputs, of this rank's rows."""

    def __init__(self, request: ForwardRequest, pieces: StageChunks, slopes: Sequence[Tensor | None]) -> None:
        self.request, self.plan, self.pipe, self.pieces = request, request.plan, request.pipe, pieces
        rows = request.rows * request.owners
        used = self._used(slopes)
        # Only these have a gradient on one device too. Others would learn from zeros: by momentum, by weight decay.
        self.reached = {place for number in used for place in self.plan.reached[number]}
        self.of_outputs = self._gathered(used)
        self.of_inputs = [leaf.new_zeros(rows, *leaf.shape[1:]) for leaf in (request.leaves[n] for n in request.wanted)]
        self.came: set[int] = set()  # of these: those that have got a gradient, on this rank
        self.of_weights: list[Tensor | None] = [None] * len(request.weights)

    def run(self) -> None:
        run(self.pipe, None, self)

    def step(self, action: Action, wires: Wires) -> None:
        start, stop = self.request.bounds(action.chunk)
        piece = self.pieces.pop(action)
        slopes = {place: wires.receive(False, place[1], action.chunk) for place in piece.made if place[0] == "transfer"}
        slopes |= {("output", number): slope[start:stop] for number, slope in self.of_outputs.items()}
        made = {place: tensor for place, tensor in piece.made.items() if place in self.reached}
        leaves = [*piece.received.values(), *piece.inputs, *self.request.weights]
        found: list[Tensor | None] = [None] * len(leaves)
        # What two phases share is made while weights learn that the later phase has frozen.
        asked = [number for number, leaf in enumerate(leaves) if leaf.requires_grad]
        with self._buffers_stay():
            if made and asked:
                which = tuple(made.values()), [leaves[n] for n in asked], [slopes[place] for place in made]
                for number, slope in zip(asked, torch.autograd.grad(*which, allow_unused=True), strict=True):
                    found[number] = slope
        for number, tensor in piece.received.items():
            slope = found.pop(0)
            if (slope is not None) != (("transfer", number) in self.reached):
                what = (
                    "learns in some calls only through what another stage has made (write x.detach() if it never does)"
                )
                raise another_way(self.pipe.player, what)
            wires.send(False, number, action.chunk, torch.zeros_like(tensor) if slope is None else slope)
        for number, total in enumerate(self.of_inputs):
            slope = found.pop(0)
            if slope is not None:
                total[start:stop] += slope
                self.came.add(number)
        for number, slope in enumerate(found):
            before = self.of_weights[number]
            if slope is not None:  # not added in place: autograd may give one tensor to two weights
                self.of_weights[number] = slope if before is None else before + slope

    @contextmanager
    def _buffers_stay(self) -> Iterator[None]:
        """The ranks of other stages have got the buffers after the forward, and would not see them change."""
        names = self.plan.written.get(self.pipe.rank, ())
        before = {name: version_of(self.pipe.network.get_buffer(name)) for name in names}
        yield
        for name, version in before.items():
            if version_of(self.pipe.network.get_buffer(name)) != version:
                raise UserError(
                    f"player '{self.pipe.player}': backward writes buffer '{name}', as where torch.utils.checkpoint "
                    f"computes a batch norm again; leave the checkpoint out and type pipeline+recompute, or type "
                    f"{type_instead(self.pipe.player, 'zero3')}"
                )

    def slopes(self) -> list[Tensor | None]:
        """The gradients of the inputs that need one, and of this rank's weights."""
        came = self._on_some_rank([number in self.came for number in range(len(self.of_inputs))])
        inputs = [self._own_rows(each) if by_some else None for each, by_some in zip(self.of_inputs, came, strict=True)]
        return [*inputs, *self.of_weights]

    def give(self) -> None:
        """Add the gradients to those of the weights, as autograd does after a backward."""
        for weight, slope in zip(self.request.weights, self.of_weights, strict=True):
            if slope is not None:
                # It lies as the weight lies: fused optimizers do not look.
                slope = torch.empty_like(weight).copy_(slope)
                weight.grad = slope if weight.grad is None else weight.grad + slope

    def _used(self, slopes: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
        """The outputs of which some rank's loss makes use, with this rank's gradient."""
        every = zip(self.plan.outputs.items(), slopes, strict=True)
        found = {number: slope for (number, output), slope in every if output.learns}
        used = self._on_some_rank([slope is not None for slope in found.values()])
        return {number: found[number] for number, by_some in zip(found, used, strict=True) if by_some}

    def _on_some_rank(self, own: list[bool]) -> list[bool]:
        everyone = torch.tensor(own, dtype=torch.int32, device=self.pipe.device)
        if own:
            dist.all_reduce(everyone, dist.ReduceOp.MAX, group=self.pipe.group)
        return [bool(each) for each in everyone.tolist()]

    def _gathered(self, slopes: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
        """For each output that this rank's stages have: the gradients of all ranks' rows."""
        found: dict[int, Tensor] = {}
        for number, slope in slopes.items():
            output = self.plan.outputs[number]
            target, group, meta = self.pipe.rank_of(output.source), self.pipe.group, output.meta
            if slope is None:
                slope = torch.zeros((self.request.rows, *meta.shape[1:]), dtype=meta.dtype, device=self.pipe.device)
            if self.request.alone:
                found[number] = slope.clone(memory_format=torch.contiguous_format)
                dist.reduce(found[number], group=group, group_dst=target)
                continue
            own = in_bytes(slope.contiguous())
            parts = [torch.empty_like(own) for _ in range(self.pipe.size)] if self.pipe.rank == target else None
            dist.gather(own, parts, group=group, group_dst=target)
            if parts is not None:
                found[number] = torch.cat([part.view(slope.dtype).view(slope.shape) for part in parts])
        return found

    def _own_rows(self, total: Tensor) -> Tensor:
        """This rank's rows of an input's gradient, to which all stages may add."""
        dist.all_reduce(total, group=self.pipe.group)
        if self.request.alone:
            return total.div_(self.pipe.size)
        return total[self.pipe.rank * self.request.rows :][: self.request.rows].clone()


def run(pipe: Pipe, ahead: ForwardPass | None, waiting: BackwardPass | None) -> None:
    """A forward, or a backward, or both beside each other: that of an earlier micro-batch. See [Note: 1f1b]."""
    every = orders(pipe.size, pipe.stages, *(0 if each is None else each.request.chunks for each in (ahead, waiting)))
    passes = {forward: each for forward, each in ((True, ahead), (False, waiting)) if each is not None}
    wires = Wires(pipe, every, {forward: each.plan.transfers for forward, each in passes.items()})
    for forward, action in every[pipe.rank]:
        passes[forward].step(action, wires)
    wires.wait()

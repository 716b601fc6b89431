"""The forward and the backward of a call, chunk by chunk."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from gan.files.errors import UserError
from strategies.advice import type_instead
from strategies.objects.content import PLAIN, ModuleAttributes, same
from strategies.pipelining.cutting import Unit
from strategies.pipelining.program import Endpoint, Meta, Pipe, Program, Transfer, UnitCall, in_bytes
from strategies.pipelining.request import ForwardRequest, as_result
from strategies.pipelining.schedule import Action, Step, messages, orders
from strategies.sharding.resharded_parameter import version_of

SMALL = 1024  # numbers in an attribute that is told to the other ranks
SMALL_WEIGHT = 2**16  # numbers, so that comparing them takes no time


class Buffers:
    """What a forward writes into buffers, chunk by chunk.

    Every chunk begins with the values from before the call. So a spectral norm, which one device moves once in a call,
    moves once here. Each chunk has copies of its own, because a graph may have saved them. A chunk of another stage of
    this rank has written other buffers.

    The same holds for attributes, such as a count of calls: the author's Python runs for each chunk, and in the end an
    attribute is as after one forward. Those of a unit are told to the other ranks, unless they are large: a cache.
    """

    def __init__(self, pipe: Pipe, names: Collection[str]) -> None:
        self.pipe, self.modules = pipe, dict(pipe.network.named_modules())
        mine = pipe.mine()
        self.of_units = {m for unit in pipe.units if unit.stage in mine for m in unit.module.modules()}
        self.weights = list(dict.fromkeys(weight for module in self.of_units for weight in module.parameters(False)))
        self.chunks, self.before = 0, self._written()
        buffers = {
            f"{path}.{name}".lstrip("."): (module, name, buffer)
            for path, module in self.modules.items()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self.slots = {name: slot for name, slot in buffers.items() if name in names}
        self.unplanned = {name: (*slot, version_of(slot[2])) for name, slot in buffers.items() if name not in names}
        self.written: dict[str, Tensor] = {}  # buffers that were written in place, or that differ from before
        self.attributes = ModuleAttributes(self.modules.values())
        self.changed: dict[str, dict[str, Any]] = {}  # by module, the attributes that units of this rank have assigned

    def _written(self) -> tuple[list[Any], list[float]]:
        """What changes when a weight is written. Of small ones also the norm: no version counts what `.data` writes."""
        small: list[Tensor] = [
            each for each in self.weights if each.is_floating_point() and each.numel() <= SMALL_WEIGHT
        ]
        norms = (
            torch.stack([each.double() for each in torch._foreach_norm(small)]).nan_to_num().tolist() if small else []
        )
        return [(version_of(each), each.data_ptr()) for each in self.weights], norms

    @contextmanager
    def chunk(self) -> Iterator[None]:
        self.chunks += 1
        self.attributes.put_back()
        for module, name, buffer in self.slots.values():
            module._buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for path, scope, before in zip(self.modules, self.attributes.scopes, self.attributes.before, strict=True):
                if scope.owner in self.of_units:
                    now = scope.read().items()
                    changed = {name: each for name, each in now if not same(before.get(name, self), each)}
                    self.changed |= {path: changed} if changed else {}
            for key, (module, name, buffer) in self.slots.items():
                now, module._buffers[name] = module._buffers[name], buffer
                if now is None or now is buffer:
                    continue
                if version_of(now) or not torch.equal(now, buffer):
                    self.written[key] = now
        if (found := self.attributes.written()) is not None:
            raise UserError(
                f"player '{self.pipe.player}': its forward changes {found} in place, which a pipeline would do once "
                f"for each chunk; assign a new one (self.x = [*self.x, new]), keep it in a buffer, or do it in the loss"
            )

    @torch.no_grad()
    def keep(self) -> None:
        """After the last chunk: let the buffers have what the chunks have written."""
        if self.chunks > 1 and self._written() != self.before:
            raise UserError(
                f"player '{self.pipe.player}': its forward writes its own weights, which a pipeline would do once for "
                f"each chunk; type +chunks:1, as in pipeline+chunks:1, or keep what it writes in a buffer"
            )
        for key, (module, name, buffer, version) in self.unplanned.items():
            if module._buffers.get(name) is not buffer or version_of(buffer) != version:
                why = f"writes the buffer '{key}', which it did not in its first call with such arguments and flags"
                raise another_way(self.pipe.player, why)
        for key, now in self.written.items():
            self.slots[key][2].copy_(now)
        for path, changed in self.changed.items():
            for name, each in changed.items():
                vars(self.modules[path])[name] = pytree.tree_map_only(Tensor, partial(self._left, path, name), each)

    def _left(self, path: str, name: str, tensor: Tensor) -> Tensor:
        """A tensor that a unit has left in an attribute. Its gradient would reach one rank, in the midst of a graph."""
        if tensor.is_leaf:
            return tensor

        def refuse(_: Tensor) -> None:
            player = self.pipe.player
            raise UserError(
                f"player '{player}': a loss learns from what '{path}' leaves in its attribute '{name}', which a "
                f"pipeline has on the rank of the layer only; let the network's forward return that, or type "
                f"{type_instead(player, 'zero3')}"
            )

        with torch.enable_grad():
            found = tensor.view_as(tensor)
        found.register_hook(refuse)
        return found

    def assigned(self) -> dict[str, dict[str, Any]]:
        """Those of the changed attributes that are small, and have no graph."""
        found = {
            path: {
                name: each for name, each in changed.items() if sum(map(_numbers, pytree.tree_leaves(each))) <= SMALL
            }
            for path, changed in self.changed.items()
        }
        return pytree.tree_map_only(Tensor, Tensor.cpu, {path: each for path, each in found.items() if each})

    def hear(self, told: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
        for path, changed in pytree.tree_map_only(Tensor, lambda each: each.to(device), told).items():
            vars(self.modules[path]).update(changed)


def _numbers(value: Any) -> float:
    """How many numbers there are in a part of an attribute. What cannot be told has too many."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return float("inf") if getattr(value, "requires_grad", False) else np.prod(value.shape)
    return 1 if isinstance(value, PLAIN) else float("inf")


AHEAD = 2  # receives that are begun before they are needed


class Wires:
    """The messages of a pass from rank to rank, in the one order that all know. See [Note: one order of all messages].

    A message is named by whether it is one of a forward, by its transfer, and by its chunk.
    """

    def __init__(
        self, pipe: Pipe, orders: Sequence[Sequence[Step]], transfers: Mapping[bool, Sequence[Transfer]]
    ) -> None:
        self.pipe, self.transfers, self.rank = pipe, transfers, pipe.rank
        own = [each for each in messages(orders, transfers) if self.rank in (each.source, each.target)]
        self.next = deque(each for each in own if each.source != each.target)
        self.here: dict[tuple[bool, int, int], Tensor] = {}  # from another stage of this rank
        self.running: dict[tuple[bool, int, int], tuple[Tensor, Any]] = {}
        self.sending: list[tuple[Any, Tensor]] = []  # with the tensors, which must live until they are sent

    def wait(self) -> None:
        """Until all is sent. Chunks keep their wires, but not what these have sent."""
        for work, _ in self.sending:
            work.wait()
        self.sending = []

    def _begin_to_receive(self) -> None:
        message = self.next.popleft()
        room = self.transfers[message.forward][message.number].meta.empty(self.pipe.device)
        self.running[message[:3]] = room, dist.irecv(in_bytes(room), group=self.pipe.group, group_src=message.source)

    def _receives_next(self) -> bool:
        return bool(self.next) and self.next[0].target == self.rank

    def send(self, forward: bool, number: int, chunk: int, tensor: Tensor) -> None:
        """Begin to send. The tensor must not change until the pass ends."""
        transfer, tensor = self.transfers[forward][number], tensor.detach()
        if self.pipe.rank_of(transfer.source) == self.pipe.rank_of(transfer.target):
            self.here[forward, number, chunk] = tensor.clone()  # a block of the later stage may write into it
            return
        while self._receives_next():
            self._begin_to_receive()
        message, tensor = self.next.popleft(), tensor.contiguous()
        assert message[:3] == (forward, number, chunk)
        self.sending.append((dist.isend(in_bytes(tensor), group=self.pipe.group, group_dst=message.target), tensor))

    def receive(self, forward: bool, number: int, chunk: int) -> Tensor:
        name = forward, number, chunk
        if name in self.here:
            return self.here.pop(name)
        while self._receives_next() and (name not in self.running or len(self.running) <= AHEAD):
            self._begin_to_receive()
        room, work = self.running.pop(name)
        work.wait()
        return room


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


def another_way(player: str, what: str = "goes another way than before") -> UserError:
    """The error where a forward differs between two calls, or between two ranks."""
    return UserError(
        f"player '{player}': its forward {what}; a pipeline needs the same blocks in the same order, in every call and "
        f"on every rank; type {type_instead(player, 'zero3')}"
    )


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

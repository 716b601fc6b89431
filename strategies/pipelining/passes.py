"""The forward and the backward of a call, chunk by chunk."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gan import ranks
from gan.errors import UserError
from strategies.pipelining.program import Action, Call, Meta, Plan, Transfer, merged
from strategies.pipelining.request import Request

PLAIN = (bool, int, float, str)


class Buffers:
    """What a forward writes into buffers, chunk by chunk.

    Every chunk begins with the values from before the call. So a spectral norm, which one device moves once in a call,
    moves once here. Each chunk has copies of its own, because a graph may have saved them. A chunk of another stage of
    this rank has written other buffers.

    The same holds for numbers and other plain attributes, such as a count of calls: the author's Python runs for each
    chunk, and in the end each attribute is as after one forward.
    """

    def __init__(self, network: nn.Module, names: Iterable[str]) -> None:
        names = set(names)
        self.slots = [
            (f"{path}.{name}".lstrip("."), module, name, buffer)
            for path, module in network.named_modules()
            for name, buffer in module._buffers.items()
            if f"{path}.{name}".lstrip(".") in names and buffer is not None
        ]
        self.last: dict[str, Tensor] = {}
        self.modules = list(network.modules())
        self.attributes = [_plain(module) for module in self.modules]

    def begin(self) -> None:
        """Before a chunk."""
        self._note()
        self._restore_attributes()
        for _, module, name, buffer in self.slots:
            module._buffers[name] = buffer.clone()

    def _restore_attributes(self) -> None:
        for module, before in zip(self.modules, self.attributes, strict=True):
            now = _plain(module)
            if now != before:
                for name in now.keys() - before.keys():
                    del vars(module)[name]
                vars(module).update(before)

    def _note(self) -> None:
        for key, module, name, buffer in self.slots:
            now = module._buffers[name]
            if now is not buffer and not torch.equal(now, buffer):
                self.last[key] = now

    def written(self) -> dict[str, Tensor]:
        """The buffers that differ from before."""
        self._note()
        return self.last

    @contextmanager
    def aside(self) -> Iterator[None]:
        """After the `with`, the buffers are as before it."""
        try:
            yield
        finally:
            for _, module, name, buffer in self.slots:
                module._buffers[name] = buffer

    @contextmanager
    def undone(self) -> Iterator[None]:
        """After the `with`, buffers and attributes are as before it."""
        with self.aside():
            yield
        self._restore_attributes()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """After the `with`, the buffers have what the chunks have written."""
        with self.aside():
            yield
            self._note()
        with torch.no_grad():
            for key, _, _, buffer in self.slots:
                if key in self.last:
                    buffer.copy_(self.last[key])


def _plain(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that are numbers, strings and the like."""
    return {name: value for name, value in vars(module).items() if value is None or type(value) in PLAIN}


AHEAD = 2  # receives that are begun before they are needed, from each rank


class Wires:
    """The messages of a pass from rank to rank. Between two ranks all come in the order in which they are sent.

    The receiver knows that order, because it knows the other's schedule and the plan.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        orders: Sequence[Sequence[Action]],
        group: dist.ProcessGroup,
        device: torch.device,
        backward: bool = False,
    ) -> None:
        """`orders` has the actions of each rank. With `backward` gradients go from the target of a transfer back."""
        self.transfers, self.group, self.device, self.backward = transfers, group, device, backward
        self.rank, self.size = dist.get_rank(group), len(orders)
        self.here: dict[tuple[int, int], Tensor] = {}  # by transfer and chunk
        self.sending: list[tuple[Any, Tensor]] = []  # with the tensors, which must live until they are sent
        self.expected = {rank: deque(self._messages(order)) for rank, order in enumerate(orders) if rank != self.rank}
        self.running: dict[int, deque[tuple[tuple[int, int], Tensor, Any]]] = {rank: deque() for rank in self.expected}

    def _messages(self, order: Sequence[Action]) -> Iterator[tuple[int, int]]:
        """What a rank sends to this one, in order."""
        for action in order:
            for number, transfer in enumerate(self.transfers):
                source, target = self._ends(transfer)
                sent = transfer.meta.learns or not self.backward
                if sent and source == action.stage and target % self.size == self.rank:
                    yield number, action.chunk

    def _ends(self, transfer: Transfer) -> tuple[int, int]:
        return (transfer.target, transfer.source) if self.backward else (transfer.source, transfer.target)

    def __enter__(self) -> "Wires":
        for rank in self.expected:
            self._look_ahead(rank)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            for work, _ in self.sending:
                work.wait()

    def _look_ahead(self, rank: int) -> None:
        running, expected = self.running[rank], self.expected[rank]
        while expected and len(running) < AHEAD:
            message = expected.popleft()
            room = self.transfers[message[0]].meta.empty(self.device)
            running.append((message, room, dist.irecv(room, group=self.group, group_src=rank)))

    def send(self, number: int, chunk: int, tensor: Tensor) -> None:
        """Begin to send. The tensor must not change until the pass ends."""
        target = self._ends(self.transfers[number])[1] % self.size
        if target == self.rank:
            self.here[number, chunk] = tensor.detach()
            return
        tensor = tensor.detach().contiguous()
        self.sending.append((dist.isend(tensor, group=self.group, group_dst=target), tensor))

    def receive(self, number: int, chunk: int) -> Tensor:
        """Wait for a message. Those that come before it are kept."""
        source = self._ends(self.transfers[number])[0] % self.size
        while (number, chunk) not in self.here:
            message, room, work = self.running[source].popleft()
            self._look_ahead(source)
            work.wait()
            self.here[message] = room
        return self.here.pop((number, chunk))


@dataclass
class Piece:
    """What one chunk in one stage keeps for its backward."""

    inputs: list[Tensor] = field(default_factory=list)  # leaves of the network's inputs
    received: dict[int, Tensor] = field(default_factory=dict)  # leaves, by transfer
    sent: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)  # by the number of the output


Pieces = dict[Action, Piece]


class InTurn:
    """The carrier of one chunk in one stage: tensors go over the wires, and are kept for the backward."""

    def __init__(self, player: str, plan: Plan, wires: Wires, action: Action, piece: Piece) -> None:
        self.player, self.plan, self.wires, self.action, self.piece = player, plan, wires, action, piece
        self.called = 0

    def carry(self, number: int, tensor: Tensor, source: int, target: int) -> Tensor | None:
        transfers = self.plan.transfers
        if number >= len(transfers) or (transfers[number].source, transfers[number].target) != (source, target):
            raise another_way(self.player)
        learns = transfers[number].meta.learns
        if source == self.action.stage:
            if learns:
                self.piece.sent[number] = tensor
            self.wires.send(number, self.action.chunk, tensor)
        if target != self.action.stage:
            return None
        received = self.wires.receive(number, self.action.chunk)
        if learns:
            self.piece.received[number] = received.requires_grad_()
        return received

    def told(self, stage: int, call: Call | None) -> Call:
        if self.called >= len(self.plan.calls):
            raise another_way(self.player)
        self.called += 1
        return self.plan.calls[self.called - 1]


def another_way(player: str) -> UserError:
    """The error where a forward differs between two calls."""
    return UserError(
        f"player '{player}': its forward goes another way than before; a pipeline needs the same blocks in the same "
        f"order in every call; type --strategy {player}=zero3"
    )


class ForwardPass:
    """The forwards of this rank's stages. `pieces` are what their backward needs."""

    def __init__(self, request: Request, plan: Plan) -> None:
        self.request, self.plan, self.pipe = request, plan, request.pipe
        self.inputs = request.inputs()
        self.pieces: Pieces = {}
        self.held: dict[int, list[Tensor]] = {}  # the chunks of each output that this rank's stages have
        self.orders = self.pipe.orders(request.chunks)
        self.wires = Wires(plan.transfers, self.orders, self.pipe.group, self.pipe.device)
        self.buffers = Buffers(self.pipe.network, plan.written.get(self.pipe.rank, ()))
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        self.stack.enter_context(self.buffers.kept())
        self.stack.enter_context(self.wires)
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def step(self, action: Action) -> None:
        """One chunk in one stage."""
        piece = Piece()
        carrier = InTurn(self.pipe.player, self.plan, self.wires, action, piece)
        program = self.pipe.start(range(action.stage, action.stage + 1), carrier)
        self.buffers.begin()
        leaves, form, piece.inputs = self.request.run(program, self.inputs, action.chunk)
        if form != self.plan.form or program.number != len(self.plan.transfers):
            raise another_way(self.pipe.player)
        for number, (where, leaf) in enumerate(zip(self.plan.outputs, leaves, strict=True)):
            if where is not None and where[0] == action.stage:
                self.held.setdefault(number, []).append(leaf.detach())
                if leaf.requires_grad:
                    piece.outputs[number] = leaf
        if self.request.graph:
            self.pieces[action] = piece

    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors that the network returns for this rank's samples."""
        self._send_buffers()
        outputs = enumerate(self.plan.outputs)
        return tuple(self._scattered(*where, self.held.get(number)) for number, where in outputs if where is not None)

    def _scattered(self, stage: int, meta: Meta, held: list[Tensor] | None) -> Tensor:
        """This rank's rows of an output, from the rank of the stage that has it."""
        source, group = self.pipe.rank_of(stage), self.pipe.group
        own = torch.empty((self.request.rows, *meta.shape[1:]), dtype=meta.dtype, device=self.pipe.device)
        whole = None if held is None else torch.cat(held).contiguous()
        if self.request.alone:
            own = own if whole is None else whole
            dist.broadcast(own, group=group, group_src=source)
        else:
            parts = None if whole is None else list(whole.split(self.request.rows))
            dist.scatter(own, parts, group=group, group_src=source)
        return own

    @torch.no_grad()
    def _send_buffers(self) -> None:
        """What a forward has written into buffers is the same on all ranks, as under any policy."""
        buffers = dict(self.pipe.network.named_buffers()) if self.plan.written else {}
        for rank, names in self.plan.written.items():
            for name in names:
                dist.broadcast(buffers[name], group=self.pipe.group, group_src=rank)


class BackwardPass:
    """The backwards of this rank's stages. `slopes` are the gradients of the network's outputs, of this rank's rows."""

    def __init__(self, request: Request, plan: Plan, pieces: Pieces, slopes: Sequence[Tensor | None]) -> None:
        self.request, self.plan, self.pipe, self.pieces = request, plan, request.pipe, pieces
        rows = request.rows * request.owners
        self.of_outputs = self._gathered(slopes)
        self.of_inputs = [leaf.new_zeros(rows, *leaf.shape[1:]) for leaf in (request.leaves[n] for n in request.wanted)]
        self.of_weights: list[Tensor | None] = [None] * len(request.weights)
        self.orders = [order[::-1] for order in self.pipe.orders(request.chunks)]
        self.wires = Wires(plan.transfers, self.orders, self.pipe.group, self.pipe.device, backward=True)

    def __enter__(self) -> Self:
        self.wires.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.wires.__exit__(*error)

    def run(self) -> None:
        """All of it."""
        with self:
            for action in self.orders[self.pipe.rank]:
                self.step(action)

    def step(self, action: Action) -> None:
        """One chunk in one stage."""
        start, stop = self.request.bounds(action.chunk)
        piece = self.pieces.pop(action)
        made = [*piece.sent.values(), *piece.outputs.values()]
        slopes = [self.wires.receive(number, action.chunk) for number in piece.sent]
        slopes += [self.of_outputs[number][start:stop] for number in piece.outputs]
        leaves = [*piece.received.values(), *piece.inputs, *self.request.weights]
        found: list[Tensor | None] = [None] * len(leaves)
        if made:
            with self._world():
                found = list(torch.autograd.grad(made, leaves, slopes, allow_unused=True))
        for number, tensor in piece.received.items():
            slope = found.pop(0)
            self.wires.send(number, action.chunk, torch.zeros_like(tensor) if slope is None else slope)
        for total in self.of_inputs:
            slope = found.pop(0)
            if slope is not None:
                total[start:stop] += slope
        for number, slope in enumerate(found):
            before = self.of_weights[number]
            if slope is not None:  # not added in place: autograd may give one tensor to two weights
                self.of_weights[number] = slope if before is None else before + slope

    def _world(self) -> AbstractContextManager[Any]:
        """Sums over ranks inside a unit have gradients that are sums over the pipelines."""
        return nullcontext() if self.request.alone else ranks.summed_by(self.pipe.add, *self.pipe.copy)

    def slopes(self) -> list[Tensor | None]:
        """The gradients of the inputs that need one, and of this rank's weights."""
        return [*map(self._own_rows, self.of_inputs), *self.of_weights]

    def give(self) -> None:
        """Add the gradients to those of the weights, as autograd does after a backward."""
        for weight, slope in zip(self.request.weights, self.of_weights, strict=True):
            if slope is not None:
                weight.grad = slope if weight.grad is None else weight.grad + slope

    def _gathered(self, slopes: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """For each output that this rank's stages have: the gradients of all ranks' rows."""
        found: dict[int, Tensor] = {}
        numbers = [number for number, where in enumerate(self.plan.outputs) if where is not None]
        for number, slope in zip(numbers, slopes, strict=True):
            stage, meta = self.plan.outputs[number]
            if not meta.learns:
                continue
            target, group = self.pipe.rank_of(stage), self.pipe.group
            if slope is None:
                slope = torch.zeros((self.request.rows, *meta.shape[1:]), dtype=meta.dtype, device=self.pipe.device)
            if self.request.alone:
                found[number] = slope.clone(memory_format=torch.contiguous_format)
                dist.reduce(found[number], group=group, group_dst=target)
                continue
            own = slope.contiguous()
            parts = [torch.empty_like(own) for _ in range(self.pipe.size)] if self.pipe.rank == target else None
            dist.gather(own, parts, group=group, group_dst=target)
            if parts is not None:
                found[number] = torch.cat(parts)
        return found

    def _own_rows(self, total: Tensor) -> Tensor:
        """This rank's rows of an input's gradient, to which all stages may add."""
        dist.all_reduce(total, group=self.pipe.group)
        if self.request.alone:
            return total.div_(self.pipe.size)
        return total[self.pipe.rank * self.request.rows :][: self.request.rows].clone()


def run_both(ahead: ForwardPass, waiting: BackwardPass | None) -> None:
    """The forward, and beside it the backward of an earlier micro-batch, if one waits. See [Note: 1f1b]."""
    pipe = ahead.pipe
    if waiting is None:
        with ahead:
            for action in ahead.orders[pipe.rank]:
                ahead.step(action)
        return
    with waiting, ahead:
        for forward, action in merged(pipe.rank, pipe.size, ahead.request.chunks, waiting.request.chunks):
            (ahead if forward else waiting).step(action)
    waiting.give()

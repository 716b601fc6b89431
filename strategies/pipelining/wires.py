"""The messages between the ranks of a pipeline."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.pipelining.program import Transfer
from strategies.pipelining.schedule import Action

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

"""The messages of a pass from rank to rank."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from strategies.pipelining.pipe import Pipe, Transfer, in_bytes
from strategies.pipelining.schedule import Step, messages

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

"""In which order the ranks of a pipeline work, and send each other tensors."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from strategies.pipelining.pipe import Transfer


class Action(NamedTuple):
    """The forward, or the backward, of one chunk in one stage."""

    stage: int
    chunk: int


def forwards(rank: int, ranks: int, stages: int, chunks: int) -> list[Action]:
    """The forwards of a rank, in order. Its stages are `rank`, `rank + ranks`, and so on.

    With several stages a rank takes `ranks` chunks through the first of them, then the same through the next: it works
    on the first stage while the others are not reached yet, so that less time is lost at the start and at the end.
    """
    return [
        Action(stage, chunk)
        for first in range(0, chunks, ranks)
        for stage in range(rank, stages, ranks)
        for chunk in range(first, min(first + ranks, chunks))
    ]


Step = tuple[bool, Action]  # True is a forward


def merged(rank: int, ranks: int, chunks: int, backward_chunks: int) -> list[Step]:
    """The forwards of one call and the backwards of an earlier one, with one stage a rank.

    [Note: 1f1b]
    The first stage can begin with forwards at once, the last one with backwards. So each fills the time in which the
    others would wait for it. The key is the moment at which an action can run at the earliest, if all take equally
    long. Along each tensor's way keys grow, and each rank goes by them, so no two ranks wait for each other.
    """
    found = [(rank + 2 * chunk, True, Action(rank, chunk)) for chunk in range(chunks)]
    for place, chunk in enumerate(reversed(range(backward_chunks))):
        found.append((ranks - 1 - rank + 2 * place, False, Action(rank, chunk)))
    return [(forward, action) for _, forward, action in sorted(found, key=lambda each: each[:2])]


def orders(ranks: int, stages: int, chunks: int, backward_chunks: int) -> list[list[Step]]:
    """The steps of each rank: a forward, the backward of an earlier one, or both. Without forwards these in reverse."""
    if chunks and backward_chunks:
        return [merged(rank, ranks, chunks, backward_chunks) for rank in range(ranks)]
    found = [forwards(rank, ranks, stages, chunks or backward_chunks) for rank in range(ranks)]
    return [[(bool(chunks), action) for action in (each if chunks else reversed(each))] for each in found]


class Message(NamedTuple):
    """A tensor of one chunk on its way from rank to rank: transfer `number`, or in a backward its gradient."""

    forward: bool
    number: int
    chunk: int
    source: int
    target: int


def messages(orders: Sequence[Sequence[Step]], transfers: Mapping[bool, Sequence[Transfer]]) -> list[Message]:
    """All messages of all ranks, in one order. `orders` are the steps of each rank, `transfers` those of their plans.

    [Note: one order of all messages]
    NCCL carries the messages of a group one after the other, as a rank has asked for them, and a send ends when it is
    received. Two ranks that both ask for a receive first would wait for ever. But all know the plan and each other's
    steps. So each rank plays all of them on paper, in rounds: in a round each rank takes its next step, if the messages
    for it have come in earlier rounds. What is sent, round by round, is the one order, and each rank asks for its own
    messages in that order. So no ranks can wait for each other: of the messages that have not come, the first has
    nothing before it on either of its ranks, and the step that sends it needs only messages from before.
    """
    sends: dict[tuple[bool, int], list[Message]] = {}  # by stage, of chunk 0
    needs: dict[tuple[bool, int], list[Message]] = {}
    for forward, each in transfers.items():
        for number, transfer in enumerate(each):
            source, target = (transfer.source, transfer.target)[:: 1 if forward else -1]
            if forward or transfer.learns:
                message = Message(forward, number, 0, source % len(orders), target % len(orders))
                sends.setdefault((forward, source), []).append(message)
                needs.setdefault((forward, target), []).append(message)

    def of(step: Step, found: Mapping[tuple[bool, int], list[Message]]) -> list[Message]:
        forward, action = step
        return [each._replace(chunk=action.chunk) for each in found.get((forward, action.stage), ())]

    left, sent = [deque(order) for order in orders], dict[Message, None]()
    while any(left):
        ready = [order for order in left if order and all(each in sent for each in of(order[0], needs))]
        assert ready, "the ranks of a pipeline wait for each other"
        sent |= dict.fromkeys([each for order in ready for each in of(order.popleft(), sends)])
    return list(sent)

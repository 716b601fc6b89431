"""In which order a rank computes the chunks of its stages."""

from typing import NamedTuple

from gan.errors import UserError

SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Action(NamedTuple):
    """The forward, or the backward, of one chunk in one stage."""

    stage: int
    chunk: int


def read(text: str) -> str:
    """The schedule that a user typed."""
    if text not in SCHEDULES:
        raise ValueError(f"expected one of {', '.join(SCHEDULES)}")
    return text


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


def merged(rank: int, ranks: int, chunks: int, backward_chunks: int) -> list[tuple[bool, Action]]:
    """The forwards of one call and the backwards of an earlier one, with one stage a rank. True is a forward.

    [Note: 1f1b]
    The first stage can begin with forwards at once, the last one with backwards. So each fills the time in which the
    others would wait for it. The key is the moment at which an action can run at the earliest, if all take equally
    long. Along each tensor's way keys grow, and each rank goes by them, so no two ranks wait for each other.
    """
    found = [(rank + 2 * chunk, True, Action(rank, chunk)) for chunk in range(chunks)]
    for place, chunk in enumerate(reversed(range(backward_chunks))):
        found.append((ranks - 1 - rank + 2 * place, False, Action(rank, chunk)))
    return [(forward, action) for _, forward, action in sorted(found, key=lambda each: each[:2])]


def refuse_chunks(player: str, chunks: int, rows: int) -> UserError:
    """The error for a number of chunks that does not divide the samples of a pipeline."""
    fitting = [str(n) for n in range(1, rows + 1) if rows % n == 0]
    return UserError(
        f"player '{player}': the {rows} samples of a pipeline's ranks do not divide into {chunks} chunks; type "
        f"{player}=pipeline+chunks:N with an N of {', '.join(fitting)}, or choose another batch size"
    )

"""Plays the cells of a grid in rounds, and keeps what each has given."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, median
from typing import Any

import torch

from gan.app.planning.opening import opened
from gan.bench.grid.worker import Found, cut_phases
from gan.files.errors import UserError
from gan.runs import build
from gan.runs.run import Run
from strategies import private
from strategies.assignment import choose
from strategies.choice import Choice, choices
from strategies.cost.budget import Budget
from strategies.paper.amounts import bubble
from strategies.policies import POLICIES
from strategies.policies.pipeline import Pipeline
from strategies.policies.world import World
from strategies.processes import world

ONE = "one process"
SINGLE = "single"
DIALS = {"stages": "--stages 2,4", "chunks": "--chunks 1,4"}


@dataclass(frozen=True)
class Cell:
    """The training of a strategy on so many processes. `stages` is None where there is no pipeline, or by its default.

    `chunks`: a pipeline takes its samples through the stages in so many parts. All other players' phases play as many
    micro-batches one after another, as one process does: so each compares with one process that has the same parts.
    """

    strategy: str
    processes: int
    stages: int | None
    chunks: int
    batch_size: int

    @property
    def piped(self) -> bool:
        return any(choice.policy == Pipeline.name for choice in _choices(self.strategy).values())

    @property
    def typed(self) -> str:
        """The strategy with its stages and chunks, as it is typed for `gan.fit`."""
        found = _choices(self.strategy)
        for player, choice in found.items():
            if choice.policy == Pipeline.name:
                stages = {} if self.stages is None else {"stages": self.stages}
                found[player] = Choice(choice.policy, {**choice.options, **stages, "chunks": self.chunks})
        alone = list(found) == ["*"]
        return ",".join(str(choice) if alone else f"{player}={choice}" for player, choice in found.items())

    @property
    def micro_batches(self) -> int:
        return 1 if self.piped else self.chunks

    @property
    def one(self) -> "Cell":
        """One process that plays the same parts one after another."""
        return Cell(SINGLE, 1, None, self.chunks, self.batch_size)

    @property
    def title(self) -> str:
        return ONE if self.strategy == SINGLE else self.strategy


def cells(
    strategies: Sequence[str],
    processes: Sequence[int],
    stages: Sequence[int | None],
    chunks: Sequence[int],
    batch_sizes: Sequence[int],
) -> Iterator[Cell]:
    """All cells, each after its one process. With one process every strategy is that one."""
    for batch_size in batch_sizes:
        for parts in chunks:
            yield Cell(SINGLE, 1, None, parts, batch_size)
            for strategy in strategies:
                for ranks in processes:
                    if ranks == 1:
                        continue
                    cell = Cell(strategy, ranks, None, parts, batch_size)
                    for cut in stages if cell.piped else [None]:
                        yield Cell(strategy, ranks, cut, parts, batch_size)


def refuse_strategy(strategy: str) -> None:
    """Refuse a strategy that cannot be read, or that has itself what the grid varies."""
    for choice in _choices(strategy).values():
        if POLICIES[choice.policy].max_ranks == 1:
            raise UserError(f"'{choice.policy}' is for one process, which the grid always measures; leave it out")
        for name, dial in DIALS.items():
            if name in choice.options:
                raise UserError(f"'{strategy}' has {name}, which the grid varies; type {dial}, and leave them out here")


def _choices(strategy: str) -> dict[str, Choice]:
    return choices(strategy, POLICIES)


@dataclass(frozen=True)
class Planned:
    """The bytes of a rank at its peak, and those that it gives to collectives and messages in a step."""

    peak: float
    payload: float


def planned(run: str, settings: Mapping[str, Any], cell: Cell) -> Planned | None:
    """The plan of a cell on this machine's CPU; None where it has none."""

    def make() -> Run:
        made = build(run, **settings)
        if cell.micro_batches > 1:
            cut_phases(made.game, cell.micro_batches)
        return made

    ranks = cell.processes
    try:
        with private.fake_world(ranks):
            game = opened(make, ranks)
            world = World(ranks, 0, torch.device("cpu"), ranks)
            chosen = choose(choices(cell.typed, POLICIES), game.game.players)
            cost = Budget(game.game, world, game.trace).cost(chosen)
    except UserError:  # the cell says itself why it is impossible
        return None
    moved = sum(
        each.payload / phase.every for phase in cost.phases for own in phase.collectives.values() for each in own
    )
    return Planned(cost.peak.bytes, moved)


Play = Callable[[Cell], list[Found]]


@dataclass(frozen=True)
class Figures:
    """What a cell has given: medians of all rounds, and of the ratio also the least and the most.

    `ratio` is its speed as a part of that of one process with the same parts, `of_best` as a part of the fastest one
    process of this batch size, both in the same round. `memory` compares peaks in the same way as `ratio`, and
    `work` the computing of the rank that computes longest. `fastest` compares the fastest round of each, which says
    most if others use the machine too. They are None where one process cannot play the cell. `planned` is what
    `gan.plan` says; None where it has no plan.
    """

    ratio: tuple[float, float, float] | None
    fastest: float | None
    of_best: float | None
    work: float | None
    memory: float | None
    rate: float
    waits: float
    queues: float
    peak: int
    payload: int
    bubble: float | None
    planned: Planned | None = None


class Rounds:
    """The cells take turns in every round, so that a slow moment of the machine meets all of them.

    Every second round goes backwards. A cell that fails has its reason in `why`, and is not played again.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        steps: int,
        play: Play,
        plan: Callable[[Cell], Planned | None] = lambda cell: None,
    ) -> None:
        self.cells, self.steps, self.play, self.plan = list(dict.fromkeys(cells)), steps, play, cache(plan)
        self.found: list[dict[Cell, list[Found]]] = []
        self.why: dict[Cell, str] = {}

    def round(self) -> Iterator[tuple[Cell, str]]:
        """Play one round. Yields each cell with what came of it, in words."""
        number, now = len(self.found), {}
        self.found.append(now)
        for cell in reversed(self.cells) if number % 2 else self.cells:
            if cell in self.why:
                continue
            try:
                now[cell] = self.play(cell)
                yield cell, f"{self._rate(now, cell):.1f} pictures/s"
            except world.WorldHangs as hangs:
                self.why[cell] = f"hangs: {hangs}"
            except world.WorldFailed as failed:
                failure = failed.failure
                words = failure.message if failure.message is not None else failure.what
                self.why[cell] = f"{'refused' if failure.refused else 'fails'}: {' '.join(words.split())}"
            if cell in self.why:
                yield cell, self.why[cell]

    def _rate(self, found: dict[Cell, list[Found]], cell: Cell) -> float:
        return self.steps * cell.batch_size / max(rank.seconds for rank in found[cell])

    def figures(self, cell: Cell) -> Figures:
        """The figures of a cell that has been played in every round."""
        ratios, of_best, work, memory = [], [], [], []
        for now in self.found:
            alone = [one for one in now if one == one.one and one.batch_size == cell.batch_size]
            if cell.one in now:
                ratios.append(self._rate(now, cell) / self._rate(now, cell.one))
                work.append(_work(now[cell]) / _work(now[cell.one]))
                memory.append(_peak(now[cell]) / max(1, _peak(now[cell.one])))
            if alone:
                of_best.append(self._rate(now, cell) / max(self._rate(now, one) for one in alone))
        played = [now[cell] for now in self.found]
        rates = [self._rate(now, cell) for now in self.found]
        ones = [self._rate(now, cell.one) for now in self.found if cell.one in now]
        shape = played[0][0].shape
        return Figures(
            ratio=(min(ratios), median(ratios), max(ratios)) if ratios else None,
            fastest=max(rates) / max(ones) if ones else None,
            of_best=median(of_best) if of_best else None,
            work=median(work) if work else None,
            memory=median(memory) if memory else None,
            rate=median(rates),
            waits=median(mean(rank.waited / rank.seconds for rank in ranks) for ranks in played),
            queues=median(mean(rank.queued / rank.seconds for rank in ranks) for ranks in played),
            peak=int(median(map(_peak, played))),
            payload=max(rank.payload for rank in played[0]),
            bubble=None if shape is None else _bubble(*shape),
            planned=self.plan(cell),
        )


def _bubble(ranks: int, stages: int, chunks: int) -> float:
    return bubble(ranks, chunks, stages // ranks)


def _work(ranks: list[Found]) -> float:
    return max(rank.computed for rank in ranks)


def _peak(ranks: list[Found]) -> int:
    return max(rank.peak for rank in ranks)

"""The cells of a grid: what is measured, each with the one process that it is compared with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gan.errors import UserError
from strategies.choice import Choice, choices
from strategies.policies import POLICIES
from strategies.policies.pipeline import Pipeline

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
        if POLICIES[choice.policy].max_ranks == 1 or choice.policy == "dp":
            raise UserError(f"'{choice.policy}' is for one process, which the grid always measures; leave it out")
        for name, dial in DIALS.items():
            if name in choice.options:
                raise UserError(f"'{strategy}' has {name}, which the grid varies; type {dial}, and leave them out here")


def _choices(strategy: str) -> dict[str, Choice]:
    return choices(strategy, POLICIES)

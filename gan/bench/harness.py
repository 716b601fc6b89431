"""What a benchmark is made of: it declares options, cells, how a cell is measured and columns. The rest is here.

A cell is a row of the table. Cells take turns: in a round each is measured once, and every second round goes backwards,
so that a slow moment of the machine meets all of them. The table shows the median of all rounds; two cells are compared
within each round. A cell that fails is not measured again, and the table says why.
"""

import math
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, Generic, TypeVar

import torch

from gan.app.outputs import quiet
from gan.app.run.options import parse_run, run_settings
from gan.app.run.parser import Parser
from gan.files.errors import UserError
from gan.files.errors import table as lines_of
from strategies.processes import call_on_ranks
from strategies.processes.failure import in_a_line

NUMBER = re.compile(r"-?[\d.,]+(e[-+]\d+)?%?|nan|see \(\d+\)|")  # or nothing, in a table
Cell = tuple[Any, ...]  # what it is, by the places of its benchmark
C = TypeVar("C", bound=Cell)
Figures = Mapping[str, Any]  # what was measured in one round


@dataclass(frozen=True)
class Column:
    """Shows the figure `key`, which is by default its title, in so many units of `unit`; None is not shown.

    `against` compares it with the same figure of the cell's base: a ratio by `operator.truediv`. `over` is of rounds.
    """

    title: str
    form: str = ""
    unit: float = 1
    key: str = ""
    against: Callable[[Any, Any], float] | None = None
    over: Callable[[list[float]], float] = median

    def text(self, value: Any) -> str:
        return "" if value is None else format(value if self.unit == 1 else value / self.unit, self.form)


class Benchmark(ABC, Generic[C]):
    """Derive from it, and declare. `places` are the titles of what a cell is, `columns` those of what is measured."""

    name: ClassVar[str]
    about: ClassVar[str]  # the docstring of its file
    places: Sequence[str]
    columns: Sequence[Column]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.about = sys.modules[cls.__module__].__doc__ or ""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv, self.settings = argv, self.parse(argv)
        self.found: dict[C, list[Figures]] = {}  # in each round
        self.why: dict[C, str] = {}

    # ---- what a benchmark declares ----

    def add_options(self, add: Callable[..., Any]) -> None:
        """The options that are typed."""

    def parse(self, argv: Sequence[str]) -> Any:
        """The settings. What cannot be measured is refused here."""
        parser = Parser(f"python -m gan.bench {self.name}", description=self.about)
        self.add_options(parser.add_argument)
        return parser.parse_args(argv)

    @property
    def rounds(self) -> int:
        return getattr(self.settings, "rounds", 1)

    @abstractmethod
    def cells(self) -> Iterable[C]:
        """The rows of the table, in their order."""

    @abstractmethod
    def measure(self, cell: C) -> Figures:
        """A cell's figures in one round. What is raised is why it has none."""

    def base(self, cell: C) -> C | None:
        """The cell that this one is compared with: the first that was measured."""
        return next(iter(self.measured), None)

    @abstractmethod
    def heading(self) -> str:
        """What is said above the table."""

    def write(self) -> None:
        """Write what is asked for."""

    # ---- what it does ----

    def main(self) -> int:
        """Measure, and print the table; 1 if nothing could be measured."""
        quiet()
        self.play()
        print(f"\n{self.heading()}\n", flush=True)
        print("\n".join([*aligned(self.table()), "", *self.reasons()]).rstrip())
        self.write()
        return 0 if self.measured else 1

    def play(self) -> None:
        """Let the cells take turns, and say what each has given."""
        cells = list(dict.fromkeys(self.cells()))
        self.found = {cell: [] for cell in cells}
        print(f"{len(cells)} cells, {self.rounds} rounds; load {os.getloadavg()[0]:.1f}", flush=True)
        for number in range(self.rounds):
            where = f"round {number + 1} of {self.rounds}: " if self.rounds > 1 else ""
            for cell in reversed(cells) if number % 2 else cells:
                if cell in self.why:
                    continue
                try:
                    self.found[cell].append(self.measure(cell))
                except Exception as error:  # noqa: BLE001 - another cell may work
                    self.why[cell] = reason(error)
                print(f"{where}{self.named(cell)}: {self.why.get(cell) or self.said(self.found[cell][-1])}", flush=True)

    def named(self, cell: C) -> str:
        return ", ".join(str(place) for place in cell if place not in (None, ""))

    def said(self, figures: Figures) -> str:
        """What a cell has just given: the columns that need neither other cells nor other rounds."""
        shown = (column for column in self.columns if column.against is None)
        texts = ((column.title, column.text(figures.get(column.key or column.title))) for column in shown)
        return ", ".join(f"{title} {text}" for title, text in texts if text)

    @property
    def measured(self) -> list[C]:
        return [cell for cell in self.found if cell not in self.why]

    def values(self, cell: C | None, key: str) -> list[Any]:
        """A figure in each round; none if the cell has failed."""
        found = self.found[cell] if cell in self.measured else []
        return [figures[key] for figures in found if figures.get(key) is not None]

    def known(self, key: str, default: Any) -> Any:
        """A figure that all cells have in common, such as the name of the device."""
        return next((figures[key] for found in self.found.values() for figures in found if key in figures), default)

    def value(self, cell: C, column: Column) -> Any:
        """What a column has for a cell, in no unit; None where it is not known."""
        key = column.key or column.title
        values = self.values(cell, key)
        if column.against is not None:
            values = [column.against(*pair) for pair in zip(values, self.values(self.base(cell), key), strict=False)]
        return column.over(values) if values else None

    def table(self) -> list[list[str]]:
        """The head, and a row for each cell; one that has failed has the number of its reason."""
        rows = [[*self.places, *(column.title for column in self.columns)]]
        for cell in self.found:
            figures = [column.text(self.value(cell, column)) for column in self.columns]
            if cell in self.why:
                figures[0] = f"see ({1 + list(dict.fromkeys(self.why.values())).index(self.why[cell])})"
            rows.append(["" if place is None else str(place) for place in cell] + figures)
        return rows

    def reasons(self) -> list[str]:
        return [f"({number}) {why}" for number, why in enumerate(dict.fromkeys(self.why.values()), 1)]


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: words on the left of their column, numbers on the right."""
    columns = enumerate(zip(*table, strict=True))
    words = [number for number, column in columns if not all(map(NUMBER.fullmatch, column[1:]))]
    return [line[2:] for line in lines_of(table, left=words)]


class RunBenchmark(Benchmark[C]):
    """A benchmark of a run, which is the first word that is typed, and whose settings are options too."""

    usage: ClassVar[str]
    texts: ClassVar[dict[str, Any]]  # of `parse_run`

    def parse(self, argv: Sequence[str]) -> Any:
        prog, usage = f"python -m gan.bench {self.name}", f"[RUN] {self.usage} [options]"
        texts = self.texts | {"prog": prog, "usage": usage, "description": self.about}
        return parse_run(argv, lambda parser: self.add_options(parser.add_argument), **texts)

    @property
    def run(self) -> tuple[str, dict[str, Any]]:
        return self.settings.run, run_settings(self.settings)


def in_world(
    work: Callable[..., Any], *args: Any, ranks: int = 1, threads: int = 0, device: str = "cpu", limit: float = math.inf
) -> list[Any]:
    """What a function gives on each rank of a world of its own, without what it prints; `threads` are of a rank."""
    called = threads or torch.get_num_threads(), work, args
    return call_on_ranks.call(_serve, *called, ranks=ranks, limit=limit, device=device, preload=[work.__module__])


def _serve(threads: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(threads)
    return function(*args)


def reason(error: Exception) -> str:
    if isinstance(error, call_on_ranks.WorldHangs):
        return f"hangs: {error}"
    if not isinstance(error, call_on_ranks.WorldFailed):
        return " ".join(str(error).split()) if isinstance(error, UserError) else f"fails: {in_a_line(error)}"
    failure = error.failure
    words = " ".join(failure.what.split())
    if not failure.traceback:  # the process has ended without a word
        words = f"rank {failure.rank} {failure.why}; is there too little memory?"
    return f"{'refused' if failure.refused else 'fails'}: {words}"

"""The same work under policies x processes x stages x chunks x batch sizes: speed, memory, payload and bubble.

of one      pictures a second, as a part of those of one process of one thread that plays the same parts one after
            another; the median of all rounds, and the least and the most of them
memory      the peak of a rank above what it had before the game was made, as a part of one process's, and in MB
bubble      the share of a pass through the pipeline in which a rank must wait, by the schedule
payload     the bytes that a rank gives to collectives and messages, or gets from them, in a step
planned     the peak and the payload that gan.plan says. A plan counts tensors; the measured peak also has what torch,
            gloo and the allocator keep. Of a pipeline's messages it counts what a rank sends, not what it gets
"""

import csv
import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from operator import truediv
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning import seed_everything
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn

from gan.app.fitting import metrics
from gan.app.planning.opening import opened
from gan.app.run.command_line import parameters
from gan.app.run.options import strategies
from gan.app.run.parser import Numbers, items
from gan.bench.device import Counter, Measuring, now_on_all, payload, train, wait
from gan.bench.harness import Column, Figures, RunBenchmark, in_world
from gan.files.errors import UserError
from gan.files.system import cores, in_proc
from gan.runs import Run, build, find, short_name
from strategies import PhaseStrategy, private
from strategies.cost.budget import Budget
from strategies.policies import POLICIES
from strategies.policies.amounts import bubble
from strategies.policies.choice import Choice, choices
from strategies.policies.pipeline import Pipeline
from strategies.training.assignment import choose
from strategies.world import World

ONE = "one process"
BATCH_SIZE = "batch_size"
DIALS = {"stages": "--stages 2,4", "chunks": "--chunks 1,4"}
BLOCKS = "gan.bench.blocks:blocks"
EXAMPLES = """examples:
  python -m gan.bench grid                                           a few minutes; a game of alike blocks
  python -m gan.bench grid --policies ddp 'generator=pipeline,*=ddp' --chunks 1,2,4,8 --batch-sizes 8,32
  python -m gan.bench grid --processes 2,4 --stages 2,4 --policies pipeline+recompute
  python -m gan.bench grid --width 256 --generator-blocks 4          larger blocks
  python -m gan.bench grid r3gan-faces --policies ddp generator=pipeline,discriminator=zero3
  python -m gan.bench grid r3gan-faces --help                        the settings of that run

Each cell is trained in processes of its own, of one thread on a CPU. Cells take turns, round by round. One process is
always measured. A cell that is impossible says why.
"""


class Cell(NamedTuple):
    """The training of a strategy on so many processes. `stages` is None where there is no pipeline, or by its default.

    `parts`: a pipeline takes its samples through the stages in so many chunks. All other players' phases play as many
    micro-batches one after another, as one process does: so each compares with one process that has the same parts.
    """

    batch_size: int
    parts: int
    strategy: str = ONE
    processes: int = 1
    stages: int | None = None

    @property
    def choices(self) -> dict[str, Choice]:
        return choices("single" if self.strategy == ONE else self.strategy, POLICIES)

    @property
    def piped(self) -> bool:
        return any(choice.policy == Pipeline.name for choice in self.choices.values())

    @property
    def typed(self) -> str:
        """The strategy with its stages and chunks, as it is typed for `gan.fit`."""
        found = self.choices
        for player, choice in found.items():
            if choice.policy == Pipeline.name:
                stages = {} if self.stages is None else {"stages": self.stages}
                found[player] = Choice(choice.policy, {**choice.options, **stages, "chunks": self.parts})
        alone = list(found) == ["*"]
        return ",".join(str(choice) if alone else f"{player}={choice}" for player, choice in found.items())

    @property
    def micro_batches(self) -> int:
        return 1 if self.piped else self.parts

    @property
    def one(self) -> "Cell":
        return Cell(self.batch_size, self.parts)

    def build(self, run: str, settings: Mapping[str, Any]) -> Run:
        """The run; each phase's batch is cut into so many more micro-batches."""
        made = build(run, **{**settings, BATCH_SIZE: self.batch_size})
        if self.micro_batches > 1:
            whole, parts = made.game.configure_phases, self.micro_batches
            made.game.configure_phases = lambda: (
                replace(phase, micro_batches=phase.micro_batches * parts) for phase in whole()
            )
        return made


def refuse_strategy(strategy: str) -> None:
    """Refuse a strategy that cannot be read, or that has itself what the grid varies."""
    for choice in choices(strategy, POLICIES).values():
        if POLICIES[choice.policy].max_ranks == 1:
            raise UserError(f"'{choice.policy}' is for one process, which the grid always measures; leave it out")
        for name, dial in DIALS.items():
            if name in choice.options:
                raise UserError(f"'{strategy}' has {name}, which the grid varies; type {dial}, and leave them out here")


def planned(run: str, settings: Mapping[str, Any], cell: Cell) -> Figures:
    """The bytes of a rank at its peak, and those that it moves in a step, by the plan on this machine's CPU."""
    ranks = cell.processes
    try:
        with private.fake_world(ranks):
            game = opened(partial(cell.build, run, settings), ranks)
            chosen = choose(choices(cell.typed, POLICIES), game.game.players)
            cost = Budget(game.game, World(ranks, 0, torch.device("cpu"), ranks), game.trace).cost(chosen)
    except UserError:  # the cell says itself why it is impossible
        return {}
    collectives = ((phase, each) for phase in cost.phases for own in phase.collectives.values() for each in own)
    moved = sum(each.payload / phase.every for phase, each in collectives)
    return {"planned peak": round(cost.peak.bytes), "planned payload": round(moved)}


RESET = Path("/proc/self/clear_refs")


def measuring(strategy: PhaseStrategy, resident: int, warm: int, steps: int) -> Measuring:
    """Time the steps after the first `warm`. In the last of those it counts bytes, which takes time by itself."""
    yield from wait(warm - 1)
    with Counter(payload) as counted:
        yield
    ctypes.CDLL(None).malloc_trim(0)
    if RESET.exists():  # else the peak is that of all steps
        RESET.write_text("5")
    began = now_on_all()
    yield from wait(steps)
    found = {"seconds": now_on_all() - began, "payload": counted.total}
    found["peak"] = max(0, in_proc("self/status", "VmHWM") - resident)
    for policy in strategy.policies.values():
        for pipe in policy.pipes if isinstance(policy, Pipeline) else ():
            found["bubble"] = bubble(pipe.size, pipe.chunks or 2 * pipe.size, pipe.stages // pipe.size)
    return found


def play(cell: Cell, run: str, settings: Mapping[str, Any], warm: int, steps: int) -> Figures:
    """On each rank: train as `gan.fit` would, with nothing beside the training itself."""
    # What torch loads at its first convolution and product is not a cell's memory.
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 1))
    net(torch.ones(2, 3, 8, 8)).sum().backward()
    resident = in_proc("self/status", "VmRSS")
    seed_everything(0, verbose=False)
    made = cell.build(run, settings)
    strategy = PhaseStrategy(cell.typed, check=False, cluster_environment=LightningEnvironment())
    own = {"accelerator": "cpu", "devices": cell.processes, "sync_batchnorm": True, "max_steps": warm + steps}
    return train(made.game, made.data, strategy, measuring(strategy, resident, warm, steps), **own)


def together(ranks: Sequence[Figures], pictures: int) -> Figures:
    most = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    return {**most, "rate": pictures / most["seconds"], "memory": max(1, most["peak"])}


COLUMNS = {  # by their names in grid.csv
    "of_one": Column("of one", ".2f", key="rate", against=truediv),
    "of_one_least": Column("least", ".2f", key="rate", against=truediv, over=min),
    "of_one_most": Column("most", ".2f", key="rate", against=truediv, over=max),
    "memory_of_one": Column("memory", ".2f", key="memory", against=truediv),
    "pictures_per_second": Column("pictures/s", ".1f", key="rate"),
    "peak_memory_bytes": Column("MB", ".0f", 1e6, "peak", over=median_high),
    "bubble": Column("bubble", ".0%"),
    "payload_bytes": Column("payload, kB", ".1f", 1e3, "payload", over=median_high),
    "planned_peak_bytes": Column("planned MB", ".0f", 1e6, "planned peak", over=median_high),
    "planned_payload_bytes": Column("planned kB", ".1f", 1e3, "planned payload", over=median_high),
}


PANELS = {
    "pictures a second, of one process": "of_one",
    "peak memory of a rank, of one process": "memory_of_one",
    "payload of a rank in a step, kB": "payload_bytes",
}


class GridBenchmark(RunBenchmark[Cell]):
    name, places, columns = "grid", Cell._fields, tuple(COLUMNS.values())
    usage = "[--policies POLICY...] [--processes N,N] [--chunks N,N]"
    texts = {  # noqa: RUF012
        "epilog": EXAMPLES,
        "default": BLOCKS,
        "what": "what is played: a run of gan.fit --list-runs, or FILE.py:FUNCTION of your own",
        "without": {BATCH_SIZE},
    }

    def add_options(self, add: Callable[..., Any]) -> None:
        what = "policies, as for gan.fit --strategy, with commas or spaces between them"
        policies = ["ddp", "zero3", "fsdp", "generator=pipeline,*=ddp", "pipeline"]
        add("--policies", nargs="+", type=str, default=policies, help=what)
        processes = "2" if cores() < 4 else "2,4"
        add("--processes", type=Numbers, default=processes, help="numbers of ranks, beside one process")
        what = "numbers of stages of a pipeline; default: as many as ranks"
        add("--stages", type=Numbers | None, default=None, help=what)
        what = "in how many parts a pipeline takes its samples; other strategies play as many micro-batches"
        add("--chunks", type=Numbers, default="1,4", help=what)
        add("--batch_sizes", type=Numbers, default="32", help="samples a step, of all ranks together")
        add("--rounds", type=PositiveInt, default=3, help="how often each cell is trained")
        add("--steps", type=PositiveInt, default=8, help="steps that are timed in each training")
        add("--warm", type=PositiveInt, default=3, help="steps before them")
        add("--limit", type=PositiveFloat, default=300.0, help="seconds after which a training is said to hang")
        add("--out", type=str, default="grid", help="folder for grid.csv and grid.png")

    def parse(self, argv: Sequence[str]) -> Namespace:
        settings = super().parse(argv)
        if BATCH_SIZE not in parameters(settings.run):
            raise UserError(
                f"{settings.run} has no argument '{BATCH_SIZE}', which the grid varies; write "
                f"def {find(settings.run).__name__}({BATCH_SIZE}: int = 32, ...)"
            )
        settings.policies = strategies(settings.policies)
        for strategy in settings.policies:
            refuse_strategy(strategy)
        for name in ("processes", "chunks", "batch_sizes", "stages"):
            settings[name] = [None] if settings[name] is None else list(map(int, items(settings[name])))
        return settings

    def cells(self) -> Iterator[Cell]:
        """Each comes after its one process. With one process every strategy is that one."""
        own = self.settings
        for batch_size, parts in product(own.batch_sizes, own.chunks):
            yield Cell(batch_size, parts)
            for strategy, ranks in product(own.policies, own.processes):
                cell = Cell(batch_size, parts, strategy, ranks)
                for stages in own.stages if cell.piped else [None]:
                    if ranks > 1:
                        yield cell._replace(stages=stages)

    def base(self, cell: Cell) -> Cell:
        return cell.one

    def measure(self, cell: Cell) -> Figures:
        own = self.settings
        ranks = in_world(play, cell, *self.run, own.warm, own.steps, ranks=cell.processes, threads=1, limit=own.limit)
        earlier = self.found[cell][0] if self.found[cell] else planned(*self.run, cell)
        plan = {key: earlier[key] for key in ("planned peak", "planned payload") if key in earlier}
        return {**together(ranks, own.steps * cell.batch_size), **plan}

    def named(self, cell: Cell) -> str:
        parts = f"{cell.batch_size} in {cell.parts} {'part' if cell.parts == 1 else 'parts'}"
        return f"{cell.typed} on {cell.processes}, {parts}"

    def heading(self) -> str:
        own = f"{short_name(self.settings.run)}: processes of one thread on {cores()} cores"
        load = f"load {os.getloadavg()[0]:.1f} at the end"
        words = self.about.partition("\n\n")[2].rstrip()
        return f"{own}, {self.settings.rounds} rounds, {load}\n\n{words}"

    def play(self) -> None:
        self.folder = Path(self.settings.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        super().play()

    def write(self) -> None:
        files = self.folder / "grid.csv", self.folder / "grid.png"
        self.write_csv(files[0])
        self.draw(files[1])
        print(f"\nwritten: {files[0]}, {files[1]}")

    def write_csv(self, path: Path) -> None:
        """All cells, one in a row, and why a cell is impossible. A figure that is not known is empty."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*Cell._fields, *COLUMNS, "why_not"])
            for cell in self.found:
                values = (self.value(cell, column) for column in self.columns)
                figures = (f"{value:.4f}" if isinstance(value, float) else value for value in values)
                writer.writerow([*cell, *figures, self.why.get(cell)])

    def draw(self, path: Path) -> None:
        """A panel for each batch size and figure by the number of parts, with a line for each strategy."""
        panels: dict[str, metrics.Panel] = {}
        for size, (heading, key) in product(self.settings.batch_sizes, PANELS.items()):
            column = COLUMNS[key]
            panel = panels[f"batches of {size}: {heading}"] = {ONE: []}
            if column.against:
                panel[ONE] = [(parts, 1.0) for parts in self.settings.chunks]
            for cell in (cell for cell in self.measured if cell != cell.one):
                stages = f", {cell.stages} stages" if cell.stages else ""
                line = panel.setdefault(f"{cell.strategy} on {cell.processes}{stages}", [])
                if cell.batch_size == size and (value := self.value(cell, column)) is not None:
                    line.append((cell.parts, value / column.unit))
        path.write_bytes(metrics.drawn(panels, "png", short_name(self.settings.run), xlabel="parts"))

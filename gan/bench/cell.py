"""One cell of the grid: how it is typed, what is planned for it, and what a rank measures."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import seed_everything
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn

from gan.app.planning.opening import opened
from gan.bench.device import Counter, Measuring, now_on_all, payload, train, wait
from gan.bench.harness import Figures
from gan.files.errors import UserError
from gan.runs import build
from gan.runs.run import Run
from strategies import PhaseStrategy, private
from strategies.amounts import bubble
from strategies.assignment import choose
from strategies.choice import Choice, choices
from strategies.cost.budget import Budget
from strategies.policies import POLICIES
from strategies.policies.pipeline import Pipeline
from strategies.world import World

ONE = "one process"
BATCH_SIZE = "batch_size"
DIALS = {"stages": "--stages 2,4", "chunks": "--chunks 1,4"}


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


STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


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
    found = {"seconds": now_on_all() - began, "peak": max(0, _memory("VmHWM:") - resident), "payload": counted.total}
    for policy in strategy.policies.values():
        for pipe in policy.pipes if isinstance(policy, Pipeline) else ():
            found["bubble"] = bubble(pipe.size, pipe.chunks or 2 * pipe.size, pipe.stages // pipe.size)
    return found


def _memory(name: str) -> int:
    """Bytes, by a line of the process's status such as `VmRSS:  2220 kB`."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def play(cell: Cell, run: str, settings: Mapping[str, Any], warm: int, steps: int) -> Figures:
    """On each rank: train as `gan.fit` would, with nothing beside the training itself."""
    # What torch loads at its first convolution and product is not a cell's memory.
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 1))
    net(torch.ones(2, 3, 8, 8)).sum().backward()
    resident = _memory("VmRSS:")
    seed_everything(0, verbose=False)
    made = cell.build(run, settings)
    strategy = PhaseStrategy(cell.typed, check=False, cluster_environment=LightningEnvironment())
    own = {"accelerator": "cpu", "devices": cell.processes, "sync_batchnorm": True, "max_steps": warm + steps}
    return train(made.game, made.data, strategy, measuring(strategy, resident, warm, steps), **own)


def together(ranks: Sequence[Figures], pictures: int) -> Figures:
    most = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    return {**most, "rate": pictures / most["seconds"], "memory": max(1, most["peak"])}

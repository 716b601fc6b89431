"""One cell of the grid, on one rank of a world: trains some steps, and measures them."""

import ctypes
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn

from gan.app.outputs import quiet
from gan.bench.harness import ONLY_TRAINING
from gan.bench.peers.game import Payload
from gan.files.system import resource
from gan.module import GanModule
from gan.phase import Phase
from gan.runs import build
from strategies import PhaseStrategy
from strategies.policies.pipeline import Pipeline

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SCHEDULER = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class Request:
    """`parts` cuts the batch of each phase into so many micro-batches, one after another; 1 leaves it as it is."""

    run: str
    settings: Mapping[str, Any]
    strategy: str
    ranks: int
    parts: int
    warm: int
    steps: int


@dataclass(frozen=True)
class Found:
    """What a rank has measured: the seconds of all steps, and of these how long it was without work, or without a core.

    `waited` is for other ranks and their messages. `queued` is for a core that others used: the noise of the machine.
    `peak` are bytes of memory above those before the game was made. `payload` are bytes that a step gives to
    collectives and messages. `shape` are the ranks and the stages of a pipeline, and its chunks.
    """

    seconds: float
    waited: float
    queued: float
    peak: int
    payload: int
    shape: tuple[int, int, int] | None = None

    @property
    def computed(self) -> float:
        """The seconds in which it had work and a core."""
        return self.seconds - self.waited - self.queued


def play(request: Request) -> Found:
    """Train as `gan.fit` would, with nothing beside the training itself."""
    quiet()
    torch.set_num_threads(1)
    _use_libraries()
    before = _resident()
    seed_everything(0, verbose=False)
    run = build(request.run, **request.settings)
    if request.parts > 1:
        cut_phases(run.game, request.parts)
    clock = Clock(request.warm, request.steps)
    Trainer(
        strategy=PhaseStrategy(request.strategy, check=False, cluster_environment=LightningEnvironment()),
        accelerator="cpu",
        devices=request.ranks,
        max_steps=request.warm + request.steps,
        sync_batchnorm=True,
        callbacks=[clock],
        **ONLY_TRAINING,
    ).fit(run.game, run.data)
    return replace(clock.found, peak=max(0, clock.found.peak - before))


def cut_phases(game: GanModule, parts: int) -> None:
    """Cut each phase's batch into so many more micro-batches. A pipeline does the same work in so many chunks."""
    whole = game.configure_phases

    def phases() -> Iterator[Phase]:
        return (replace(phase, micro_batches=phase.micro_batches * parts) for phase in whole())

    game.configure_phases = phases


class Clock(Callback):
    """Times the steps after the first `warm`. In the last of those it counts bytes, which takes time by itself."""

    def __init__(self, warm: int, steps: int) -> None:
        self.warm, self.steps, self.done = warm, steps, 0
        self.payload = Payload()
        self.found: Found | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        if self.done == self.warm - 1:
            self.payload.__enter__()

    def on_train_batch_end(self, trainer: Trainer, game: LightningModule, *_: Any) -> None:
        self.done += 1
        if self.done == self.warm:
            self.payload.__exit__(None, None, None)
            _forget_peak()
            self.began, self.computed, self.queued = _together(), time.thread_time(), _queued()
        if self.done == self.warm + self.steps:
            seconds = _together() - self.began
            computed, queued = time.thread_time() - self.computed, _queued() - self.queued
            waited = max(0.0, seconds - computed - queued)
            self.found = Found(seconds, waited, queued, _peak(), self.payload.bytes, _shape(trainer))


def _shape(trainer: Trainer) -> tuple[int, int, int] | None:
    for policy in trainer.strategy.policies.values():
        for pipe in policy.pipes if isinstance(policy, Pipeline) else ():
            return pipe.size, pipe.stages, pipe.chunks or 2 * pipe.size
    return None


def _together() -> float:
    """The time, after all ranks have arrived here."""
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter()


def _queued() -> float:
    """The seconds in which this thread could have computed and had no core; 0 where the system does not say it."""
    return int(SCHEDULER.read_text().split()[1]) / 1e9 if SCHEDULER.exists() else 0.0


# ---- memory of this process ----


def _use_libraries() -> None:
    """Load what torch loads at its first convolution and product, so that it is not counted as a cell's memory."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 1))
    net(torch.ones(2, 3, 8, 8)).sum().backward()


def _field(name: str) -> int:
    """Bytes, by a line of the process's status such as `VmRSS:  2220 kB`."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _resident() -> int:
    return _field("VmRSS:") if STATUS.exists() else _most_ever()


def _most_ever() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak() -> None:
    """Give free memory back, and let the peak begin anew. Where the system does not know this, the peak is of all."""
    ctypes.CDLL(None).malloc_trim(0)
    if RESET.exists():
        RESET.write_text("5")


def _peak() -> int:
    return _field("VmHWM:") if STATUS.exists() else _most_ever()

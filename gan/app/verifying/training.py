"""One training of a run, on this rank of a world: recorded, and at its end compared with one device."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer, seed_everything
from lightning.fabric.plugins.environments import LightningEnvironment

from gan.app.outputs import quiet
from gan.app.run.folder import holding
from gan.app.run.options import run_settings
from gan.app.run.resumed import Resumed
from gan.app.training.alike import strategy_of, trainer_of
from gan.app.verifying import options
from gan.app.verifying.comparing import distances
from gan.app.verifying.recording import Record, Recorded, Recorder
from gan.files.checkpoint import load
from gan.files.contents import need
from gan.module import GanModule
from gan.runs import build
from strategies.check.first_step import shake_weights


@dataclass(frozen=True)
class Request:
    """`argv` is the command line; `devices` are the ranks.

    `one` is a file of one device's tensors after the last step, to compare with. `saved` is such a file, to be written.
    `shaken`: the last bits of all weights are changed before each step. See [Note: what rounding does].
    `start` is the checkpoint to begin from, and `precision` 64 or 32.
    """

    argv: Sequence[str]
    strategy: str
    devices: int
    one: Path | None = None
    saved: Path | None = None
    shaken: bool = False
    precision: str = "64"
    start: Path | None = None


@dataclass(frozen=True)
class Trained:
    """`distances` are those of the last tensors from one device, by their names."""

    record: Record
    distances: dict[str, float]
    seconds: float


class Shake(Callback):
    """Changes the last bits of all weights before each step."""

    def on_train_batch_start(self, trainer: Trainer, game: GanModule, batch: Any, batch_idx: int) -> None:
        shake_weights(trainer.strategy.policies.values(), game.step)


def train(request: Request) -> Trained:
    """Train as `gan.fit` would, with nothing beside the training itself."""
    quiet()
    settings = options.parse(list(request.argv))
    settings.precision = request.precision
    seed_everything(settings.get("seed", 0), verbose=False)
    now = run_settings(settings)
    run, first = build(settings.run, **now), 0
    if request.start is not None:
        Resumed(holding(request.start), settings.run, now).check(run, request.start)
        first = need(load(request.start), "global_step", int)
    recorder = Recorder(first + settings.steps, request.shaken and request.precision == "64")
    own = {"kind": Recorded, "recorder": recorder, "cluster_environment": LightningEnvironment()}
    trainer = trainer_of(
        settings,
        strategy_of(settings, request.strategy, **own),
        max(run.max_steps, recorder.last_step),
        accelerator="cpu",
        devices=request.devices,
        callbacks=[recorder, *([Shake()] if request.shaken else [])],
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
    )
    began = time.monotonic()
    trainer.fit(run.game, run.data, ckpt_path=request.start)
    seconds = time.monotonic() - began
    last, recorder.record.last = recorder.record.last, {}
    if request.saved is not None:
        torch.save(last, request.saved)
    one = {} if request.one is None else torch.load(request.one)
    for name in recorder.record.elsewhere:
        one.pop(f"weight '{name}'", None)
    apart = distances(last, one) if one else {}
    return Trained(recorder.record, apart, seconds)

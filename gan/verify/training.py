"""One training of a run, on this rank of a world: recorded, and at its end compared with one device."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer, seed_everything
from lightning.fabric.plugins.environments import LightningEnvironment

from gan.fit.command import quiet
from gan.fit.options import run_settings
from gan.module import GanModule
from gan.runs import build
from gan.verify import options
from gan.verify.comparing import distances
from gan.verify.recording import Record, Recorded, Recorder


@dataclass(frozen=True)
class Request:
    """`argv` is the command line; `devices` are the ranks, or under dp the replicas.

    `one` is a file of one device's tensors after the last step, to compare with. `saved` is such a file, to be written.
    `shaken`: the last bits of all weights are changed before each step. See [Note: what rounding does].
    """

    argv: Sequence[str]
    strategy: str
    devices: int
    one: Path | None = None
    saved: Path | None = None
    shaken: bool = False
    double: bool = True  # float64, or float32 for DeepSpeed


@dataclass(frozen=True)
class Trained:
    """`distances` are those of the last tensors from one device, by their names."""

    record: Record
    distances: dict[str, float]
    seconds: float


class Shake(Callback):
    """Changes each weight by about its last two bits, up or down. It is for one device, where all weights are whole."""

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Trainer, game: GanModule, batch: Any, batch_idx: int) -> None:
        dice = torch.Generator().manual_seed(game.step)
        for weight in game.parameters():
            sign = torch.randint(0, 2, weight.shape, generator=dice) * 2 - 1
            weight.mul_(1 + 4 * torch.finfo(weight.dtype).eps * sign.to(weight))


def train(request: Request) -> Trained:
    """Train as `gan.fit` would, with nothing beside the training itself."""
    quiet()
    settings = options.parse(list(request.argv))
    seed_everything(settings.get("seed", 0), verbose=False)
    run, recorder = build(settings.run, **run_settings(settings)), Recorder()
    trainer = Trainer(
        strategy=Recorded(request.strategy, recorder, cluster_environment=LightningEnvironment()),
        accelerator="cpu",
        devices=request.devices,
        precision="64-true" if request.double else "32-true",
        max_steps=settings.steps,
        sync_batchnorm=True,
        callbacks=[recorder, *([Shake()] if request.shaken else [])],
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    began = time.monotonic()
    trainer.fit(run.game, run.data)
    seconds = time.monotonic() - began
    last, recorder.record.last = recorder.record.last, {}
    if request.saved is not None:
        torch.save(last, request.saved)
    one = {} if request.one is None else torch.load(request.one)
    for name in recorder.record.elsewhere:
        one.pop(f"weight '{name}'", None)
    apart = distances(last, one) if one else {}
    return Trained(recorder.record, apart, seconds)

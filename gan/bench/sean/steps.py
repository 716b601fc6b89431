"""Trainings of SEAN whose steps wait until they are asked for: the published way in a plain loop, and ours."""

import logging
import warnings
from collections.abc import Callable
from itertools import repeat
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Adam

from datasets.drawn.faces import Faces
from gan.bench.harness import ONLY_TRAINING, Multiplications, convolution_rate, now, peak_memory, place
from gan.bench.sean import reference
from gan.bench.sean.generator import Kept
from gan.games.sean import Sean
from gan.losses import feature_matching, hinge_discriminator, hinge_generator
from nets.blocks import onehot
from nets.discriminator import MultiScaleDiscriminator
from nets.published import export_discriminator, export_generator
from nets.sean import SeanGenerator, StyleEncoder
from strategies import PhaseStrategy
from strategies.accelerator import best

RATES = {"generator": 1e-4, "discriminator": 4e-4}
BETAS = (0.0, 0.9)
MATCHING = 10.0


def published(line: Connection, count: int, sizes: dict[str, int]) -> None:
    """Train in the published way for `count` steps: each waits until something comes, and sends its figures."""
    device = torch.device(best())
    game = _game(Sean, sizes).to(device)
    painting = export_generator(game.encoder, game.generator)
    judging = export_discriminator(game.discriminator)
    del game
    learned = {
        "generator": [tensor for key, tensor in painting.items() if key.rpartition(".")[2] in reference.LEARNED],
        "discriminator": [tensor for key, tensor in judging.items() if key.rpartition(".")[2] in reference.LEARNED],
    }
    adams = {
        name: Adam([tensor.requires_grad_() for tensor in tensors], lr=RATES[name], betas=BETAS)
        for name, tensors in learned.items()
    }
    image, label = (each.to(device) for each in _batch(sizes).values())
    mask = onehot(label, sizes["labels"], like=image)

    def paint() -> Tensor:
        return reference.generator(painting, mask, reference.encoder(painting, image, mask), training=True)

    def judged(fake: Tensor) -> tuple[Any, Any]:
        both = torch.cat([torch.cat([mask, fake], 1), torch.cat([mask, image], 1)])
        halves = [[part.chunk(2) for part in scale] for scale in reference.discriminator(judging, both, training=True)]
        return [[fake for fake, _ in scale] for scale in halves], [[real for _, real in scale] for scale in halves]

    seen: dict[str, Any] = {}
    for _ in range(count):
        line.recv()
        began = now(device)
        for tensor in learned["discriminator"]:
            tensor.requires_grad_(False)
        with Kept([*learned["generator"], *learned["discriminator"]]) as kept:
            fakes, reals = judged(paint())
            loss = torch.stack([hinge_generator(scale[-1]) for scale in fakes]).mean()
            loss = loss + MATCHING * feature_matching(reals, fakes)
        seen = seen or {"kept": kept.bytes, "loss": loss.item()}
        del kept, fakes, reals
        _update(adams["generator"], loss)
        between = now(device)
        for tensor in learned["discriminator"]:
            tensor.requires_grad_()
        with torch.no_grad():
            fake = paint()
        pairs = zip(*judged(fake), strict=True)
        loss = torch.stack([hinge_discriminator(real[-1], fake[-1]) for fake, real in pairs]).mean()
        _update(adams["discriminator"], loss)
        del fake, loss
        line.send({"seconds": [(between - began, now(device) - between)], **seen})
    line.send({"peak": peak_memory(device)})


def _update(adam: Adam, loss: Tensor) -> None:
    adam.zero_grad()
    loss.backward()
    adam.step()


def ours(line: Connection, count: int, sizes: dict[str, int]) -> None:
    """Train by Lightning and PhaseStrategy, on the same pictures and from the same weights."""
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(
        devices=1,
        strategy=PhaseStrategy(),
        max_steps=count,
        callbacks=[Turns(line)],
        **ONLY_TRAINING,
    )
    trainer.fit(_game(Timed, sizes), repeat(_batch(sizes)))
    line.send({"peak": peak_memory(trainer.lightning_module.device)})


WAYS: dict[str, Callable[[Connection, int, dict[str, int]], None]] = {"the plain reference": published, "ours": ours}


class Timed(Sean):
    """SEAN that notes when its turns begin, and counts what the first forward pass keeps."""

    kept: int | None = None
    began: tuple[float, ...] = ()
    loss: float | None = None

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The generator's turn."""
        self.began = (now(self.device),)
        if self.kept is not None:
            return super().fool(batch)
        with Kept(self.parameters()) as count:
            losses = super().fool(batch)
        self.kept, self.loss = count.bytes, sum(losses.values()).item()
        return losses

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The discriminator's turn."""
        self.began += (now(self.device),)
        return super().judge(batch)


class Turns(Callback):
    """Waits before each step until it is asked for, and then tells how long it took.

    During the first step, which is not counted, it counts multiplications.
    """

    def __init__(self, line: Connection) -> None:
        self.line, self.counter = line, Multiplications()
        self.rate, self.flops = 0.0, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Wait. Measure the machine when it is this way's turn, for then it does nothing else."""
        self.line.recv()
        if not self.flops:
            self.rate = convolution_rate(pl_module.device)
            self.counter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Send the seconds of both turns."""
        if not self.flops:
            self.counter.__exit__(None, None, None)
            self.flops = self.counter.count
        first, second = pl_module.began
        self.line.send(
            {
                "seconds": [(second - first, now(pl_module.device) - second)],
                "kept": pl_module.kept,
                "loss": pl_module.loss,
                "flops": self.flops,
                "rate": self.rate,
                "place": place(pl_module.device),
            }
        )


def _game(kind: type[Sean], sizes: dict[str, int]) -> Sean:
    torch.manual_seed(0)
    return kind(
        StyleEncoder(sizes["style"]),
        SeanGenerator(sizes["labels"], sizes["style"], sizes["width"], sizes["hidden"]),
        MultiScaleDiscriminator(sizes["labels"] + 3),
        labels=sizes["labels"],
        matching=MATCHING,
    )


def _batch(sizes: dict[str, int]) -> dict[str, Tensor]:
    faces = Faces(sizes["batch"], sizes["size"], seed=0)
    samples = [faces[number] for number in range(sizes["batch"])]
    image, label = (torch.stack([sample[key].as_subclass(Tensor) for sample in samples]) for key in ("image", "label"))
    return {"image": image.float() / 127.5 - 1, "label": label.long()}

"""A program that trains a game of much memory, in processes that may have little.

    python -m tests.support.heavy FOLDER --policy zero3+recompute --devices 4 --limit 256 [--real]

Each process may have so many MB more than Python and its libraries have mapped, as by `ulimit -v`. The game's weights,
gradients, moments and averages have 740 MB on one process, and what its batch leaves for backward is about as much
again.
"""

import argparse
import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import seed_everything
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam
from torch.utils.data import DataLoader

from gan import GanModule, Phase, Player
from strategies import PhaseStrategy
from strategies.sharding import bucket
from tests.support.parity import Whole, trainer
from tests.support.saved import Saves

MB = 2**20
WIDTH, LEARNING, FROZEN, STEPS, BATCH = 512, 96, 160, 2, 768


class Wave(nn.Module):
    """A layer of 1 MB, and some operations that keep what they need for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(torch.tanh(self.layer(x)).exp())


def waves(count: int) -> nn.Sequential:
    """So many layers, in blocks of eight."""
    return nn.Sequential(*(nn.Sequential(*(Wave() for _ in range(8))) for _ in range(count // 8)))


class Heavy(GanModule):
    """Adversarial learning with a large generator, a large frozen teacher and a small judge."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        with torch.device(device):
            self.generator, self.teacher = waves(LEARNING), waves(FROZEN)
            self.judge = nn.Linear(WIDTH, 1)

    def configure_players(self) -> Any:
        adam = partial(Adam, lr=1e-4)
        yield Player("generator", self.generator, adam, ema=0.9)
        yield Player("judge", self.judge, adam)
        yield Player("teacher", self.teacher)

    def configure_phases(self) -> Any:
        yield Phase("judge", self.judging, "judge")
        yield Phase("fool", self.fooling, "generator")

    def judging(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            fake = self.generator(batch["x"])
        return (softplus(self.judge(fake)) + softplus(-self.judge(batch["x"]))).mean()

    def fooling(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        fake = self.generator(batch["x"])
        return {"judge": softplus(-self.judge(fake)).mean(), "teacher": self.teacher(fake).square().mean()}


def batches(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))}


def limit(bytes_: int) -> None:
    """Let this process have so many bytes more."""
    with open("/proc/self/status") as file:
        mapped = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (mapped + bytes_, resource.RLIM_INFINITY))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--real", action="store_true")
    chosen = parser.parse_args()
    bucket.SIZE = 2 * MB  # to the limit about what 25 MB are to a GPU
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    if chosen.limit:
        limit(chosen.limit * MB)
    made = trainer(
        PhaseStrategy(chosen.policy, check=False),  # a trial has the samples of all ranks
        chosen.devices,
        STEPS,
        precision="32-true",
        callbacks=[Saves(chosen.folder / "last.ckpt", STEPS)],
    )
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    loader = DataLoader(list(Whole(STEPS, rank, chosen.devices, batches)), batch_size=None)
    made.fit(Heavy("cpu" if chosen.real else "meta"), loader)
    if rank == 0:
        print("trained and saved")


if __name__ == "__main__":
    main()

"""A run for a job of Slurm, whose ranks write where they are, and wait for a signal; and one with a frozen teacher."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from datasets import GlobalLoader
from gan.runs import Run
from tests.support.hard_games import Plain, Teacher, mlp


class Placed(Plain):
    """In a job its ranks write where they are. When it starts for the first time, its third step waits for a signal."""

    def on_train_start(self):
        trainer, begins = self.trainer, os.environ.get("SLURM_RESTART_COUNT", "0")
        place = trainer.global_rank, trainer.local_rank, trainer.world_size, trainer.node_rank, trainer.global_step
        if "SLURM_JOB_ID" in os.environ:
            Path(f"place-{begins}-{trainer.global_rank}").write_text(json.dumps(place))

    def on_train_batch_start(self, batch, number):
        ending = self.trainer.strategy.ending
        if self.step == 2 and "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
            Path(f"waits-{self.trainer.global_rank}").touch()
            while not ending.wished:
                time.sleep(0.01)

    def train_dataloader(self):
        """Three batches an epoch."""
        numbers = torch.randn(48, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return GlobalLoader([{"x": row} for row in numbers], batch_size=16)


class Taught(Teacher, Placed):
    """To be planned: nobody reads the file."""

    def __init__(self):
        super().__init__()
        self.teacher = mlp(6, 6)

    def configure_players(self):
        *others, teacher = super().configure_players()
        return [*others, replace(teacher, weights="teacher.safetensors")]


def placed(max_steps: int = 8, slow: bool = False) -> Run:
    """With `slow` a job that starts for the first time is never ready."""
    while slow and "SLURM_RESTART_COUNT" not in os.environ and "SLURM_JOB_ID" in os.environ:
        Path(f"builds-{os.environ['SLURM_PROCID']}").touch()
        time.sleep(0.05)
    return Run(Placed(), None, max_steps)


def taught(max_steps: int = 8) -> Run:
    return Run(Taught(), None, max_steps)

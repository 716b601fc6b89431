"""A person's own program, and a run, that every launcher starts: a tiny game of five steps in float64.

Each rank notes its place and its last weights in the folder that NOTES names.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only

from datasets import GlobalLoader
from gan.runs import Run
from strategies import PhaseStrategy
from tests.support.hard_games import Plain

STEPS, BATCH = 5, 16


class Noted(Plain):
    """Notes what each rank sees at the end."""

    def __init__(self, part: slice = slice(None)) -> None:
        super().__init__()
        self.part = part

    def train_dataloader(self) -> GlobalLoader:
        data = torch.randn(STEPS, BATCH, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        data = data[:, self.part]
        samples = [{"x": each} for each in data.flatten(0, 1)]
        return GlobalLoader(samples, batch_size=data.shape[1], shuffle=False)

    def on_train_end(self) -> None:
        world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        strategy = self.trainer.strategy
        place = {
            "rank": (self.trainer.global_rank, world[0], rank_zero_only.rank),
            "local rank": (self.trainer.local_rank, strategy.cluster_environment.local_rank()),
            "world size": (self.trainer.world_size, world[1]),
            "local size": strategy.num_processes,
            "node": self.trainer.node_rank,
            "step": self.step,
        }
        weights = {name: weight.detach().clone() for name, weight in self.state_dict().items()}
        torch.save((place, weights), Path(os.environ["NOTES"]) / f"{os.getpid()}.pt")


def noted() -> Run:
    """The game, as a run."""
    return Run(Noted(), None, STEPS)


def play(game: Noted, devices: int = 1, nodes: int = 1, policy: str = "ddp", **settings: Any) -> None:
    seed_everything(0, verbose=False)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    strategy = PhaseStrategy(policy, **settings)
    where = dict(accelerator="cpu", devices=devices, num_nodes=nodes)
    Trainer(strategy=strategy, max_steps=STEPS, precision="64-true", **where, **quiet).fit(game)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--start-method", default="popen")
    parser.add_argument("--init-method")
    parser.add_argument("--local-rank", help="torch.distributed.launch gives it; the environment says the same")
    typed = parser.parse_args()
    game = Noted()
    play(game, typed.devices, typed.nodes, start_method=typed.start_method, init_method=typed.init_method)
    if typed.start_method != "popen":
        torch.save(game.state_dict(), Path(os.environ["NOTES"]) / "handed-over")

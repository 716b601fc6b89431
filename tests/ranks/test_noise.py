"""Torch's own generator, by rank, and what a resumed run draws; gan.noise: tests/scenes/draws.py."""

import os
import random
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from lightning import seed_everything
from torch import nn

from strategies import PhaseStrategy
from tests.support.hard_games import Plain
from tests.support.parity import Whole, distance, snapshot, trainer
from tests.support.saved import Saves, read_checkpoint, write_checkpoint

# ---- torch's own generator, and those of NumPy and Python ----


class GlobalNoise(Plain):
    """Draws as an author without our noise would, and remembers it."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def configure_phases(self):
        yield from (replace(phase, draws="torch") for phase in super().configure_phases())

    def fake(self, real):
        mask = nn.functional.dropout(torch.ones(32), 0.5)
        self.drawn.append((torch.rand(()).item(), np.random.rand(), random.random(), tuple(mask.tolist())))
        return self.generator(torch.randn(len(real), 4, dtype=real.dtype) + sum(self.drawn[-1][:3]) + mask[:4])


def seeded(world, path=None, resume=None):
    """What this rank draws after seed_everything, and the weights that come of it. In the middle it saves."""
    seed_everything(3, verbose=False)
    game, strategy = GlobalNoise(), PhaseStrategy("ddp", check=False)
    rank = torch.distributed.get_rank() if world > 1 else 0
    with mock.patch.dict(os.environ, PL_GLOBAL_SEED="3"):
        made = trainer(strategy, world, 6, callbacks=[Saves(path, 3)] if path else [])
        made.fit(game, Whole(6, rank, world), ckpt_path=resume)
    return game.drawn, snapshot(game, strategy)


def test_by_torch_ranks_draw_different_numbers_and_the_same_ones_in_every_run(ranks):
    (one, _), (other, _) = ranks(2).run(seeded, 2)
    for ours, theirs in zip(one, other, strict=True):
        assert [a == b for a, b in zip(ours, theirs, strict=True)] == [False, True, True, False]
    assert [drawn for drawn, _ in ranks(2).run(seeded, 2)] == [one, other]


def test_a_single_rank_draws_what_it_was_seeded_for():
    drawn, _ = seeded(1)
    seed_everything(3, verbose=False)
    GlobalNoise()
    mask = nn.functional.dropout(torch.ones(32, dtype=torch.float64), 0.5)
    assert drawn[0][3] == tuple(mask.tolist())
    assert drawn[0][:3] == (torch.rand((), dtype=torch.float64).item(), np.random.rand(), random.random())


def test_a_resumed_run_draws_what_the_unbroken_one_does(ranks, tmp_path):
    path = str(tmp_path / "three.ckpt")
    unbroken = ranks(2).run(seeded, 2, path=path)
    for (drawn, found), (all_drawn, expected) in zip(ranks(2).run(seeded, 2, resume=path), unbroken, strict=True):
        assert drawn == all_drawn  # the game remembers what it drew before
        assert distance(found, expected) == 0
    # The control: a run on another number of ranks draws other numbers from torch, but not from NumPy and Python. The
    # first rank goes on as it was.
    tree = read_checkpoint(path)
    write_checkpoint(tmp_path / "anew.ckpt", {**tree, "random_states": tree["random_states"][:1]})
    anew = ranks(2).run(seeded, 2, resume=str(tmp_path / "anew.ckpt"))
    assert anew[0][0] == unbroken[0][0]
    assert not {each[0] for each in anew[1][0][6:]} & {each[0] for each in unbroken[1][0]}
    for (drawn, _), (all_drawn, _) in zip(anew, unbroken, strict=True):
        assert [each[1:3] for each in drawn] == [each[1:3] for each in all_drawn]  # NumPy, Python

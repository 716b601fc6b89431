"""Games are played without values; those that read values on the CPU: see tests/system/test_plan.py."""

import pytest
import torch
from torch import nn

from datasets import GlobalLoader
from gan import ranks
from gan.app.planning import opening
from gan.runs import Run
from strategies import private
from tests.support.hard_games import Plain

ROWS = 8


class Fed(Plain):
    def __init__(self, rows=ROWS):
        super().__init__()
        self.rows = rows

    def train_dataloader(self):
        return GlobalLoader([{"x": row} for row in torch.zeros(self.rows, 6)], batch_size=self.rows)


class ReadsValue(Fed):
    """For tests/system/test_plan.py."""

    def fake(self, real):
        return super().fake(real) * (1.0 if real.mean().item() > 0 else 2.0)


class FromFile(Fed):
    """Its number was read from a file, which is on the CPU whatever device a plan makes its game on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.ones(6, device="cpu"))

    def fake(self, real):
        return super().fake(real) * self.number


class Gathers(Fed):
    def fake(self, real):
        return super().fake(real) - ranks.gather(real).mean()


def opened(game, size=1):
    with private.fake_world(size):
        return opening.opened(lambda: Run(game(), None, 1), size)


@pytest.mark.parametrize("game", [FromFile, Gathers])
def test_what_was_read_from_a_file_and_how_many_rows_ranks_have_need_no_values(game):
    assert opened(game, 2).why == ""


class Normed(Fed):
    def fake(self, real):
        return nn.functional.batch_norm(super().fake(real), None, None, training=True)


def test_batch_norms_are_those_of_a_training_on_several_ranks():
    reduced = [sum(trace.reduced for trace in opened(Normed, size).trace(frozenset())) for size in (1, 2)]
    assert reduced[0] == 0 < reduced[1]

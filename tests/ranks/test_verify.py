"""What gan.verify finds in games that keep the law and in games that break it, each in one way."""

import os
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import softplus
from torch.optim import Adam
from torch.utils.data import DataLoader

from datasets import GlobalLoader
from gan import GanModule, Phase, Player, noise, ranks
from gan import verify as verify
from gan.app.verifying.records import LIMITS, Tolerance
from gan.app.verifying.verification import OneDevice, Row, judged, train
from gan.runs import Run
from tests.support.hard_games import mlp
from tests.support.parity import often


class Duel(GanModule):
    """A small GAN that keeps the law, or breaks it in one way."""

    def __init__(self, law: str) -> None:
        super().__init__()
        self.law = law
        self.painter, self.critic = mlp(4, 6), mlp(6, 1)
        self.register_buffer("center", torch.zeros(()))
        self.painter.register_buffer("seen", torch.zeros(()))

    def configure_players(self):
        rank = dist.get_rank() if dist.is_initialized() else 0
        ema = (lambda n: 0.9 - 0.1 * rank) if self.law == "average" else 0.9
        after = (lambda net: net[0].bias.add_(rank)) if self.law == "weight" else None
        yield Player("generator", self.painter, partial(Adam, lr=1e-2), ema=ema, ema_buffers="averaged")
        yield Player("discriminator", self.critic, partial(Adam, lr=1e-2), after=after, clip=1.0)

    def configure_phases(self):
        own = "torch" if self.law == "draws" else "samples"
        yield Phase("judge", self.judge, learners="discriminator", draws=own)
        yield Phase("fool", self.fool, learners="generator", micro_batches=2)

    def fake(self, real):
        shape = len(real), 4
        return self.painter(torch.randn(shape).to(real) if self.law == "draws" else noise.randn(shape, like=real))

    def judge(self, batch):
        real, fake = self.critic(batch), self.critic(self.fake(batch).detach())
        mean = real.mean() if self.law == "loss" else ranks.mean(real.mean())
        fake = fake.float().to(fake) if self.law == "cast" else fake
        own = real.mean() if self.law == "buffer" else mean
        self.center = self.center * 0.9 + own.detach() * 0.1
        loss = softplus(mean - real).mean() + softplus(fake).mean()
        if self.law == "gradient":
            loss = loss * (real.square().mean() / real.square().mean().detach())
        return {"real": loss}

    def fool(self, batch):
        return softplus(-self.critic(self.fake(batch))).mean()

    def train_dataloader(self):
        data = list(torch.randn(32, 6, generator=torch.Generator().manual_seed(3)))
        if self.law == "batch":
            return DataLoader(data, batch_size=8 // (dist.get_world_size() if dist.is_initialized() else 1))
        return GlobalLoader(data, batch_size=8)


def duel(law: str = "kept", max_steps: int = 9) -> Run:
    return Run(Duel(law), None, max_steps)


def typed(law, *more):
    """The settings of a game that breaks the law in this way, or keeps it."""
    return verify.parse(["--run", f"{__file__}:duel", "--law", law, "--steps", "3", *more])


def trained(*request, **more):
    """One training, after which the process is as before."""
    with mock.patch.dict(os.environ):
        return train(*request, **more)


@pytest.fixture
def found(ranks, tmp_path):
    """The row for a game under a strategy on two ranks, without the check."""

    def row(law: str, strategy: str) -> Row:
        settings, last = typed(law, "--check", "false"), tmp_path / "last.pt"
        made = trained(settings, "single", 1, precision="64", saved=last)
        work = partial(trained, settings, strategy, 2, precision="64", one=last)
        return judged(OneDevice(made, last, Tolerance(*LIMITS["64"])), ranks(2).run(work))

    return row


@pytest.mark.parametrize("strategy", often(["ddp", "zero2", "zero3", "generator=zero3,*=zero1", "dp"]))
def test_a_game_that_keeps_the_law_is_exact(strategy, found):
    row = found("kept", strategy)
    assert row == Row("exact", row.distance, exact=True)
    assert row.distance < 1e-14


def test_a_cast_to_float32_by_hand_is_seen():
    for law in ("kept", "cast"):
        assert trained(typed(law), "single", 1, shaken=True).cast == (law == "cast")


def test_averages_of_buffers_are_compared_too():
    moments = trained(typed("kept"), "single", 1).moments
    assert {"generator.0.weight", "generator.seen"} < {each.name for each in moments if each.kind == "average"}


@pytest.mark.parametrize(
    ("law", "words"),
    [
        ("loss", "step 0, phase 'judge': loss 'real' is "),
        ("gradient", "step 0, phase 'judge': the gradient of 'discriminator."),
        ("buffer", "step 0, phase 'judge': buffer 'center' is off by "),
        ("weight", "step 0, phase 'judge': weight 'discriminator.0.bias' is off by "),
        ("average", "step 0: average 'generator."),
        ("batch", "step 0: the ranks together get other samples than one device does"),
        ("draws", "step 0, phase 'judge': loss 'real' is "),
    ],
)
@pytest.mark.parametrize("strategy", often(["ddp", "zero3"], ["ddp"]))
def test_what_breaks_the_law_is_named_by_its_kind(law, words, strategy, found):
    row = found(law, strategy)
    assert row.words.startswith(f"differs: {words}"), row
    assert row.advice == (law,) and not row.exact and not row.refused
    assert row.distance > 1e-6

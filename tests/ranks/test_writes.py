"""Writes that cannot be kept are refused by name; that others are kept: tests/scenes/writing.py."""

import re

import pytest
import torch
from lightning import Callback

from gan.files.errors import UserError
from strategies import PhaseStrategy
from tests.support.hard_games import Plain
from tests.support.parity import parts, trainer
from tests.support.writing_games import Writing, WritingAlone

# ---- ranks that write different values ----


def compared(game, policy, world):
    strategy = PhaseStrategy(policy, check=False, check_replicas=True)
    try:
        trainer(strategy, world, 2, sync_batchnorm=True).fit(game(), parts(2, world))
    except UserError as error:
        return str(error)


def test_the_replica_check_names_what_ranks_wrote_differently(ranks):
    for said in ranks(2).run(compared, WritingAlone, "ddp", 2):
        assert "after phase 'discriminator' of step 0, weight '0.shift' of player 'discriminator' differs" in said
    assert ranks(2).run(compared, Writing, "ddp", 2) == [None, None]


class Statistics(Plain):
    """A buffer that learns from the rank's own samples."""

    def __init__(self):
        super().__init__()
        self.discriminator.register_buffer("mean", torch.zeros(6))

    def judge(self, batch):
        self.discriminator.mean.lerp_(batch["x"].mean(0), 0.1)
        return super().judge(batch)


@pytest.mark.promise("buffers that learn from the rank's samples")
@pytest.mark.parametrize("policy", ["ddp", "zero3"])
def test_the_replica_check_compares_buffers(policy, ranks):
    for said in ranks(2).run(compared, Statistics, policy, 2):
        assert "after phase 'discriminator' of step 0, buffer 'mean' of player 'discriminator' differs" in said
        assert "gan.ranks" in said


# ---- between phases ----


class Writes(Callback):
    """Does something with the game's weights after the first step."""

    def __init__(self, what):
        self.what = what

    def on_train_batch_end(self, trainer, game, *_):
        self.what(trainer.strategy, game)


def loads_outside(strategy, game):
    game.generator.load_state_dict({k: torch.zeros(v.shape) for k, v in Plain().generator.state_dict().items()})


def assigns_outside(strategy, game):
    for weight in game.generator.parameters():
        weight.data = torch.zeros(weight.shape, dtype=torch.float64)


def writes_unasked(strategy, game):
    with strategy.gathered():
        game.discriminator[0].bias.data.zero_()
        with torch.no_grad():
            game.generator[2].weight.zero_()


def writes_averages_unasked(strategy, game):
    with strategy.gathered(), strategy.averaged(), torch.no_grad():
        game.generator[2].weight.zero_()


def averages_differ(strategy, game):
    with strategy.gathered(write=True), strategy.averaged(), torch.no_grad():
        game.generator[2].bias.fill_(strategy.global_rank)


def differs_before_averages(strategy, game):
    with strategy.gathered(write=True), torch.no_grad():
        game.generator[2].bias.fill_(strategy.global_rank)
        with strategy.averaged():
            pass


def replaces(strategy, game):
    with strategy.gathered(write=True):
        game.generator[0].weight = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.float64))


def differs(strategy, game):
    with strategy.gathered(write=True), torch.no_grad():
        game.generator[2].bias.fill_(strategy.global_rank)


def said(what, policy, world=1):
    try:
        trainer(PhaseStrategy(policy, check=False), world, 2, callbacks=[Writes(what)]).fit(Plain(), parts(2, world))
    except (UserError, RuntimeError) as error:
        return str(error)


ALL = ["ddp", "zero3", "fsdp"]


@pytest.mark.promise("weights that a callback writes")
@pytest.mark.parametrize(
    ("what", "policies", "message"),
    [
        (loads_outside, ["zero3", "fsdp"], r"write them inside gathered\(write=True\)"),
        (assigns_outside, ["zero3", "fsdp"], r"write them inside gathered\(write=True\)"),
        (writes_unasked, ALL, "weight '2.weight' of player 'generator' was written inside gat"),
        (writes_averages_unasked, ["zero3"], "was written inside gathered"),
        (averages_differ, ALL, "'2.bias' .* was written with other values on another"),
        (differs_before_averages, ["zero3"], "'2.bias' .* was written with other values on another"),
        (replaces, ALL, "weight '0.weight' of player 'generator' was replaced by another parameter"),
        (differs, ALL, "weight '2.bias' of player 'generator' was written with other values on another"),
    ],
)
def test_a_write_that_cannot_be_kept_is_refused(what, policies, message, ranks):
    for policy in policies:
        for found in ranks(2).run(said, what, policy, 2):
            assert found is not None
            assert re.search(message, found), found

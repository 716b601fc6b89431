"""Weights that are not finite are named when they are saved, and refused when a run would go on from them."""

import re

import pytest
import torch
import torch.distributed as dist
from lightning import Callback

from gan.files.errors import UserError
from gan.files.finite import NotFinite
from strategies import PhaseStrategy
from tests.support.hard_games import Plain
from tests.support.parity import often, parts, trainer, warned


class Spoil(Callback):
    """Writes a number into one place of what a game has, and saves."""

    def __init__(self, what, path, value):
        self.what, self.path, self.value = what, path, value

    @torch.no_grad()
    def on_train_batch_end(self, trainer, game, *_):
        strategy = trainer.strategy
        if self.what == "mask":
            game.discriminator.mask[0] = self.value
        elif self.what == "average":
            ema = strategy.policies["generator"].ema
            for average in ema.average if trainer.is_global_zero else ():
                average.view(-1)[:1] = self.value  # a rank may own nothing of it
        else:
            with strategy.gathered(write=True):
                game.discriminator[2].weight[0, 7] = self.value
        trainer.save_checkpoint(self.path)


class Masked(Plain):
    """One buffer has infinities and means them, as masks do."""

    def __init__(self):
        super().__init__()
        self.discriminator.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


def saved_and_resumed(policy, folder, what, value):
    """What is said when it is saved, and what is raised when it is resumed."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    path = folder / "x.ckpt"
    with warned("not finite") as caught:
        spoil = Spoil(what, path, value)
        trainer(PhaseStrategy(policy, check=False), world, 1, callbacks=[spoil]).fit(Masked(), parts(1, world))
    said = [each.partition(": ")[2] for each in caught]
    try:
        trainer(PhaseStrategy(policy, check=False), world, 2).fit(Masked(), parts(2, world), ckpt_path=path)
    except UserError as error:
        assert error.agreed and type(error) is NotFinite
        return said, str(error)
    return said, None


SAID = "; it will not be resumed or opened. Stop this run, and go on from an earlier checkpoint"
WEIGHT = "'2.weight' of player 'discriminator' has NaN"


@pytest.mark.promise(
    "weights or averages that are not finite",
    "named when they are saved; not resumed, sampled, evaluated or exported, and an earlier checkpoint is named",
)
@pytest.mark.parametrize("policy", often(["ddp", "zero3"], ["zero3"]))
def test_a_weight_is_named_by_the_first_rank_and_refused_on_all(policy, ranks, tmp_path):
    (said, refused), (others, alike) = ranks(2).run(saved_and_resumed, policy, tmp_path, "weight", torch.nan)
    assert (said, others) == ([WEIGHT + SAID], [])
    assert refused == alike == f"the checkpoint cannot be used: {WEIGHT}; take an earlier one"


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [
        ("average", torch.inf, r"'0.weight \(its moving average\)' of player 'generator', and 3 more tensors have"),
        ("mask", torch.inf, None),
        ("weight", 1.0, None),
    ],
)
def test_so_are_averages_but_no_masks_and_no_good_weights(what, value, words, tmp_path):
    said, refused = saved_and_resumed("single", tmp_path, what, value)
    if words is None:
        assert (said, refused) == ([], None)
    else:
        (line,) = said
        assert re.match(words, line) and re.search(words, refused)


def test_a_game_is_not_loaded_with_them(tmp_path):
    made, game = trainer(PhaseStrategy("single"), 1, 1), Plain()
    made.fit(game, parts(1))
    made.save_checkpoint(tmp_path / "good.ckpt")
    Plain.load_from_checkpoint(tmp_path / "good.ckpt")
    with torch.no_grad():
        game.generator[0].weight[0, 0] = torch.nan
    made.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(NotFinite, match=r"x.ckpt has weights that are not finite: 'generator.0.weight'; take"):
        Plain.load_from_checkpoint(tmp_path / "x.ckpt")
    assert Plain.load_from_checkpoint(tmp_path / "x.ckpt", strict=False).generator[0].weight[0, 0].isnan()

"""Ranks whose batches have different sizes are refused before an update is made from them."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.processes.equal_rows import EqualRows
from tests.support.hard_games import Plain
from tests.support.parity import BATCH, distance, equals, train, trainer, vectors


def smaller_at_the_end(step):
    """On all ranks together, as the last batch of an epoch is."""
    return {"x": vectors(step)["x"][: BATCH if step % 3 < 2 else BATCH // 2]}


def test_batches_that_change_on_all_ranks_together_are_exact(ranks):
    expected = train(Plain, smaller_at_the_end, "single", steps=4)
    equals(ranks(2).run(train, Plain, smaller_at_the_end, "zero3", 2, 4), expected)


def unequal(policy, sizes, checked=True):
    """What a rank is told whose batches have these sizes, and its weights then."""
    game, said = Plain(), None
    mine = sizes[torch.distributed.get_rank()]
    loader = DataLoader([{"x": vectors(step)["x"][:size]} for step, size in enumerate(mine)], batch_size=None)
    with nullcontext() if checked else mock.patch.object(EqualRows, "begin"):
        try:
            trainer(PhaseStrategy(policy, check=False), 2, len(mine)).fit(game, loader)
        except UserError as error:
            said = str(error)
    return said, {name: weight.detach().clone() for name, weight in game.named_parameters()}


AT_FIRST, LATER = ([6], [2]), ([8, 6], [8, 2])


@pytest.mark.promise("ranks with unequal batches", "the training of one device, or a refusal by name")
@pytest.mark.parametrize(
    ("policy", "sizes", "where"), [("ddp", AT_FIRST, ""), ("zero3", LATER, "phase 'discriminator' of step 1: ")]
)
def test_ranks_with_unequal_rows_are_refused_by_name_on_all(policy, sizes, where, ranks):
    for said, _ in ranks(2).run(unequal, policy, sizes):
        assert said.startswith(
            f"{where}rank 1's batch has 2 rows and rank 0's 6, so the mean over ranks is not the mean"
        )
        assert "type drop_last=True" in said


@pytest.mark.promise("ranks with unequal batches")
def test_no_rank_makes_an_update_from_them(ranks):
    before = [each[1] for each in ranks(2).run(unequal, "ddp", [sizes[:1] for sizes in LATER])]
    for found in (ranks(2).run(unequal, "ddp", LATER, checked) for checked in (True, False)):
        differences = [distance(each[1], one) for each, one in zip(found, before, strict=True)]
        assert (max(differences) == 0) == (found[0][0] is not None)

"""What is scored of each game."""

import pytest
import torch
from torch.utils.data import default_collate

from datasets.augment import to_tensors
from gan import noise
from gan.app.scoring.outputs import makes
from gan.files.errors import UserError
from gan.runs import build

SMALL = dict(size=32, batch_size=2, faces=4, held_out=4, width=4)
NUMBERS = torch.tensor([1, 2])


def game_and_batch(name, **settings):
    run = build(name, **SMALL, **settings)
    batch = default_collate([to_tensors(run.data.val[number]) for number in NUMBERS.tolist()])
    return run.game.eval(), batch


@torch.no_grad()
def made_of(name, drop=(), **settings):
    game, batch = game_and_batch(name, **settings)
    batch = {key: value for key, value in batch.items() if key not in drop}
    with noise.at(noise.Place(("test",), 1, 2, 4)):
        return game, batch, makes(game, batch, NUMBERS)


def test_sean_paints_pictures_again_and_transfers():
    game, batch, made = made_of("sean-faces", hidden=8, style=8)
    own, transfer = made["reconstruction"], made["transfer"]
    assert own.paired and own.known is None
    assert torch.equal(own.truth, batch["image"]) and torch.equal(own.label, batch["label"])
    with noise.at(noise.Place(("test",), 1, 2, 4)), torch.no_grad():
        mask = game.mask(batch["label"])
        assert torch.equal(own.pictures, game.generator(mask, game.encoder(batch["image"], mask)))
    assert torch.equal(transfer.truth, batch["truth"])
    for row in range(2):
        theirs = set(batch["style_label"][row].unique().tolist())
        expected = [[label in theirs for label in line] for line in batch["label"][row].tolist()]
        assert transfer.known[row].bool().tolist() == expected
    assert not transfer.known.bool().all()  # else this showed nothing


@pytest.mark.parametrize(
    ("name", "settings", "sides"),
    [("cyclegan-faces", dict(blocks=1), {"a to b": "b", "b to a": "a"}), ("cut-faces", {}, {"a to b": "b"})],
)
def test_cyclegan_translates_both_ways_and_cut_one(name, settings, sides):
    for drop, truth, paired in ((), "truth_", True), (("truth_a", "truth_b"), "", False):
        _, batch, made = made_of(name, drop, **settings)
        assert list(made) == list(sides)
        for way, side in sides.items():
            assert torch.equal(made[way].truth, batch[truth + side]) and made[way].paired == paired


@pytest.mark.parametrize("name", ["r3gan-faces", "biggan-faces", "wgan-gp-faces", "stylegan-faces", "dmd2-faces"])
def test_games_from_noise_make_the_pictures_of_their_samples_numbers(name):
    game, batch, made = made_of(name, latent=8)
    (drawn,) = made.values()
    assert not drawn.paired and drawn.label is None
    with torch.no_grad():
        torch.testing.assert_close(drawn.pictures[1:], game.numbered(torch.tensor([2]), like=batch["image"]))


def test_byol_makes_no_pictures_and_its_score_is_in_metrics():
    with pytest.raises(UserError, match=r"what Byol makes is not known here; its scores .* in the run's metrics\.csv"):
        made_of("byol-faces")

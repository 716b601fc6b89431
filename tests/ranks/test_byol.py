"""What is particular to BYOL; that it learns, shows and scores, and is the same on ranks: see test_games.py."""

import pytest
import torch

from gan import noise
from gan.games.byol import distance, neighbour_error, rising
from nets.byol import random_view
from strategies import PhaseStrategy
from tests.ranks.test_games import byol, pictures
from tests.support.parity import BATCH, parts, trainer


def test_the_target_follows_more_and_more_slowly():
    """Grill et al. 2020, section 3.3; at the end it stands still."""
    assert rising(0.9, 10, 0) == pytest.approx(0.9)
    assert rising(0.9, 10, 5) == pytest.approx(0.95)
    assert rising(0.9, 10, 10) == rising(0.9, 10, 11) == 1
    game = byol()
    game.steps = 2
    weight = game.target.encoder.stages[0].weight
    seen = []
    predict = game.predict
    game.predict = lambda batch: seen.append(weight.clone()) or predict(batch)
    trainer(PhaseStrategy("single"), 1, 5).fit(game, parts(5, batches=pictures))
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], seen[3]) and torch.equal(seen[3], seen[4])


def test_the_loss_is_the_papers():
    """Its equation 2, for both orders of the views: the squared distance of normalised vectors."""
    game, batch, place = byol().double(), pictures(0), (("test",), 0, BATCH, BATCH)
    with noise.at(noise.Place(*place)):
        found = game.predict(batch)
    with noise.at(noise.Place(*place)):
        views = random_view(batch["image"]), random_view(batch["image"])
    wanted = 0
    for mine, theirs in (views, views[::-1]):
        guess, target = game.predictor(game.online(mine)), game.target(theirs)
        apart = torch.nn.functional.normalize(guess) - torch.nn.functional.normalize(target)
        wanted = wanted + apart.square().sum(1).mean()
    torch.testing.assert_close(found, wanted)
    found.backward()
    assert all(weight.grad is None for weight in game.target.parameters())
    assert all(weight.grad is not None for net in (game.online, game.predictor) for weight in net.parameters())
    assert distance(torch.eye(3), -torch.eye(3)) == 4


def test_the_target_takes_the_statistics_of_the_batch():
    game = byol()
    modes = []
    game.target.register_forward_pre_hook(lambda module, _: modes.append(module.encoder.stages[1].training))
    trainer(PhaseStrategy("single"), 1, 2).fit(game, parts(2, batches=pictures), parts(1, batches=pictures))
    assert modes == [True] * 4


# ---- the score ----


def representations(count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Two attributes of samples, and representations that know them."""
    generator = torch.Generator().manual_seed(0)
    seen = torch.randn(count, 2, generator=generator)
    return seen, (seen > 0).float()


def test_the_error_is_a_share_of_that_of_chance():
    """Written out for each sample."""
    seen, present = (each.double() for each in representations(30))
    errors = []
    for sample in range(30):
        angles = torch.nn.functional.cosine_similarity(seen - seen.mean(0), (seen - seen.mean(0))[sample], dim=1)
        nearest = [other for other in angles.argsort(descending=True).tolist() if other != sample][:10]
        errors.append((present[nearest].mean(0) - present[sample]).square())
    share = present.mean(0)
    torch.testing.assert_close(
        neighbour_error(seen, present), (torch.stack(errors).mean(0) / (share * (1 - share))).mean()
    )


def test_what_all_have_or_hardly_any_is_not_scored():
    seen, present = representations()
    rare = torch.zeros(200, 2)
    rare[0, 0], rare[:, 1] = 1, 1
    torch.testing.assert_close(neighbour_error(seen, torch.cat([present, rare], 1)), neighbour_error(seen, present))

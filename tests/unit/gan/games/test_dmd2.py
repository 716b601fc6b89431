"""What is particular to DMD2; that it learns, shows and scores, and is the same on ranks: see test_games.py."""

import torch

from gan import losses, noise
from gan.games.dmd2 import Dmd2
from tests.ranks.test_games import dmd2, pictures
from tests.support.parity import BATCH


def at_rows() -> noise.at:
    return noise.at(noise.Place(("test",), 0, BATCH, BATCH))


def reached(game: Dmd2) -> set[str]:
    return {name.split(".")[0] for name, parameter in game.named_parameters() if parameter.grad is not None}


def test_guidance_denoises_fakes_and_tells_them_from_pictures():
    game, batch = dmd2().double(), pictures(0)
    with at_rows():
        found = game.follow(batch)
    with at_rows():
        fake = game.student(noise.randn((BATCH, 4), like=batch["image"])).detach()
        noisy, sigma = game.diffuse(fake)
        both = game.diffuse(torch.cat([batch["image"], fake]))
    torch.testing.assert_close(found["denoising"], losses.denoising(game.fake_score(noisy, sigma), fake, sigma, 0.5))
    real_score, fake_score = game.head(game.fake_score.features(*both)).chunk(2)
    torch.testing.assert_close(found["adversarial"], 0.1 * losses.non_saturating_discriminator(real_score, fake_score))
    found["adversarial"].backward(retain_graph=True)
    assert game.fake_score.see.weight.grad.abs().sum() > 0 and game.fake_score.paint.weight.grad is None  # the trunk
    found["denoising"].backward()
    assert reached(game) == {"fake_score", "head"}


def test_the_students_loss_is_that_of_both_scores_and_the_head():
    game, batch = dmd2().double(), pictures(0)
    with at_rows():
        found = game.distil(batch)
    with at_rows():
        fake = game.draw(batch["image"])
        noisy, sigma = game.diffuse(fake)
        again = game.diffuse(fake)
    with torch.no_grad():
        scores = game.teacher(noisy, sigma), game.fake_score(noisy, sigma)
    torch.testing.assert_close(found["matching"], losses.distribution_matching(fake, *scores))
    torch.testing.assert_close(
        found["adversarial"], 0.1 * losses.non_saturating_generator(game.head(game.fake_score.features(*again)))
    )
    found["matching"].backward()
    assert reached(game) == {"student"}  # no score is differentiated

"""What is particular to DMD2; that it learns, shows and scores, and is the same on ranks: see test_games.py."""

import pytest
import torch
from torch import nn

from gan import losses, noise
from gan.games.dmd2 import Dmd2
from tests.ranks.test_games import dmd2, pictures
from tests.support.parity import BATCH


def test_three_learners_at_their_own_pace_and_a_teacher_at_none():
    game = dmd2()
    game.assemble()
    assert game.players["teacher"].frozen
    assert [(phase.name, phase.learners, phase.every) for phase in game.phases] == [
        ("guidance", ("fake_score", "head"), 1),
        ("student", ("student",), 3),
    ]


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


def test_the_noise_is_between_its_bounds_and_often_small():
    game = dmd2()
    game.sigmas = (0.1, 10.0)
    clean = torch.zeros(4000, 3, 8, 8)
    torch.manual_seed(0)
    noisy, sigma = game.diffuse(clean)
    assert sigma.min() >= 0.1 - 1e-6
    assert sigma.max() <= 10 + 1e-4
    # Half of the way of sigma ** (1/7), by EDM's equation 5.
    assert sigma.median().item() == pytest.approx(((0.1 ** (1 / 7) + 10 ** (1 / 7)) / 2) ** 7, rel=0.1)
    ratio = noisy.flatten(1).std(1) / sigma
    assert ratio.mean().item() == pytest.approx(1, rel=0.02)


class Blank(nn.Module):
    def forward(self, noisy, sigma):
        return torch.zeros_like(noisy)


def test_any_module_can_teach():
    game = dmd2()
    game.teacher = Blank()
    assert list(game.eval().show(pictures(0, torch.float32))) == [f"seeds {k}, {k + 8}, …" for k in range(8)]

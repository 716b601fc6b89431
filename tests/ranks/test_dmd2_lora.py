"""DMD2 by adapters; that it learns, shows and scores, and is the same on ranks: see test_games.py."""

import torch

from gan import noise
from gan.games.dmd2 import Dmd2Lora
from gan.losses import denoising
from nets.denoiser import Denoiser, Head
from nets.lora import LowRank
from strategies import PhaseStrategy
from tests.ranks.test_games import SIZE, dmd2_lora, pictures
from tests.support.parity import BATCH, parts, trainer

STEPS, FIRST = 6, 2


def learning() -> Dmd2Lora:
    """The base learns in the first steps."""
    torch.manual_seed(0)
    rules = dict(student_every=3, adversarial=0.1, head_weight=0.1, ema=0.9)
    return Dmd2Lora(Denoiser((4, 4), embedding=4), Head(4), SIZE, rank=2, base_steps=FIRST, **rules)


def fitted(game, steps):
    strategy = PhaseStrategy("single")
    trainer(strategy, 1, steps).fit(game, parts(steps, batches=pictures))
    return strategy.policies


def test_the_base_learns_first_and_stands_still_when_it_is_the_teacher():
    early, late = learning(), learning()
    fitted(early, FIRST)
    policies = fitted(late, STEPS)
    updates = {
        name: max(int(state["step"]) for state in policy.optimizer.state.values()) for name, policy in policies.items()
    }
    assert updates == {"student": 2, "fake_score": 4, "head": 4, "teacher": FIRST}
    before, after, end = (dict(game.double().teacher.named_parameters()) for game in (learning(), early, late))
    assert all(torch.equal(after[name], end[name]) for name in end)
    assert not torch.equal(before["paint.weight"], after["paint.weight"])


def test_a_base_that_has_its_weights_is_frozen_and_adapters_alone_learn():
    game = dmd2_lora()
    policies = fitted(game, 1)
    assert policies["teacher"].optimizer is None
    assert [phase.start for phase in game.phases] == [0, 0]
    for name in ("student", "fake_score"):
        network = getattr(game, name)
        added = [layer for layer in network.modules() if isinstance(layer, LowRank)]
        learns = {id(each.weight) for layer in added for each in (layer.down, layer.up)}
        assert {id(weight) for weight in policies[name].weights.values()} == learns
    assert len(policies["student"].ema.average) == 2 * len(added)


def test_student_and_fake_score_begin_as_the_teacher():
    game, x = dmd2_lora(), torch.randn(BATCH, 3, SIZE, SIZE)
    sigma = torch.rand(BATCH) + 0.5
    torch.testing.assert_close(game.fake_score(x, sigma), game.teacher(x, sigma))
    drawn = game.student(x.flatten(1))
    torch.testing.assert_close(drawn, game.teacher(10 * x, torch.full((BATCH,), 10.0)))


def test_the_base_learns_to_denoise_pictures():
    game, batch, place = learning().double(), pictures(0), (("test",), 0, BATCH, BATCH)
    with noise.at(noise.Place(*place)):
        found = game.denoise(batch)
    with noise.at(noise.Place(*place)):
        noisy, sigma = game.diffuse(batch["image"])
    torch.testing.assert_close(found, denoising(game.teacher(noisy, sigma), batch["image"], sigma, 0.5))

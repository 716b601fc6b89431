"""DMD2 by adapters; that it learns, shows and scores, and is the same on ranks: see test_games.py."""

import pytest
import torch

from gan import noise
from gan.games.dmd2 import Dmd2Lora
from gan.losses import denoising
from nets.denoiser import Denoiser, Head
from nets.lora import LowRank
from strategies import PhaseStrategy
from tests.ranks.test_games import SIZE, dmd2_lora, pictures
from tests.support.parity import BATCH, BROKEN, Deaf, distance, equals, in_buckets, parts, train, trainer

STEPS, FIRST, PIECE = 6, 2, 512


def learning() -> Dmd2Lora:
    """The base learns in the first steps."""
    torch.manual_seed(0)
    rules = dict(student_every=3, adversarial=0.1, head_weight=0.1, ema=0.9)
    return Dmd2Lora(Denoiser((4, 4), embedding=4), Head(4), SIZE, rank=2, base_steps=FIRST, **rules)


def run(policy, world, devices=1):
    """Under zero3 in many buckets."""
    more = {"devices": devices} if devices > 1 else {}
    return in_buckets(PIECE, train, learning, pictures, policy, world, STEPS, check=policy is not Deaf, **more)


@pytest.fixture(scope="module")
def alone():
    return run("single", 1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero1", "zero2", "zero3", "fsdp", "student=ddp,*=zero3"])
def test_two_ranks_train_the_same(policy, ranks, alone):
    equals(ranks(2).run(run, policy, 2), alone)


@pytest.mark.slow
def test_the_control_without_synchronisation(ranks, alone):
    assert distance(ranks(2).run(run, Deaf, 2)[0], alone) > BROKEN


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
    game, batch = learning().double(), pictures(0)
    place = noise.Place(("test",), 0, BATCH, BATCH)
    with noise.at(place):
        found = game.denoise(batch)
    with noise.at(noise.Place(("test",), 0, BATCH, BATCH)):
        noisy, sigma = game.diffuse(batch["image"])
    torch.testing.assert_close(found, denoising(game.teacher(noisy, sigma), batch["image"], sigma, 0.5))

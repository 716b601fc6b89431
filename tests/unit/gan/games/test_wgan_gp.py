"""What is particular to WGAN-GP; that it learns, shows and scores, and is the same on ranks: see test_games.py."""

import torch

from gan import losses, noise
from strategies import PhaseStrategy
from tests.ranks.test_games import pictures, wgan_gp
from tests.support.parity import BATCH, parts, trainer


def test_the_critic_learns_in_every_step_and_the_generator_in_one_of_three():
    game, strategy = wgan_gp(), PhaseStrategy("ddp")
    trainer(strategy, 1, 7).fit(game, parts(7, batches=pictures))
    updates = {
        name: {int(state["step"]) for state in policy.optimizer.state_dict()["state"].values()}
        for name, policy in strategy.policies.items()
    }
    assert updates == {"critic": {7}, "generator": {3}}  # the generator in steps 0, 3 and 6


def test_the_losses_are_the_papers():
    game = wgan_gp().double()
    batch, place = pictures(0), ("test",)
    with noise.at(noise.Place(place, 0, BATCH, BATCH)):
        found = game.judge(batch)
    with noise.at(noise.Place(place, 0, BATCH, BATCH)):
        fake = game.generator(noise.randn((BATCH, 4), like=batch["image"])).detach()
        penalty = losses.gradient_penalty(game.critic, batch["image"], fake)
        torch.testing.assert_close(found["penalty"], 10 * penalty)
    difference = game.critic(fake).mean() - game.critic(batch["image"]).mean()
    torch.testing.assert_close(found["wasserstein"], difference)
    with noise.at(noise.Place(place, 0, BATCH, BATCH)):
        torch.testing.assert_close(game.please(batch)["wasserstein"], -game.critic(fake).mean())


def test_the_critics_loss_teaches_no_generator():
    game = wgan_gp().double()
    sum(game.judge(pictures(0)).values()).backward()
    assert all(parameter.grad is None for parameter in game.generator.parameters())
    assert all(parameter.grad is not None for parameter in game.critic.parameters())


def test_the_slope_comes_to_one():
    game = wgan_gp()
    game.penalty, game.rate = 10.0, 5e-3

    def penalty() -> float:
        batch = pictures(99)
        with noise.at(noise.Place(("test",), 0, BATCH, BATCH)):
            return losses.gradient_penalty(game.critic, batch["image"], batch["truth"]).item()

    game.double()
    before = penalty()
    trainer(PhaseStrategy("ddp"), 1, 40).fit(game, parts(40, batches=pictures))
    assert penalty() < 0.2 * before

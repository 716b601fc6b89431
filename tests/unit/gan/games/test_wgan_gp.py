"""What is particular to WGAN-GP; that it learns, shows and scores, and is the same on ranks: see test_games.py."""

import torch

from gan import losses, noise
from tests.ranks.test_games import pictures, wgan_gp
from tests.support.parity import BATCH


def test_the_losses_are_the_papers():
    game, batch, place = wgan_gp().double(), pictures(0), ("test",)
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
    sum(found.values()).backward()
    assert all(parameter.grad is None for parameter in game.generator.parameters())
    assert all(parameter.grad is not None for parameter in game.critic.parameters())

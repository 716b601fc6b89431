"""What is particular to StyleGAN; that it learns, shows, scores and is the same on all ranks: test_games.py."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from lightning import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from gan import losses, noise
from gan.games import stylegan as stylegan_game
from gan.games.stylegan import StyleGan, lazy_adam
from nets import stylegan as stylegan_nets
from nets.stylegan import StyleDiscriminator, StyleGenerator
from strategies import PhaseStrategy
from tests.ranks.test_games import pictures, stylegan, stylegan_ada
from tests.support.parity import BATCH, BROKEN, distance, equals, often, parts, share, snapshot, train, trainer
from tests.support.saved import read_checkpoint


def played(game: StyleGan, steps: int, world: int = 1, first: int = 0, **kwargs) -> dict:
    """Train on the same batches each time, in one world or another, from step `first` on."""
    rank = torch.distributed.get_rank() if world > 1 else 0
    batches = [share(pictures(step), rank, world) for step in range(first, steps)]
    seed_everything(11, verbose=False)
    strategy, path = PhaseStrategy("ddp", check=kwargs.pop("check", True)), kwargs.pop("ckpt_path", None)
    trainer(strategy, world, steps, **kwargs).fit(game, DataLoader(batches, batch_size=None), ckpt_path=path)
    return snapshot(game, strategy)


def test_penalties_are_turns_of_their_own():
    game, strategy = stylegan(), PhaseStrategy("ddp")
    trainer(strategy, 1, 9).fit(game, parts(9, batches=pictures))
    updates = {
        name: max(int(state["step"]) for state in policy.optimizer.state_dict()["state"].values())
        for name, policy in strategy.policies.items()
    }
    assert updates == {"generator": 9 + 3, "discriminator": 9 + 3}  # path in steps 0, 3, 6; R1 in steps 0, 4, 8
    assert [(phase.name, phase.every, phase.second_order) for phase in game.phases] == [
        ("generator", 1, False),
        ("path", 3, True),
        ("discriminator", 1, False),
        ("r1", 4, True),
    ]


@pytest.mark.parametrize(("every", "rate", "beta"), [(16, 2e-3 * 16 / 17, 0.99 ** (16 / 17)), (1, 1e-3, 0.99**0.5)])
def test_adam_is_corrected_for_lazy_penalties(every, rate, beta):
    (group,) = lazy_adam(2e-3, every)([torch.nn.Parameter(torch.zeros(1))]).param_groups
    assert group["lr"] == pytest.approx(rate)
    assert group["betas"] == (0.0, pytest.approx(beta))


def test_a_lazy_penalty_counts_as_often_as_it_is_left_out():
    game = stylegan().double()
    game.path_mean.fill_(0.7)
    batch = pictures(0)
    with noise.at(noise.Place(("test",), 0, BATCH, BATCH)):
        found = game.even(batch)["path"]
    with noise.at(noise.Place(("test",), 0, BATCH, BATCH)):
        lengths = losses.path_lengths(game.generator.styled, noise.randn((BATCH, 8), like=batch["image"]))
    torch.testing.assert_close(found, 3 * 2.0 * (lengths - 0.7).square().mean())
    slope = losses.r1(game.discriminator, batch["image"])[1]
    torch.testing.assert_close(game.flatten(batch)["r1"], 4 * 1.0 * slope)


def test_the_running_mean_follows_the_lengths_of_due_steps():
    game, means = stylegan(), []
    follow = game._follow
    game._follow = lambda: (follow(), means.append(game.path_mean.item()))
    played(game, 5)
    assert 0 < means[0] == means[1] == means[2] != means[3] == means[4]


def test_the_running_mean_is_that_of_the_whole_batch(ranks):
    """Once a due step, a hundredth of the mean length over all samples of all ranks."""
    expected = played(stylegan(), 1)["weight path_mean"]
    game = stylegan().double()
    seed_everything(11, verbose=False)
    game._follow = lambda: None
    played(game, 1)
    (own,) = game._lengths
    torch.testing.assert_close(expected, 0.01 * own)
    for state in ranks(2).run(played, stylegan(), 1, 2):
        torch.testing.assert_close(state["weight path_mean"], expected, rtol=1e-12, atol=0)


class Alone(StyleGan):
    """The control: each rank keeps a running mean of its own."""

    def all_gather(self, data, *args, **kwargs):
        return data


def alone() -> Alone:
    torch.manual_seed(0)
    return Alone(StyleGenerator(8, 8, (8, 8, 8), mapping=2), StyleDiscriminator((4, 4, 2)), r1_every=4, path_every=3)


def test_a_running_mean_of_each_ranks_own_is_another_training(ranks):
    one = train(alone, pictures, "single")
    two = ranks(2).run(train, alone, pictures, "ddp", world=2)
    assert min(distance(one, state) for state in two) > 1e-6
    assert two[0]["weight path_mean"] != two[1]["weight path_mean"]


@pytest.mark.parametrize(
    ("policy", "world"),
    often([("zero3", 2), ("zero2", 2), pytest.param("ddp", 4, marks=pytest.mark.slow)]),
)
def test_the_discriminator_compares_the_samples_of_all_ranks(policy, world, ranks):
    equals(ranks(world).run(train, stylegan, pictures, policy, world, 4), train(stylegan, pictures, "single", steps=4))


def own_samples():
    """The control: each rank compares its own samples."""
    with mock.patch.object(stylegan_nets.ranks, "gather", lambda rows, own: (rows, slice(0, len(rows)))):
        return train(stylegan, pictures, world=2, steps=4)


def test_the_control_that_compares_a_ranks_own_samples_differs(ranks):
    assert distance(ranks(2).run(own_samples)[0], train(stylegan, pictures, "single", steps=4)) > BROKEN


class Halves(StyleGan):
    """Every phase in two micro-batches. Only a discriminator that sees each picture alone is the same then."""

    def configure_phases(self):
        for phase in super().configure_phases():
            yield replace(phase, micro_batches=2)


def test_micro_batches_train_as_the_whole_does():
    found = []
    for kind in (StyleGan, Halves):
        torch.manual_seed(0)
        networks = StyleGenerator(8, 8, (8, 8, 8), mapping=2), StyleDiscriminator((4, 4, 2), group=1)
        found.append(played(kind(*networks, r1_every=4, path_every=2), 5))
    assert distance(*found) < 1e-10


def save_and_go_on(folder: str, world: int) -> dict:
    """Stop after four steps and go on for four more, from the file."""
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=4)
    played(stylegan(), 4, world, enable_checkpointing=True, callbacks=[saver])
    return played(stylegan(), 8, world, first=4, ckpt_path=f"{folder}/step=4.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_has_the_running_mean_and_equals_the_unbroken_one(world, ranks, tmp_path):
    unbroken = played(stylegan(), 8)
    folder = str(tmp_path)
    resumed = [save_and_go_on(folder, 1)] if world == 1 else ranks(2).run(save_and_go_on, folder, 2)
    saved = read_checkpoint(tmp_path / "step=4.ckpt")["state_dict"]["path_mean"]
    assert 0 < saved < unbroken["weight path_mean"]
    assert all(distance(unbroken, state) < 1e-10 for state in resumed)


# ---- adaptive augmentation ----


def ada_trained(world: int, steps: int = 6, first: int = 0, **kwargs) -> dict:
    game = stylegan_ada()
    game.ada.target, game.ada.images = 0.1, 128  # near the mean signs of these steps
    return played(game, steps, world, first, **kwargs)


@pytest.mark.promise("statistics kept by hand")
def test_the_probability_follows_the_scores_of_all_ranks(ranks):
    expected = ada_trained(1)
    assert 0 < expected["weight ada.p"] < 1
    for found in ranks(2).run(ada_trained, 2):
        assert found["weight ada.p"] == expected["weight ada.p"]


def own_signs() -> float:
    """The control: each rank counts the signs of its own scores."""
    with mock.patch.object(stylegan_game.ranks, "sum", lambda values: values):
        return ada_trained(2, check=False)["weight ada.p"].item()


@pytest.mark.promise("statistics kept by hand")
def test_the_control_that_asks_no_other_rank_adjusts_otherwise(ranks):
    assert ada_trained(1)["weight ada.p"].item() not in ranks(2).run(own_signs)


def test_a_resumed_run_has_the_probability(tmp_path):
    unbroken = ada_trained(1)
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=3)
    ada_trained(1, 3, enable_checkpointing=True, callbacks=[saver])
    assert distance(ada_trained(1, 6, 3, ckpt_path=str(tmp_path / "step=3.ckpt")), unbroken) == 0


def test_lengths_that_are_not_finite_leave_the_running_mean_alone():
    game = stylegan()
    game.path_mean.fill_(0.5)
    game.all_gather = lambda mean: mean
    for length, mean in ((float("nan"), 0.5), (float("inf"), 0.5), (1.5, 0.51)):
        game._lengths.append(torch.tensor(length))
        game._follow()
        assert game.path_mean.item() == pytest.approx(mean)
        assert game._lengths == []

"""ddp: the same training as one device, only the learners' bytes, and reduction during backward."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Adam

from gan import GanModule, Phase, Player
from strategies import ranks_strategy
from strategies.world import Groups
from tests.support.hard_games import HARD, Micro2, Micro4, Plain, SometimesReached, Teacher, TwoPhases
from tests.support.parity import BROKEN, EXACT, STEPS, distance, in_buckets, often, parts, train, trainer, vectors
from tests.support.watch import WatchedStrategy, moved, operations, sizes_of


@pytest.mark.parametrize("name", often(HARD, ["Plain", "Micro4", "BatchNormPenalty", "SometimesReached", "Teacher"]))
def test_parity(name, ranks, hard_alone):
    """The check says nothing of two games that test_check.py does not have."""
    check = name in ("BatchNormPenalty", "SometimesReached")
    one, other = ranks(2).run(train, HARD[name], world=2, check=check)
    assert distance(one, hard_alone(name)) < EXACT
    assert distance(one, other) == 0  # replicas do not drift


@pytest.mark.parametrize("name", often(HARD, ["Plain"]))
def test_control_without_synchronisation_differs(name, ranks, hard_alone):
    result = ranks(2).run(train, HARD[name], policy="deaf", world=2)[0]
    assert distance(result, hard_alone(name)) > BROKEN


@pytest.mark.parametrize("name", ["BatchNorms", "BatchNormPenalty"])
def test_control_with_batch_norm_of_each_rank_differs(name, ranks, hard_alone):
    result = ranks(2).run(train, HARD[name], world=2, sync_batchnorm=False)[0]
    assert distance(result, hard_alone(name)) > BROKEN


def test_micro_batches_change_nothing_where_the_loss_is_a_mean_over_samples(hard_alone):
    assert distance(hard_alone("Micro2"), hard_alone("Plain")) < EXACT
    assert distance(hard_alone("Micro4"), hard_alone("Plain")) < EXACT


def test_one_device_equals_a_loop_in_plain_torch(hard_alone):
    game = Plain().double()
    generator = Adam(game.generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    discriminator = Adam(game.discriminator.parameters(), lr=2e-2)
    decay = torch.optim.lr_scheduler.LambdaLR(generator, lambda update: 0.9**update)
    average = [weight.detach().clone() for weight in game.generator.parameters()]
    noises = iter(_recorded_noise())
    for step in range(STEPS):
        real = vectors(step)["x"]
        fake = game.generator(next(noises)).detach()
        loss = nn.functional.softplus(game.discriminator(fake)).mean()
        loss = loss + nn.functional.softplus(-game.discriminator(real)).mean()
        discriminator.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(game.discriminator.parameters(), Plain.clip)
        discriminator.step()
        generator.zero_grad()
        nn.functional.softplus(-game.discriminator(game.generator(next(noises)))).mean().backward()
        nn.utils.clip_grad_norm_(game.generator.parameters(), Plain.clip)
        generator.step()
        decay.step()
        for mean, weight in zip(average, game.generator.parameters(), strict=True):
            mean.mul_(0.8).add_(weight.detach(), alpha=0.2)
    ours = hard_alone("Plain")
    for name, weight in game.named_parameters():
        assert (ours[f"weight {name}"] - weight).abs().max() < EXACT
    for (name, _), mean in zip(game.generator.named_parameters(), average, strict=True):
        assert (ours[f"ema generator.{name}"] - mean).abs().max() < EXACT


def _recorded_noise():
    """The noise that the strategy's training draws, by listening in."""
    drawn = []

    class Listening(Plain):
        def fake(self, real):
            hook = self.generator.register_forward_pre_hook(lambda _, inputs: drawn.append(inputs[0].clone()))
            try:
                return super().fake(real)
            finally:
                hook.remove()

    train(Listening, policy="single")
    return drawn


# ---- bytes ----


@pytest.mark.parametrize("game", [Plain, Micro2, Micro4, Teacher])
def test_a_phase_moves_exactly_its_learners_gradients(game, ranks):
    found, sizes = ranks(2).run(moved, game, "ddp", 2, 4)[0], sizes_of(game)
    assert [phase for _, phase, _ in found] == ["discriminator", "generator"] * 4
    for step, phase, collectives in found:
        if step == 1:
            continue  # the reducer agrees once, in its second backward, on the order in which it saw gradients
        assert collectives == [("allreduce_", sizes[phase])]


def test_a_phase_with_two_learners_moves_both_and_asks_once_for_what_was_not_reached(ranks):
    sizes = sizes_of(TwoPhases)
    for step, phase, collectives in ranks(2).run(moved, TwoPhases, "ddp", 2, 4)[0]:
        if step == 2:
            gradients = [size for name, size in collectives if size > 8 * 7]
            questions = [size for name, size in collectives if size <= 8 * 7]
            everything = sizes["discriminator"] + (sizes["generator"] if phase == "both" else 0)
            assert sum(gradients) == everything
            # One head of the discriminator is out of reach in the phases of the other: a byte for each of six weights.
            assert questions == ([] if phase == "both" else [6])


# ---- reduction during backward ----


class Wide(GanModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())])

    def configure_players(self):
        yield Player("net", self.net, partial(Adam, lr=1e-3))

    def configure_phases(self):
        yield Phase("net", self.loss, "net", micro_batches=2)

    def loss(self, batch):
        return self.net(batch["x"].repeat(1, 43)[:, :256]).square().mean()


@pytest.mark.parametrize(
    ("policy", "collective"),
    [("ddp", "c10d.allreduce"), *((zero, "c10d._reduce_scatter") for zero in ("zero2", "zero3"))],
)
def test_reduction_starts_before_backward_has_ended(policy, collective, ranks):
    names = ranks(2).run(in_buckets, 2 * 8 * 256 * 256, operations, Wide, policy, 2, 3)[0]
    reductions = [number for number, name in enumerate(names) if name.startswith(collective)]
    slopes = [number for number, name in enumerate(names) if name.startswith("aten.tanh_backward")]
    assert len(reductions) > 1
    assert reductions[0] < slopes[-1]  # gradients are still computed after the first bucket has left
    assert reductions[0] > slopes[len(slopes) // 2 - 1]  # and none leaves in the first micro-batch


# ---- weights that the loss did not reach ----


def gradients_after(world):
    """Which weights of SometimesReached were updated how often."""
    module, strategy = SometimesReached(), WatchedStrategy("ddp", check=False)
    trainer(strategy, world, STEPS).fit(module, parts(STEPS, world))
    state = strategy.policies["discriminator"].optimizer.state_dict()["state"]
    return {number: int(entry["step"]) for number, entry in state.items()}


def test_a_weight_out_of_reach_is_skipped_as_in_plain_torch(ranks):
    expected = gradients_after(1)
    assert set(expected.values()) != {STEPS}  # some were reached in some steps only
    assert len(expected) < len(list(SometimesReached().discriminator.parameters()))  # and some never
    for counts in ranks(4).run(gradients_after, 4):
        assert counts == expected


# ---- process groups ----


class Crossed(Plain):
    """Both learn in one phase, and backward reaches them in the one order on even ranks, in the other on odd ones."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = nn.Linear(6, 6), nn.Linear(6, 6)

    def configure_phases(self):
        yield Phase("both", self.play, ["generator", "discriminator"])

    def play(self, batch):
        order = [self.generator, self.discriminator]
        if self.trainer.global_rank % 2:
            order.reverse()
        losses = {net: net(batch["x"]).square().mean() for net in order}  # backward takes the last one first
        return losses[self.generator] + 3 * losses[self.discriminator]


class OneGroup(Groups):
    def shared(self, player):
        return super().shared("everybody")


def crossed(policy, kind):
    with mock.patch.object(ranks_strategy, "Groups", kind):
        return train(Crossed, policy=policy, world=2)


@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero2"])
def test_two_that_learn_together_keep_to_themselves_in_whatever_order_backward_reaches_them(policy, ranks):
    """The control has one process group for both: the one's gradients are averaged with the other's."""
    alone = train(Crossed)
    assert distance(ranks(2).run(crossed, policy, Groups)[0], alone) < EXACT
    assert distance(ranks(2).run(crossed, policy, OneGroup)[0], alone) > BROKEN

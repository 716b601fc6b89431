"""Player(follows=...): a teacher that is the moving average of another player, as a deep copy in a loop by hand."""

import copy
from typing import ClassVar
from unittest import mock

import pytest
import torch

from gan import Phase, Player
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.policies.modes import Follower
from tests.ranks.test_after import AfterByHand, rewrite, with_constants
from tests.ranks.test_counting import warm
from tests.support.duel import ENGINES, POLICIES, Duel, fit, fooling, judging, of, played
from tests.support.parity import BROKEN, EXACT, STEPS, distance, often, parts, trainer
from tests.support.saved import read_checkpoint


class Following(Duel):
    """Both networks have one that follows; it stands before or behind the other, and both take part in the losses."""

    of_judge: ClassVar = {"after": rewrite}

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.judge, self.teacher, self.slow = with_constants(), with_constants(), copy.deepcopy(self.generator)

    def configure_players(self):
        yield Player("teacher", self.teacher, follows="judge", ema=warm)
        yield from super().configure_players()
        yield Player("slow", self.slow, follows="generator", ema=0.8, ema_per="step")

    def configure_phases(self):
        yield Phase("judge", self.judging, "judge")
        yield Phase("fool", self.fooling, "generator", every=2)
        yield Phase("again", self.judging, "judge", every=3)

    def score(self, x):
        return scored(self.judge, x)

    def judging(self, batch):
        return taught_to_judge(self, batch["x"])

    def fooling(self, batch):
        return taught_to_fool(self, batch["x"])


def scored(net, x):
    return net["head"](torch.tanh(net["trunk"](x) * net.scale + net.offset))


def taught_to_judge(nets, x):
    return judging(nets.score, nets.slow, x) + (nets.score(x) - scored(nets.teacher, x)).square().mean()


def taught_to_fool(nets, x):
    return fooling(nets.score, nets.generator, x) + scored(nets.teacher, nets.generator(x[:, :4])).square().mean()


class FollowingByHand(AfterByHand):
    moves = True

    def __init__(self):
        super().__init__()
        self.teacher, self.slow = copy.deepcopy(self.judge), copy.deepcopy(self.generator)
        self.networks |= {"teacher": self.teacher, "slow": self.slow}
        self.updates = 0

    def losses(self, turn):
        taught = taught_to_fool if turn == "fool" else taught_to_judge
        return lambda score, generator, x: taught(self, x)

    def due(self, turn, step):
        return turn == "judge" or step % (2 if turn == "fool" else 3) == 0

    def updated(self, name):
        if name == "judge":
            rewrite(self.judge)
            self.follow(self.teacher, self.judge, warm(self.updates))
            self.updates += 1

    def after(self, step):
        self.follow(self.slow, self.generator, 0.8)

    def follow(self, average, net, decay):
        if not self.moves:
            return
        for own, weight in zip(average.parameters(), net.parameters(), strict=True):
            own.mul_(decay).add_(weight, alpha=1 - decay)
        for own, buffer in zip(average.buffers(), net.buffers(), strict=True):
            own.copy_(buffer)


@pytest.fixture(scope="module")
def by_hand():
    return FollowingByHand().run()


MORE = {"zero1+offload": 2, "zero2+hybrid:2": 4, "zero3+offload": 4, "judge=zero3,*=ddp": 2, "judge=ddp,*=zero3": 2}
WORLDS = often({**POLICIES, **MORE, **ENGINES}.items())


@pytest.mark.parametrize(("policy", "world"), WORLDS)
def test_a_teacher_follows_as_by_hand(policy, world, ranks, by_hand):
    assert distance(of(played(ranks, Following, policy, world), by_hand), by_hand) < EXACT


def forgetting(policy, world):
    with mock.patch.object(Follower, "update", lambda self: None):
        return fit(Following, policy, world)


def test_the_control_a_teacher_that_stays_as_it_was_is_another_training(ranks, by_hand):
    still = type("Still", (FollowingByHand,), {"moves": False})().run()
    assert distance(still, by_hand) > BROKEN
    for policy in ("ddp", "zero3"):
        found = ranks(2).run(forgetting, policy, 2)[0]
        assert distance(of(found, still), still) < EXACT
        assert distance(of(found, by_hand), by_hand) > BROKEN


# ---- saved and resumed ----

HALF = 5


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "world"), [("single", 1), ("zero3", 2)])
def test_it_is_resumed_bit_for_bit(policy, world, ranks, tmp_path):
    unbroken = played(ranks, Following, policy, world)
    played(ranks, Following, policy, world, steps=HALF, save=str(tmp_path / "half.ckpt"))
    assert distance(played(ranks, Following, policy, world, resume=str(tmp_path / "half.ckpt")), unbroken) == 0


@pytest.mark.slow
def test_it_travels_between_policies(ranks, by_hand, tmp_path):
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    played(ranks, Following, "zero3", 2, steps=3, save=first)
    played(ranks, Following, "ddp", 2, steps=HALF, resume=first, save=second)
    saved = read_checkpoint(second)["players"]
    assert [saved[name]["ema_updates"] for name in ("teacher", "slow", "judge")] == [HALF + 2, HALF, 0]
    arrived = played(ranks, Following, "zero3", 4, resume=second, steps=STEPS)
    assert distance(of(arrived, by_hand), by_hand) < EXACT


# ---- what it is under ----


def test_it_begins_as_a_copy_and_learns_nothing():
    class Looking(Following):
        def on_train_start(self):
            for own, other in ((self.teacher, self.judge), (self.slow, self.generator)):
                for key, value in other.state_dict().items():
                    assert torch.equal(own.state_dict()[key], value)
            assert not self.teacher.training

        def judging(self, batch):
            assert not any(weight.requires_grad for weight in self.teacher.parameters())
            return super().judging(batch)

    game = Looking()
    with torch.no_grad():
        game.teacher["head"].weight.zero_()
    made = trainer(PhaseStrategy("single"), 1, 2)
    made.fit(game, parts(2))
    assert made.strategy.policies["teacher"].optimizer is None


def test_another_policy_than_that_of_the_followed_is_refused():
    with pytest.raises(
        UserError, match="player 'teacher' follows 'judge', so it has the same policy; leave 'teacher='"
    ):
        fit(Following, "teacher=ddp,*=single", 1)
    fit(Following, "judge=ddp,teacher=ddp,*=single", 1, steps=1)
    fit(Following, "judge=ddp,generator=single", 1, steps=1)


def test_auto_counts_it_with_the_followed(capsys):
    fit(Following, "auto", 1, steps=1)
    told = capsys.readouterr().out
    assert "judge" in told and "teacher" not in told

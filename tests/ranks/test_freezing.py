"""Parts of a player that do not learn in some steps: by Player(freeze=...), and by their author's requires_grad."""

from typing import ClassVar
from unittest import mock

import pytest
from lightning import Callback

from gan.files.errors import UserError
from strategies.policies.belongings import Switch
from tests.support.duel import ENGINES, POLICIES, ByHand, Duel, fit, of, played
from tests.support.parity import BROKEN, EXACT, distance, often

# The trunk learns in steps 0 to 2, and from step 6 on again; the generator's last layer from step 4 on.
THAWED = [0, 1, 2, 6, 7, 8, 9]


class Freezing(Duel):
    of_judge: ClassVar = {"freeze": lambda step: [] if step in THAWED else ["trunk"], "clip": 0.05}
    of_generator: ClassVar = {"freeze": lambda step: "2" if step < 4 else ()}


class ByAuthor(Duel):
    """The same, written as in plain torch: on the networks, between steps."""

    of_judge: ClassVar = {"clip": 0.05}

    def on_train_batch_start(self, batch, index):
        if index in (3, 6):
            self.judge["trunk"].requires_grad_(index == 6)
        if index in (0, 4):
            self.generator[2].requires_grad_(index == 4)


class InTheLoss(Freezing):
    """A loss that freezes what it does not train, as in many a loop, and what it freezes for good."""

    of_judge: ClassVar = {"clip": 0.05}

    def judging(self, batch):
        self.generator.requires_grad_(False)
        self.judge["trunk"].requires_grad_(self.step in THAWED)
        return super().judging(batch)

    def fooling(self, batch):
        self.generator.requires_grad_(True)
        self.generator[2].requires_grad_(self.step >= 4)
        self.judge.requires_grad_(False)
        self.judge["head"].requires_grad_(True)
        return super().fooling(batch)


class FreezingByHand(ByHand):
    clip: ClassVar = {"judge": 0.05}

    def before(self, step):
        self.judge["trunk"].requires_grad_(step in THAWED)
        self.generator[2].requires_grad_(step >= 4)


class Never(FreezingByHand):
    def before(self, step):
        pass


@pytest.fixture(scope="module")
def by_hand():
    return FreezingByHand().run()


WORLDS = often({**POLICIES, **ENGINES}.items())


@pytest.mark.promise("`requires_grad_` on a part of a player", "the training of one device, or a refusal by name")
@pytest.mark.parametrize("game", [Freezing, ByAuthor, InTheLoss])
@pytest.mark.parametrize(("policy", "world"), WORLDS)
def test_what_is_frozen_gets_no_update_and_learns_again_when_it_is_thawed(game, policy, world, ranks, by_hand):
    assert distance(of(played(ranks, game, policy, world), by_hand), by_hand) < EXACT


def test_the_control_by_hand_without_freezing_is_another_training(by_hand):
    other = Never().run()
    assert distance(of(other, by_hand), by_hand) > BROKEN


def undone(self, on):
    """As if every turn let all weights learn."""
    self.on = on
    for weight in self.weights:
        weight.requires_grad_(on)


def without(game, policy, world):
    with mock.patch.object(Switch, "begin_step", lambda *_: None), mock.patch.object(Switch, "turn", undone):
        return fit(game, policy, world)


@pytest.mark.promise("`requires_grad_` on a part of a player")
@pytest.mark.parametrize("game", [Freezing, ByAuthor])
def test_the_control_where_a_turn_undoes_it_is_another_training(game, ranks, by_hand):
    assert distance(of(without(game, "single", 1), by_hand), by_hand) > BROKEN
    assert distance(of(ranks(2).run(without, game, "ddp", 2)[0], by_hand), by_hand) > BROKEN


class Flags(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append({name for name, weight in module.named_parameters() if not weight.requires_grad})


@pytest.mark.parametrize("policy", ["single", "zero3"])
def test_between_steps_requires_grad_is_the_authors(policy, ranks):
    """Those that freeze names require gradients again, and those that the author has frozen do not."""
    for game, frozen in ((Freezing, set()), (ByAuthor, {"judge.trunk"})):
        seen = seen_flags(game, policy, 2) if policy != "zero3" else ranks(2).run(seen_flags, game, policy, 2)[0]
        assert {name.rpartition(".")[0].rpartition(".")[0] for name in seen} == frozen


def seen_flags(game, policy, world):
    flags = Flags()
    fit(game, policy, 1 if policy == "single" else world, 5, callbacks=[flags])
    return flags.seen[-1]


class Thawing(Duel):
    def __init__(self):
        super().__init__()
        self.judge["trunk"].requires_grad_(False)

    def on_train_batch_start(self, batch, index):
        if index == 2:
            self.judge["trunk"].requires_grad_(True)


class Misspelt(Duel):
    of_judge: ClassVar = {"freeze": lambda step: ["trnk"] if step == 3 else []}


class Everything(Duel):
    of_judge: ClassVar = {"freeze": lambda step: [""]}


@pytest.mark.parametrize(
    ("game", "message"),
    [
        (Thawing, r"player 'judge': weight 'trunk.0.weight' requires a gradient at step 2, .* Player\(freeze="),
        (
            Misspelt,
            "player 'judge': freeze names 'trnk' at step 3, and its ModuleDict has no such module; known are tr",
        ),
        (Everything, "phase 'judge': its loss depends on no weight of judge; is something detached, frozen"),
    ],
)
def test_what_cannot_learn_is_refused_by_name(game, message):
    with pytest.raises(UserError, match=message):
        fit(game, "single", 1)

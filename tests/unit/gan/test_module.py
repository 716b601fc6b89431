"""GanModule: assembling a game, sharing what phases have in common."""

import pytest
import torch

from gan import GanModule
from gan.files.errors import UserError
from strategies import PhaseStrategy
from tests.support.hard_games import Plain, Teacher
from tests.support.parity import distance, parts, train, trainer


def test_a_game_without_players_or_phases_says_what_to_write():
    with pytest.raises(UserError, match=r"Mine has no configure_players\(\); yield a Player"):
        type("Mine", (GanModule,), {})().assemble()
    with pytest.raises(UserError, match=r"Mine has no configure_phases\(\)"):
        type("Mine", (GanModule,), {"configure_players": lambda self: []})().assemble()


def test_an_authors_own_mistake_keeps_its_own_message():
    class Misspelt(Plain):
        def configure_players(self):
            return [self.generatr]

    with pytest.raises(AttributeError, match="generatr"):
        Misspelt().assemble()


def test_alone_a_game_is_an_ordinary_module():
    game = Plain()
    assert game.step == 0
    with game.averaged():
        assert game.shared("x", lambda: 3) == 3
    assert game.shared("x", lambda: 4) == 3
    game.forget_shared()
    assert game.shared("x", lambda: 4) == 4


class Counting(Teacher):
    made = 0

    def fake(self, real):
        Counting.made += 1
        return super().fake(real)


class CountingMicro(Counting):
    micro_batches = 4


@pytest.mark.parametrize(("game", "calls"), [(Counting, 1), (CountingMicro, 4)])
def test_a_shared_fake_is_made_once_a_step_and_micro_batch(game, calls):
    Counting.made = 0
    train(game, policy="single", steps=3)
    assert Counting.made == 3 * calls


def test_a_shared_fake_gives_the_generator_the_gradient_of_its_own_forward():
    class Twice(Teacher):
        def fool(self, batch):
            self.forget_shared()  # the fake is made again, from the same noise and the same generator
            return super().fool(batch)

        def fake(self, real):
            return self.generator(real[:, :4])

    class Once(Twice):
        def fool(self, batch):
            return Teacher.fool(self, batch)

    assert distance(train(Once, policy="single"), train(Twice, policy="single")) < 1e-12


def test_sharing_leaves_only_the_learners_requiring_gradients():
    flags = []

    class Looking(Teacher):
        def judge(self, batch):
            loss = super().judge(batch)
            flags.append({name: next(p.module.parameters()).requires_grad for name, p in self.players.items()})
            return loss

    train(Looking, policy="single", steps=1)
    assert flags == [{"generator": False, "discriminator": True, "teacher": False}]


def test_a_frozen_player_changes_in_nothing_not_even_its_statistics():
    game = Teacher()
    before = {name: value.clone() for name, value in game.teacher.state_dict().items()}
    trainer(PhaseStrategy("single"), 1, 3).fit(game, parts(3))
    assert all(
        torch.equal(value.to(before[name].dtype), before[name]) for name, value in game.teacher.state_dict().items()
    )

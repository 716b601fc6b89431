"""Which player stores a parameter, and which modules read it."""

from torch import nn

from gan import Player
from strategies.policies.belongings import belongings_of
from tests.support.hard_games import Plain
from tests.support.sharing_games import Adapters, OneModule, SharedBase


def of(game):
    players = {player.name: player for player in game.configure_players()}
    return belongings_of(players, game)


def names(game, modules):
    known = {module: name for name, module in game.named_modules()}
    return {known.get(module, type(module).__name__) for module in modules}


def test_a_player_that_shares_nothing_is_read_through_its_network_and_what_is_around_it():
    game = Plain()
    found = of(game)
    assert list(found["generator"].parameters) == [name for name, _ in game.generator.named_parameters()]
    assert names(game, found["generator"].readers) == {"", "generator", "generator.0", "generator.1", "generator.2"}


def test_a_list_of_adapters_is_read_through_the_layers_that_have_them():
    game = Adapters()
    found = of(game)
    layers = {f"base.{layer}" for layer in ("first", "second", "third")}
    holding = {"", "base", *layers, *(f"{layer}.down" for layer in layers)}
    assert names(game, found["student"].readers) == {*holding, "ParameterList"}
    assert names(game, found["fake"].readers) == {*holding, "ParameterDict"}
    assert {id(weight) for weight in found["teacher"].parameters.values()} == set(map(id, game.base.own()))


def test_a_shared_base_is_read_through_every_network_that_has_it():
    game = SharedBase()
    found = of(game)
    readers = names(game, found["student"].readers)
    assert {"student.2.layer", "fake.2.layer", "teacher.2", "teacher", "fake", ""} <= readers
    assert not {"fake.2.up", "fake.2.down"} & readers
    assert found["teacher"].parameters == {}


def test_modules_that_a_learner_has_keep_their_mode():
    game = OneModule()
    assert of(game)["teacher"].kept == tuple(game.base.modules())
    assert of(SharedBase())["teacher"].kept == ()
    net = nn.Linear(1, 1)
    players = {name: Player(name, net) for name in ("one", "two")}
    assert belongings_of(players, net)["two"].kept == ()

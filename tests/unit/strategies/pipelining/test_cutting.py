"""Where a network is cut."""

import pytest
from torch import nn

from gan import Player
from gan.files.errors import UserError
from strategies.pipelining.cutting import cut, most_stages, networks_of, units_of
from tests.support.staged_games import Tower


def units(module, **kwargs):
    return units_of(Player("net", module, **kwargs), "", module)


def names(module, **kwargs):
    return [unit.name for unit in units(module, **kwargs)]


def test_blocks_and_layers_outside_of_them_are_units():
    assert names(Tower()) == ["start", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "end"]


def test_a_sequential_is_cut_between_its_layers():
    assert names(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))) == [
        "0",
        "2.0",
        "2.1",
    ]


def test_every_parameter_of_a_unit_has_its_name_in_the_player():
    found = units(Tower())
    assert set(found[0].parameters) == {"start.weight", "start.bias"}
    inside = {name for unit in found for name in unit.parameters}
    assert {name for name, _ in Tower().named_parameters()} - inside == {"scale"}


def test_a_stage_begins_with_a_named_block():
    found = units(Tower(), blocks=["blocks.1", "blocks.3"])
    assert [unit.name for unit in found if unit.cuttable] == ["blocks.1", "blocks.3"]
    assert most_stages(found) == 3
    by_name = {unit.name: unit.stage for unit in cut(found, 3)}
    assert by_name == {"start": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 2, "end": 2}


def test_named_blocks_come_in_the_order_of_their_names():
    assert names(Tower(), blocks=["blocks.2", "blocks.0"]) == [
        "start",
        "blocks.2",
        "blocks.3",
        "end",
        "blocks.0",
        "blocks.1",
    ]


@pytest.mark.parametrize(
    ("sizes", "stages", "expected"),
    [
        ([1, 1, 1, 1], 2, [0, 0, 1, 1]),
        ([9, 1, 1, 1], 2, [0, 1, 1, 1]),
        ([1, 1, 1, 9], 2, [0, 0, 0, 1]),
        ([5, 5, 5], 3, [0, 1, 2]),
        ([1, 9, 1, 1, 1], 3, [0, 1, 2, 2, 2]),
        ([8, 1, 1, 1], 4, [0, 1, 2, 3]),
        ([1, 1, 1, 8], 4, [0, 1, 2, 3]),
    ],
)
def test_the_largest_stage_is_as_small_as_can_be(sizes, stages, expected):
    found = units(nn.Sequential(*(nn.Linear(10, 10 * size, bias=False) for size in sizes)))
    assert [unit.stage for unit in cut(found, stages)] == expected


def test_tied_weights_are_refused_by_name():
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    with pytest.raises(UserError, match=r"weight '0.weight' is in '0' and in '1'"):
        units(nn.Sequential(one, other))


def test_networks_in_a_dict_are_cut_one_by_one():
    player = Player("nets", nn.ModuleDict({"a": Tower(), "b": nn.ModuleList([nn.Linear(2, 2)])}))
    assert list(networks_of(player)) == ["a", "b.0"]
    assert units_of(player, "a", player.module["a"])[0].name == "a.start"


def test_a_network_that_cannot_be_called_is_refused():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Linear(2, 2)

    with pytest.raises(UserError, match="a Heads has no forward; type --strategy net=zero3"):
        networks_of(Player("net", Heads()))

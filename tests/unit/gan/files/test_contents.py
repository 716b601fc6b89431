"""Parts of a checkpoint that are of another kind are named by their place."""

import pytest
import torch

from gan.files.contents import TRAINING, alike, check_kinds, need, numbers
from gan.files.errors import Damaged

GOOD = {
    "game": "Plain",
    "global_step": 3,
    "players": {"net": {"ema": None, "loss_scale": {"scale": 1.0}, "skipped": 0}},
    "left_out": {"net.weight": (torch.float32, 7)},
    "files": {"teacher": {"path": "x", "sha256": "y", "names": []}},
    "mine": object(),
}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"game": 3}, "'game' is not of kind str"),
        ({"global_step": "3"}, "'global_step' is not of kind int"),
        ({"state_dict": []}, "'state_dict' is not of kind dict"),
        ({"players": {"net": 3}}, "'players/net' is not of kind dict"),
        ({"players": {"net": {"ema": 3}}}, "'players/net/ema' is not of kind dict or NoneType"),
        ({"players": {"net": {"skipped": None}}}, "'players/net/skipped' is not of kind int"),
        ({"left_out": {"net.weight": 7}}, "'left_out/net.weight' is not of kind tuple"),
        ({"left_out": {"net.weight": (7,)}}, "'left_out/net.weight/0' is not of kind dtype"),
        ({"left_out": {"net.weight": (torch.float32,)}}, "it has no 'left_out/net.weight/1'"),
        ({"players": {"net": {"ema": None}, "other": None}}, "'players/other' is not of kind dict"),
        (
            {"optimizer_states": [{"state": {}, "param_groups": [{}]}]},
            "it has no 'optimizer_states/0/param_groups/0/params'",
        ),
        ({"random_states": [{}, 3]}, "'random_states/1' is not of kind dict"),
        ({"files": {"teacher": {"path": "x", "names": []}}}, "it has no 'files/teacher/sha256'"),
    ],
)
def test_what_is_of_another_kind_is_named(part, message):
    check_kinds(GOOD)
    check_kinds({})
    with pytest.raises(Damaged, match=f"values.json is damaged: {message}"):
        check_kinds(GOOD | part)


def test_what_a_training_needs_must_be_there():
    with pytest.raises(Damaged, match="it has no 'state_dict'"):
        check_kinds(GOOD, TRAINING)
    with pytest.raises(Damaged, match="it has no 'loops/fit_loop'"):
        check_kinds({name: {} for name in ("state_dict", "players", "callbacks", "loops")}, TRAINING)


def test_what_is_needed_and_not_there_is_named():
    assert need({"a": 1}, "a", int) == 1
    with pytest.raises(Damaged, match=r"it has no 'x/b'"):
        need({"a": 1}, "b", int, "x/")


OWN = {"count": 0, "on": False, "word": "a", "list": [1], "inside": {"x": 0.5}, "none": None}


def test_what_a_training_has_itself_is_what_it_takes():
    alike(OWN, {"count": 2.5, "on": True, "word": "b", "list": (), "inside": {"x": 1, "more": 3}, "none": {}}, "own")
    alike(OWN, {}, "own")
    for part, message in (
        ({"count": "0"}, "'own/count' is not a number"),
        ({"word": 3}, "'own/word' is not a text"),
        ({"list": {}}, "'own/list' is not a list"),
        ({"inside": 3}, "'own/inside' is not a dict"),
        ({"inside": {"x": None}}, "'own/inside/x' is not a number"),
    ):
        with pytest.raises(Damaged, match=message):
            alike(OWN, part, "own")
    with pytest.raises(Damaged, match="it has no 'own/inside/x'"):
        alike(OWN, OWN | {"inside": {}}, "own", whole=True)
    with pytest.raises(Damaged, match="'wrote' is not made of numbers"):
        numbers([1, "2"], "wrote")

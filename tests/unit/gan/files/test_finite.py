"""Weights that are not finite are found, with what is in them."""

import pytest
import torch
from torch import nn

from gan.files.finite import as_made, named, not_finite, of_players
from tests.ranks.test_checkpoints import Memory

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_of_any_kind_is_found(kind, value):
    good = torch.ones(3, 1000).to(kind)
    tensors = {"good": good, "bad": torch.ones(3, 1000)}
    tensors["bad"][1, 999] = value
    tensors["bad"] = tensors["bad"].to(kind)
    assert not_finite(tensors) == {"bad": "NaN" if value != value else "infinity"}


def test_what_has_no_such_numbers_is_fine():
    largest = torch.tensor([torch.finfo(torch.float64).max, torch.finfo(torch.float64).min], dtype=torch.float64)
    tensors = {"largest": largest, "none": torch.zeros(0), "whole": torch.arange(3), "so": torch.tensor(True)}
    tensors["elsewhere"] = torch.full((2,), torch.nan, device="meta")
    assert not_finite(tensors) == {} == not_finite({})


def test_nothing_is_copied():
    tensors = {str(number): torch.ones(1000, 1000).t() for number in range(3)}
    with Memory() as memory:
        assert not_finite(tensors) == {}
    assert memory.made < 1000


class Masked(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("mean", torch.zeros(2))


def test_infinities_that_the_constructor_made_are_meant():
    module = Masked()
    meant = {"net": as_made(module)}
    assert meant == {"net": {"mask"}}
    assert of_players([("net", module)], meant) == []
    module.mean[1] = torch.inf
    assert of_players([("net", module)], meant) == [("net", "mean", "infinity")]
    with torch.no_grad():
        module.weight[0, 0] = torch.nan
    assert named(of_players([("net", module)], meant)) == (
        "'weight' of player 'net', and 1 more tensors have NaN or infinity"
    )
    with torch.device("meta"):
        assert as_made(Masked()) == {"mask", "mean"}  # nobody knows

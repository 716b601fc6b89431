"""Splitting batches."""

import pytest
import torch

from gan.errors import UserError
from strategies.micro_batches import rows, split_batch


def test_tensors_and_lists_are_split_and_constants_shared():
    batch = {
        "x": torch.arange(4),
        "pair": (torch.arange(8).reshape(4, 2), 5),
        "names": list("abcd"),
        "scale": torch.tensor(2.0),
    }
    first, second = split_batch(batch, 2, "phase")
    assert first["x"].tolist() == [0, 1]
    assert second["pair"][0].tolist() == [[4, 5], [6, 7]]
    assert second["names"] == ["c", "d"]
    assert first["scale"] == second["scale"] == 2
    assert second["pair"][1] == 5


def test_one_part_is_the_batch_itself():
    batch = {"x": torch.arange(3)}
    assert split_batch(batch, 1, "phase")[0] is batch


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="phase 'fool': a rank's batch of 5 does not divide into 2 micro-batches"):
        split_batch(torch.zeros(5, 3), 2, "fool")


def test_rows_is_the_length_of_the_first_tensor():
    assert rows((torch.tensor(1.0), torch.zeros(7, 2))) == 7
    with pytest.raises(UserError, match="no tensor with a batch dimension"):
        rows({"name": "a"})

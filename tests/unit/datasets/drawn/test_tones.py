"""Drawn sounds."""

import pytest
import torch

from datasets import Tones
from gan.files.errors import UserError


def test_a_clip_is_the_same_in_every_set():
    one, other = Tones(8, 1024, seed=3), Tones(2, 1024, seed=3, first=5)
    for k in range(2):
        assert torch.equal(one[5 + k]["wave"], other[k]["wave"])
    assert torch.equal(one[-1]["wave"], one[7]["wave"])
    assert [other.clip(k) for k in range(2)] == [5, 6]
    assert len(one) == 8
    with pytest.raises(IndexError, match="outside of 2 clips"):
        other[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(length=0), "there are no 0 clips of 4096 samples; try 1000 clips"),
        (dict(length=2**63), "there are no 9223372036854775808 clips of 4096 samples"),
        (dict(length=1, samples=0), "there are no 1 clips of 0 samples; try 1000 clips of 4096 samples"),
        (dict(length=1, rate=2000), "need a rate of 4000 or more, not 2000"),
    ],
)
def test_what_cannot_be_drawn_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Tones(**settings)

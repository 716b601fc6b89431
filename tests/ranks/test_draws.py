"""What is said of draws; that they are those of one device: tests/scenes/draws.py."""

from unittest import mock

import torch

from tests.support.hard_games import Plain
from tests.support.parity import EXACT, distance, train


class OneSample(Plain):
    """A draw of a fixed shape, where a rank has one sample."""

    def fake(self, real):
        return super().fake(real) * torch.randn(512, dtype=real.dtype)[:6] + torch.randn(len(real), 6).to(real)


def two(step):
    return {"x": torch.arange(12.0, dtype=torch.float64).view(2, 6) / 10 + step}


def said(*args, **kwargs):
    """The lines about draws, with the weights."""
    with mock.patch("strategies.private.say") as info:
        found = train(*args, **kwargs)
    return [call.args[0] for call in info.call_args_list], found


def test_a_fixed_shape_is_one_draw_where_a_rank_has_one_sample(ranks):
    alone = train(OneSample, two, policy="single")
    (lines, found), (others, _) = ranks(2).run(said, OneSample, two, world=2, check=True)
    assert distance(found, alone) < EXACT
    words = "draws [512] once for the whole batch (normal_), [1, 6] for each sample (normal_)"
    assert lines == [f"phase 'discriminator' {words}", f"phase 'generator' {words}"] and others == []
    assert said(OneSample, two, policy="single")[0] == []

"""What is measured of two players, and when there is advice."""

import re
from types import SimpleNamespace

import pytest
import torch

from gan.app.training import health
from gan.app.training.health import Health


def test_pairs_are_counted_and_equal_scores_count_half():
    some, others = torch.tensor([3.0, 1.0]), torch.tensor([[2.0], [1.0], [0.0]])
    assert health.above(some, others) == pytest.approx((3 + 1 + 0.5) / 6)
    assert health.above(others, some) == pytest.approx(1 - 4.5 / 6)


def test_pictures_that_are_alike_do_not_differ():
    pictures = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    whole = health.differences(pictures)
    assert health.differences(0.5 * pictures) == pytest.approx(0.5 * whole)
    assert health.differences(pictures[:1].expand(8, -1, -1, -1)) < 1e-6


GAME = SimpleNamespace(gamma=1.0)
WELL = {"memorised": 0.5, "told_apart": 0.8, "diversity": 0.9}


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({}, None),
        ({"memorised": 0.9}, "learns them by heart"),
        ({"diversity": 0.1}, "by 10% .* collapsed"),
        ({"diversity": 9.0}, "by 900% .* runs away"),
        ({"told_apart": 0.51}, "is guessing"),
    ],
)
def test_advice_comes_once_after_a_while_outside_of_the_range(figures, said):
    run = Health(1000)
    lines = [run.advice({**WELL, **figures}, GAME) for _ in range(health.WHILE - 1)]
    assert not any(lines)
    found = [line for _ in range(3 * health.WHILE) for line in run.advice({**WELL, **figures}, GAME)]
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])


@pytest.mark.parametrize(
    ("game", "said"),
    [
        (dict(gamma=1.0, ada=None), ["augment more, or give it", "lower gamma", "raise gamma, or lower"]),
        (dict(penalty=1.0, rates=(1, 2)), ["give", "raise its learning rate, or lower penalty", "raise penalty"]),
        (dict(rate=1.0), ["give it more pictures", "make it wider", "lower the learning rates, or go back"]),
    ],
)
def test_advice_names_only_what_the_game_has(game, said):
    run, ill = Health(1000), {"memorised": 0.9, "told_apart": 0.51, "diversity": 0.1}
    found = [line.rpartition("; ")[2] for _ in range(health.WHILE) for line in run.advice(ill, SimpleNamespace(**game))]
    found[1] = found[1].removeprefix("if the pictures are not good, ")
    assert all(map(str.startswith, found, said)) and len(found) == 3


def test_one_figure_out_of_its_range_is_no_reason_for_advice():
    run = Health(1000)
    lines = [run.advice({**WELL, "memorised": 0.95 if turn % health.WHILE == 0 else 0.5}, GAME) for turn in range(50)]
    assert not any(lines)


def test_a_long_run_is_measured_as_often_as_a_short_one():
    assert Health(100).every == health.APART
    assert Health(1_000_000).every == 1_000_000 // health.TIMES

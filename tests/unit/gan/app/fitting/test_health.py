"""When there is advice about two players."""

import re
from types import SimpleNamespace

import pytest

from gan.app.fitting import health
from gan.app.fitting.health import Health

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

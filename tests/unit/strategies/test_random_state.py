"""Random states survive a checkpoint."""

import contextlib
import random

import numpy as np
import pytest
import torch

from gan.files.checkpoint import load
from gan.files.errors import NOT_SO
from strategies import random_state
from strategies.checkpoint.writing import save


def reseed(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def draw():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random(), random.gauss(0, 1)


def test_draws_go_on_where_they_were_after_a_checkpoint(tmp_path):
    reseed(5)
    draw()
    save(tmp_path / "x.ckpt", {"state": random_state.capture()})
    expected = draw()
    assert draw() != expected
    state = load(tmp_path / "x.ckpt")["state"]
    random_state.check(state)
    random_state.restore(state)
    assert draw() == expected


@pytest.mark.parametrize(
    "change",
    [
        {"torch": torch.zeros(3)},
        {"numpy": ("MT19937", torch.zeros(3), 1, 0, 0.0)},
        {"numpy": None},
        {"python": (3, (None,) * 625, None)},
        {"python": (3, (1,), None)},
    ],
)
def test_what_is_no_state_is_noticed_before_anything_is_restored(change):
    reseed(5)
    expected = draw()
    reseed(5)
    with pytest.raises(NOT_SO):
        random_state.check(random_state.capture() | change)
    assert draw() == expected


def test_a_change_is_that_of_torchs_generators():
    before = random_state.capture()
    draw_only = {"torch": lambda: torch.rand(()), "numpy": np.random.rand, "python": random.random}
    for name, of_one in draw_only.items():
        random_state.restore(before)
        assert not random_state.changed(before)
        of_one()
        assert random_state.changed(before) == (name == "torch")


def test_what_is_drawn_aside_leaves_no_trace_even_after_an_error():
    reseed(7)
    expected = draw()
    reseed(7)
    with contextlib.suppress(KeyError), random_state.untouched():
        reseed(1)
        draw()
        raise KeyError
    assert draw() == expected

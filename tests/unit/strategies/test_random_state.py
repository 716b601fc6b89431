"""Random states survive a checkpoint."""

import contextlib
import random

import numpy as np
import torch

from strategies import random_state


def reseed(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def draw():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random(), random.gauss(0, 1)


def test_draws_go_on_where_they_were_after_a_weights_only_load(tmp_path):
    reseed(5)
    draw()
    torch.save(random_state.capture(), tmp_path / "state.pt")
    expected = draw()
    assert draw() != expected
    random_state.restore(torch.load(tmp_path / "state.pt", weights_only=True))
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

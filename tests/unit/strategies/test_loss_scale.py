"""The loss scale follows the rule of torch's GradScaler."""

import torch

from strategies.optimizers import LossScale


def test_it_falls_at_once_and_grows_after_a_row_of_good_updates():
    finite = [True] * 3 + [False] + [True] * 7 + [False, False] + [True] * 4
    ours = LossScale(2.0**8, growth_interval=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for good in finite:
        scaler.scale(weight.sum())
        weight.grad = torch.ones(1) if good else torch.full((1,), float("inf"))
        scaler.step(optimizer)
        scaler.update()
        ours.update(good)
        assert ours.scale == scaler.get_scale()


def test_its_state_travels():
    scale = LossScale()
    scale.update(False)
    scale.update(True)
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    assert other == scale

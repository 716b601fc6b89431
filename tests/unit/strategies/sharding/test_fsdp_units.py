from types import SimpleNamespace
from unittest import mock

import torch

from strategies.sharding.fsdp_units import UnitReduction


def test_gradients_are_given_when_the_streams_that_made_them_have_ended():
    """On a GPU. The device as a whole is not waited for; the CPU waits for what is on its way to it."""
    events = mock.Mock()
    events.offload.synchronize = mock.Mock(side_effect=lambda: gradient.fill_(6.0))
    gradient = torch.zeros(2)
    weight = SimpleNamespace(
        grad_offload_event=events.offload,
        sharded_param=SimpleNamespace(grad=SimpleNamespace(to_local=lambda: gradient)),
        piece=SimpleNamespace(grad=None),
    )
    group = SimpleNamespace(_wait_for_post_backward=events.wait)
    unit = SimpleNamespace(group=group, learning=["w"], everything={"w": weight})
    with mock.patch("torch.accelerator.synchronize", side_effect=AssertionError):
        UnitReduction(unit).give(scale=2.0)
    assert events.mock_calls == [mock.call.wait(), mock.call.offload.synchronize()]
    assert torch.equal(weight.piece.grad, torch.full((2,), 3.0))
    assert weight.grad_offload_event is None and weight.sharded_param.grad is None

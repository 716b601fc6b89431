"""Versions: what is written counts, and a graph that is ended does not."""

import pytest
import torch
from torch import nn

from strategies.sharding.versions import end_graphs, forget_ended, version_of


def test_a_write_counts_and_an_ended_graph_does_not():
    weight = nn.Parameter(torch.ones(3))
    before = version_of(weight)
    end_graphs([weight])
    assert version_of(weight) == before
    with torch.no_grad():
        weight.add_(1)
    assert version_of(weight) == before + 1


def test_backward_in_an_ended_graph_is_torchs_error():
    weight = nn.Parameter(torch.ones(3))
    loss = weight.square().sum()
    end_graphs([weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_afterwards_the_weight_is_as_it_was():
    weight = nn.Parameter(torch.ones(3))
    end_graphs([weight])
    forget_ended(weight)
    assert not vars(weight)


def test_a_tensor_of_inference_has_no_version():
    with torch.inference_mode():
        assert version_of(torch.ones(3)) == 0

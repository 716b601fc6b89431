"""A parameter without its values: it keeps its name, shape and hooks, and refuses to be read."""

import copy
import io

import pytest
import torch
from torch import nn

from gan.files.errors import UserError
from strategies.sharding.resharded_parameter import hide, show


@pytest.fixture
def net():
    net = nn.Linear(3, 2)
    hide(net.weight, torch.full((), torch.nan))
    return net


READS = {
    "a forward": lambda net: net(torch.ones(1, 3)),
    "a state dict": lambda net: net.state_dict(),
    "saving a state dict": lambda net: torch.save(net.state_dict(keep_vars=True), io.BytesIO()),
    "saving it": lambda net: torch.save(net.weight, io.BytesIO()),
    "a deep copy": copy.deepcopy,
    "detach": lambda net: net.weight.detach(),
    "data": lambda net: net.weight.data,
    "arithmetic": lambda net: net.weight + 1,
    "an element": lambda net: net.weight[0, 0],
    "a list": lambda net: net.weight.tolist(),
    "numpy": lambda net: net.weight.numpy(),
    "a norm": lambda net: torch.linalg.vector_norm(net.weight),
    "a comparison": lambda net: torch.equal(net.weight, net.weight),
    "another device": lambda net: net.weight.to("cpu"),
    "other memory": lambda net: setattr(net.weight, "data", torch.zeros(2, 3)),
    "writing": lambda net: nn.init.zeros_(net.weight),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_its_values_cannot_be_read_or_written(read, net):
    with pytest.raises(UserError) as refused:
        read(net)
    assert "of shape (2, 3) is sharded" in str(refused.value)
    assert "`with trainer.strategy.gathered():`, on all ranks" in str(refused.value)
    assert "write them inside gathered(write=True)" in str(refused.value)


def test_what_needs_no_values_is_answered(net):
    weight = net.weight
    assert (weight.shape, weight.numel(), weight.dtype, weight.device.type) == ((2, 3), 6, torch.float32, "cpu")
    assert weight.requires_grad and weight.grad is None and weight.is_leaf
    assert sum(p.numel() for p in net.parameters()) == 8
    assert list(net.state_dict(keep_vars=True)) == ["weight", "bias"]
    weight.register_post_accumulate_grad_hook(lambda _: None)
    weight.requires_grad_(False)
    assert isinstance(weight, nn.Parameter) and {weight: 1}[weight] == 1
    assert repr(weight) == "<sharded parameter of shape (2, 3)>"


def test_it_takes_no_memory_and_is_the_same_object_afterwards(net):
    weight = net.weight
    assert weight.untyped_storage().nbytes() == 4
    hide(weight, torch.full((), torch.nan))  # twice is once
    show(weight, torch.arange(6.0))
    assert net.weight is weight and type(weight) is nn.Parameter and not vars(weight)
    assert torch.equal(weight.detach(), torch.arange(6.0).view(2, 3))


def test_a_class_of_the_authors_own_comes_back():
    class Mine(nn.Parameter):
        pass

    weight = Mine(torch.zeros(2))
    hide(weight, torch.full((), torch.nan))
    show(weight, torch.ones(2))
    assert type(weight) is Mine
